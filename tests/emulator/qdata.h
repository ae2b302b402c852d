// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// E4M3 on a CPU: the value of each code, and the code of a value as cvt.rn.satfinite.e4m3x2.f32 gives it.

#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace sm90 {

inline float value_of_code(uint8_t code) {
  static const std::array<float, 256> kValues = [] {
    std::array<float, 256> values;
    for (int c = 0; c < 256; ++c) {
      const int exponent = c >> 3 & 15, fraction = c & 7;
      float value = exponent == 0 ? std::ldexp(float(fraction), -9) : std::ldexp(float(8 + fraction), exponent - 10);
      if ((c & 0x7F) == 0x7F) value = std::nanf("");
      values[c] = std::copysign(value, c & 0x80 ? -1.0f : 1.0f);
    }
    return values;
  }();
  return kValues[code];
}

// The finite qdata 0 to 0x7E are ordered like their values, so the nearest is one of two neighbors; ties go to even.
inline uint8_t code_of_value(float value) {
  if (std::isnan(value)) return 0x7F;
  const int sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fabs(value);
  if (magnitude >= 448) return uint8_t(sign | 0x7E);
  int below = 0;
  for (int bit = 0x40; bit != 0; bit >>= 1) {
    if (below + bit < 0x7E && value_of_code(uint8_t(below + bit)) <= magnitude) below += bit;
  }
  const float middle = (value_of_code(uint8_t(below)) + value_of_code(uint8_t(below + 1))) / 2;  // exact
  const bool up = magnitude > middle || (magnitude == middle && below % 2 == 1);
  return uint8_t(sign | (below + up));
}

}  // namespace sm90
