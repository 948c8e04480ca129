// Elementary functions of 16 floats, built on simd.h and the comparisons of the instruction set:
//
//   less(a, b), is_nan(a) -> mask16      select(m, a, b) = m ? a : b             any(m)
//   lanes_of(bits) -> mask16             the lanes whose bits, from the lowest on, are set
//   round(a)                 to the nearest integer, ties to even; |a| < 2^22
//   times_power_of_two(a, n) a * 2^n, n integers in -160 … 160; gradual underflow
//   exp(a), tanh(a), times_sigmoid(a, x), gelu_tanh(a), normal_cdf(a)
//   highest(a)               the largest of the 16 lanes
#pragma once
#include "simd.h"

namespace onward {

// x = n ln 2 + f with |f| <= ln 2 / 2, and e^f = 1 + f + f^2 sum; the polynomial is fitted to 3e-9.
struct Reduced { f32x16 n, f, sum; };
inline Reduced reduced(f32x16 x) {
  const f32x16 n = round(mul(x, splat(0x1.715476p+0f)));
  // ln 2 in two parts; the first has so few bits that its product with n is exact.
  f32x16 f = fma(n, splat(-0x1.62e4p-1f), x);
  f = fma(n, splat(-0x1.7f7d1cp-20f), f);
  f32x16 sum = splat(0x1.6a244cp-10f);
  sum = fma(sum, f, splat(0x1.1239d4p-7f));
  sum = fma(sum, f, splat(0x1.5558f2p-5f));
  sum = fma(sum, f, splat(0x1.555492p-3f));
  return {n, f, fma(sum, f, splat(0x1.fffffcp-2f))};
}

// e^x with a relative error below 1.2 units in the last place (2^-23) if the result is a normal float. Exact at
// 0; NaN stays NaN, -inf becomes 0, +inf stays +inf.
inline f32x16 exp(f32x16 x) {
  // Beyond these limits the result is 0 or infinity; they keep n small. The order of the operands propagates NaN.
  const Reduced r = reduced(max(splat(-110.0f), min(splat(100.0f), x)));
  const f32x16 sum = fma(r.sum, r.f, splat(1.0f));
  return times_power_of_two(fma(sum, r.f, splat(1.0f)), r.n);
}

// tanh x within 3 units in the last place (2.61, tested on every third float); 1 from 9.02 on; NaN stays NaN.
// With t = e^(2|x|) - 1, tanh |x| = t / (t + 2), and t = 2^n (e^f - 1) + (2^n - 1) has no cancellation near 0.
inline f32x16 tanh(f32x16 x) {
  const Reduced r = reduced(min(splat(20.0f), mul(abs(x), splat(2.0f))));
  const f32x16 minus_one = fma(mul(r.f, r.f), r.sum, r.f);
  const f32x16 power = times_power_of_two(splat(1.0f), r.n);
  const f32x16 t = fma(minus_one, power, sub(power, splat(1.0f)));
  const f32x16 size = div(t, add(t, splat(2.0f)));
  return select(less(x, zero_f32()), sub(zero_f32(), size), size);
}

// a / (1 + e^-x), within 3 units in the last place.
inline f32x16 times_sigmoid(f32x16 a, f32x16 x) {
  return div(a, add(splat(1.0f), exp(sub(zero_f32(), x))));
}

// The tanh form of gelu: (1 + tanh(u)) / 2 = sigmoid(2u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
inline f32x16 gelu_tanh(f32x16 x) {
  const f32x16 inner = fma(mul(x, x), splat(0.044715f), splat(1.0f));
  return times_sigmoid(x, mul(mul(x, splat(1.5957691216f)), inner));
}

// The distribution function of the standard normal distribution, erfc(-x / sqrt 2) / 2, with a relative error
// below 1e-6 in both tails. For z >= 0, erfc(z) e^(z^2) / 2 is t times a polynomial of degree 9 in
// t = 1 / (1 + z / 3), with a relative error of 7e-8.
inline f32x16 normal_cdf(f32x16 x) {
  static constexpr float kPolynomial[] = {
      0.018690002282f, -0.099462300555f, 0.166030603103f, -0.095458092050f, 0.106710577042f,
      0.045207263121f, 0.081754446475f, 0.088444739423f, 0.094051555298f, 0.094031172783f};
  // Beyond 20 the result is 0 or 1, and the rounding error of an infinite square could not be corrected.
  const f32x16 magnitude = min(splat(20.0f), abs(x));
  const f32x16 z = mul(magnitude, splat(0x1.6a09e6p-1f));
  const f32x16 t = div(splat(1.0f), fma(z, splat(0x1.555556p-2f), splat(1.0f)));
  f32x16 sum = splat(kPolynomial[0]);
  for (int i = 1; i < 10; ++i) sum = fma(sum, t, splat(kPolynomial[i]));
  // e^(-x^2 / 2), corrected for the rounding error of the square, which would be magnified 1 + x^2 / 2 times.
  const f32x16 half = mul(magnitude, splat(0.5f));
  const f32x16 square = mul(half, magnitude);
  const f32x16 lost = sub(zero_f32(), fma(half, magnitude, sub(zero_f32(), square)));
  const f32x16 gauss = exp(sub(zero_f32(), square));
  const f32x16 tail = mul(mul(sum, t), fma(gauss, lost, gauss));
  return select(less(x, zero_f32()), tail, sub(splat(1.0f), tail));
}

}  // namespace onward
