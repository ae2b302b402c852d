// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Rounding of a tensor core: all 16 products and the addend are cut off 25 places below the largest exponent, summed
// exactly and cut off to FP32 (Hopper in arXiv 2511.10909).

#pragma once

#include <algorithm>
#include <cmath>

namespace emulator {

// An mma.sync: the addend and 16 products.
inline float fused_sum(float addend, const float (&a)[16], const float (&b)[16]) {
  double exact = addend;
  for (int k = 0; k < 16; ++k) exact += double(a[k]) * b[k];
  if (!std::isfinite(exact)) return float(exact);
  double terms[17];
  int exponents[17], largest = -1000;
  const auto exponent_of = [](float x) { return x == 0 ? -1000 : std::max(std::ilogb(x), -126); };
  for (int k = 0; k < 17; ++k) {
    terms[k] = k < 16 ? double(a[k]) * b[k] : addend;
    exponents[k] = k == 16 ? exponent_of(addend) : terms[k] == 0 ? -1000 : exponent_of(a[k]) + exponent_of(b[k]);
    largest = std::max(largest, exponents[k]);
  }
  if (largest == -1000) return 0.0f;
  double sum = 0;
  for (const double term : terms) sum += std::trunc(std::ldexp(term, 25 - largest));
  const double value = std::ldexp(sum, largest - 25);
  float rounded = float(value);
  if (std::fabs(double(rounded)) > std::fabs(value)) rounded = std::nextafter(rounded, 0.0f);
  return rounded;
}

}  // namespace emulator
