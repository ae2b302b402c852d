// Copyright 2026 The jetrl_verl Authors
// SPDX-License-Identifier: Apache-2.0

// Scales and quotients of groups, in the arithmetic of kernels/device/e4m3.py, where it is shown to give the bytes of
// the reference.
//
//   fp32   s = amax / 448 rounded: no quotient by 7 is near a midpoint, so two terms of 1 / 448 suffice
//   pow2   s = 2^ceil(log2(amax / 448)), from the bits of amax: 448 is 1.75 * 2^8
//
// s >= 2^-63. For zeros, and for a group with an Inf or NaN, 1 is stored; the factor of such a group is NaN, and so is
// all its qdata.

#pragma once

#include "sm90.cuh"

namespace jetrl {

template <bool kPow2>
struct GroupScale {
  float stored, divisor;

  JETRL_DEVICE explicit GroupScale(float amax) {
    if constexpr (kPow2) {
      const uint32_t above = (sm90::bits_of(amax) + (0x7FFFFF - 0x600000)) >> 23, least = 127 - 63 + 8;
      divisor = sm90::float_of(((above > least ? above : least) - 8) << 23);
    } else {
      constexpr float kReciprocal = 1.0f / 448.0f, kRest = float(1.0 / 448.0 - double(kReciprocal));
      const float quotient = sm90::multiply_add(amax, kReciprocal, sm90::multiply(amax, kRest));
      divisor = sm90::larger_magnitude(quotient, 0x1p-63f);
    }
    stored = sm90::bits_of(amax) - 1 >= 0x7F800000u - 1 ? 1.0f : divisor;  // zero wraps around
  }

  // The reciprocal of a power of two; NaN where the maximum is not finite.
  JETRL_DEVICE float exact_reciprocal(float amax) const {
    return sm90::multiply_add(amax, 0.0f, sm90::float_of(0x7F000000 - sm90::bits_of(divisor)));
  }
};

// Quotients of FP32 numbers: q = x r with the rounded reciprocal r, and one residual step.
template <bool kPow2>
struct Divider : GroupScale<kPow2> {
  float reciprocal;

  JETRL_DEVICE explicit Divider(float amax) : GroupScale<kPow2>(amax) {
    if constexpr (kPow2) {
      reciprocal = this->exact_reciprocal(amax);
    } else {
      const float about = sm90::reciprocal_about(this->divisor);
      reciprocal = sm90::multiply_add(about, -sm90::multiply_add(about, this->divisor, -1.0f), about);
    }
  }

  JETRL_DEVICE float operator()(float x) const {
    const float about = sm90::multiply(x, reciprocal);
    if constexpr (kPow2) return about;
    return sm90::multiply_add(sm90::multiply_add(about, this->divisor, -x), -reciprocal, about);
  }
};

// Quotients of BF16 numbers: x r + x t with r below 1 / s and t = (1 - r s) r, never negative, so that -0 stays one.
template <bool kPow2>
struct Bf16Divider : GroupScale<kPow2> {
  float first, second;

  JETRL_DEVICE explicit Bf16Divider(float amax) : GroupScale<kPow2>(amax) {
    if constexpr (kPow2) {
      first = this->exact_reciprocal(amax);
    } else {
      // The reciprocal of Inf, 0, becomes NaN.
      first = sm90::float_of(sm90::bits_of(sm90::reciprocal_about(this->divisor)) - 2);
      second = sm90::multiply(sm90::multiply_add(-first, this->divisor, 1.0f), first);
    }
  }

  JETRL_DEVICE float operator()(float x) const {
    if constexpr (kPow2) return sm90::multiply(x, first);
    return sm90::multiply_add(x, first, sm90::multiply(x, second));
  }
};

// The qdata of four numbers, that of the first in the low byte.
template <class Division>
JETRL_DEVICE uint32_t qdata_of(const Division& divide, float a, float b, float c, float d) {
  return sm90::encode_four(divide(a), divide(b), divide(c), divide(d));
}

}  // namespace jetrl
