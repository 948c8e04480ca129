// The functions of sampling, with the operations of src/onward/sampling/noise.py: only sums, products and
// quotients, whose rounding IEEE 754 defines, so the bits are the same everywhere. No fma and no libm.
#pragma once
#include <cmath>

#include "lanes.h"

namespace onward {

// e^s for s <= 0, float32, within 2 units in the last place; s is clamped to at least -40.
inline f32x16 relative_probability(f32x16 s) {
  s = max(s, splat(-40.0f));
  const f32x16 n = round(mul(s, splat(0x1.715476p+0f)));
  // ln 2 in two parts; the first has so few bits that its product with n is exact.
  f32x16 f = sub(s, mul(n, splat(0x1.62e4p-1f)));
  f = sub(f, mul(n, splat(0x1.7f7d1cp-20f)));
  f32x16 sum = splat(0x1.6a244cp-10f);
  sum = add(mul(sum, f), splat(0x1.1239d4p-7f));
  sum = add(mul(sum, f), splat(0x1.5558f2p-5f));
  sum = add(mul(sum, f), splat(0x1.555492p-3f));
  sum = add(mul(sum, f), splat(0x1.fffffcp-2f));
  sum = add(mul(sum, f), splat(1.0f));
  sum = add(mul(sum, f), splat(1.0f));
  return times_power_of_two(sum, n);
}

// The natural logarithm of a positive normal double, with a relative error below 4e-16.
inline double logarithm(double x) {
  int exponent;
  double mantissa = std::frexp(x, &exponent);
  if (mantissa < 0x1.6a09e667f3bcdp-1) {
    mantissa += mantissa;
    exponent -= 1;
  }
  // The series of log m = 2 artanh r with r = (m - 1) / (m + 1).
  const double f = mantissa - 1.0;
  const double r = f / (f + 2.0);
  const double square = r * r;
  double sum = 0.0;
  for (int k = 19; k >= 3; k -= 2) sum = sum * square + 1.0 / k;
  const double twice = r + r;
  return (twice + twice * (sum * square)) + exponent * 0x1.62e42fefa39efp-1;
}

// Standard Gumbel noise from a word of random bits.
inline double gumbel(uint32_t word) {
  return -logarithm(-logarithm((double(word) + 0.5) * 0x1p-32));
}

}  // namespace onward
