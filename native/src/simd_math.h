// Comparisons and elementary functions of 16 floats, over simd.h.
//
//   less(a, b), is_nan(a) -> mask16      select(m, a, b): a where m, else b      any(m)
//   lanes_of(bits) -> mask16             the lanes whose bits, from the lowest on, are set
//   round(a)                 to the nearest integer, ties to even; |a| < 2^22
//   times_power_of_two(a, n) a * 2^n, n integers in -160 … 160; gradual underflow
//   exp(a), tanh(a), times_sigmoid(a, x), gelu_tanh(a), normal_cdf(a)
//   highest(a)               the largest of the 16 lanes
#pragma once
#include "simd.h"

namespace onward {

#if defined(__AVX512F__)

struct mask16 { __mmask16 v; };
inline mask16 less(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline mask16 is_nan(f32x16 a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
inline mask16 either(mask16 a, mask16 b) { return {__mmask16(a.v | b.v)}; }
inline bool any(mask16 m) { return m.v != 0; }
inline mask16 lanes_of(uint32_t bits) { return {__mmask16(bits)}; }
inline f32x16 select(mask16 m, f32x16 a, f32x16 b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
inline f32x16 round(f32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline f32x16 times_power_of_two(f32x16 a, f32x16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline float highest(f32x16 a) { return _mm512_reduce_max_ps(a.v); }

#elif defined(__AVX2__)

struct mask16 { __m256 lo, hi; };
inline mask16 less(f32x16 a, f32x16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
inline mask16 is_nan(f32x16 a) {
  return {_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)};
}
inline mask16 either(mask16 a, mask16 b) {
  return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)};
}
inline bool any(mask16 m) { return _mm256_movemask_ps(_mm256_or_ps(m.lo, m.hi)) != 0; }
inline mask16 lanes_of(uint32_t bits) {
  const auto eight = [](uint32_t of) {
    const __m256i powers = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i found = _mm256_and_si256(_mm256_set1_epi32(int32_t(of)), powers);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(found, powers));
  };
  return {eight(bits), eight(bits >> 8)};
}
inline f32x16 select(mask16 m, f32x16 a, f32x16 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}
inline f32x16 round(f32x16 a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kNearest), _mm256_round_ps(a.hi, kNearest)};
}
// In two factors, because 2^n alone may be no float.
inline f32x16 times_power_of_two(f32x16 a, f32x16 n) {
  const auto scale = [](__m256 value, __m256 power) {
    const __m256i whole = _mm256_cvtps_epi32(power);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    const auto factor = [](__m256i exponent) {
      return _mm256_castsi256_ps(
          _mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
    };
    return _mm256_mul_ps(_mm256_mul_ps(value, factor(half)),
                         factor(_mm256_sub_epi32(whole, half)));
  };
  return {scale(a.lo, n.lo), scale(a.hi, n.hi)};
}
inline float highest(f32x16 a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

#else

struct mask16 { i32x16 v; };
inline mask16 less(f32x16 a, f32x16 b) { return {(i32x16)(a < b)}; }
inline mask16 is_nan(f32x16 a) { return {(i32x16)(a != a)}; }
inline mask16 either(mask16 a, mask16 b) { return {a.v | b.v}; }
inline bool any(mask16 m) {
  int32_t all = 0;
  for (int i = 0; i < 16; ++i) all |= m.v[i];
  return all != 0;
}
inline mask16 lanes_of(uint32_t bits) {
  i32x16 lanes;
  for (int i = 0; i < 16; ++i) lanes[i] = bits >> i & 1 ? -1 : 0;
  return {lanes};
}
inline f32x16 select(mask16 m, f32x16 a, f32x16 b) { return m.v ? a : b; }
// Adding 1.5 * 2^23 leaves no bits for a fraction.
inline f32x16 round(f32x16 a) { return (a + 0x1.8p23f) - 0x1.8p23f; }
// In two factors, because 2^n alone may be no float.
inline f32x16 times_power_of_two(f32x16 a, f32x16 n) {
  const i32x16 whole = to_i32(n), half = whole >> 1;
  return a * (f32x16)((half + 127) << 23) * (f32x16)((whole - half + 127) << 23);
}
inline float highest(f32x16 a) { return max_lanes(a); }

#endif

// x = n ln 2 + f with |f| <= ln 2 / 2, and e^f = 1 + f + f^2 sum; the polynomial is fitted to 3e-9.
struct Reduced { f32x16 n, f, sum; };
inline Reduced reduced(f32x16 x) {
  const f32x16 n = round(mul(x, splat(0x1.715476p+0f)));
  // ln 2 in two parts, the first short enough that n times it is exact.
  f32x16 f = fma(n, splat(-0x1.62e4p-1f), x);
  f = fma(n, splat(-0x1.7f7d1cp-20f), f);
  f32x16 sum = splat(0x1.6a244cp-10f);
  sum = fma(sum, f, splat(0x1.1239d4p-7f));
  sum = fma(sum, f, splat(0x1.5558f2p-5f));
  sum = fma(sum, f, splat(0x1.555492p-3f));
  return {n, f, fma(sum, f, splat(0x1.fffffcp-2f))};
}

// e^x with a relative error below 1.2 units in the last place of the result (2^-23) where that is a
// normal float; exact at 0; NaN stays NaN, -inf becomes 0, +inf stays.
inline f32x16 exp(f32x16 x) {
  // Beyond these limits the result is 0 and infinity: n stays small. The order of the operands lets
  // NaN through.
  const Reduced r = reduced(max(splat(-110.0f), min(splat(100.0f), x)));
  const f32x16 sum = fma(r.sum, r.f, splat(1.0f));
  return times_power_of_two(fma(sum, r.f, splat(1.0f)), r.n);
}

// tanh x within 3 units in the last place (2.61 over every third float); 1 from 9.02 on; NaN stays NaN.
// With t = e^(2|x|) - 1 it is t / (t + 2), and t = 2^n (e^f - 1) + (2^n - 1) loses nothing near 0.
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

// gelu's tanh form: (1 + tanh(u)) / 2 = sigmoid(2u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
inline f32x16 gelu_tanh(f32x16 x) {
  const f32x16 inner = fma(mul(x, x), splat(0.044715f), splat(1.0f));
  return times_sigmoid(x, mul(mul(x, splat(1.5957691216f)), inner));
}

// The standard normal distribution: erfc(-x / sqrt 2) / 2, with a relative error below 1e-6 in both
// tails. erfc(z) e^(z^2) / 2 for z >= 0 is t times a polynomial of degree 9 in t = 1 / (1 + z / 3),
// fitted to 7e-8 relative.
inline f32x16 normal_cdf(f32x16 x) {
  static constexpr float kPolynomial[] = {
      0.018690002282f, -0.099462300555f, 0.166030603103f, -0.095458092050f, 0.106710577042f,
      0.045207263121f, 0.081754446475f, 0.088444739423f, 0.094051555298f, 0.094031172783f};
  // Beyond 20 both tails are 0 or 1, and an infinite square would have no error to put back.
  const f32x16 magnitude = min(splat(20.0f), abs(x));
  const f32x16 z = mul(magnitude, splat(0x1.6a09e6p-1f));
  const f32x16 t = div(splat(1.0f), fma(z, splat(0x1.555556p-2f), splat(1.0f)));
  f32x16 sum = splat(kPolynomial[0]);
  for (int i = 1; i < 10; ++i) sum = fma(sum, t, splat(kPolynomial[i]));
  // e^(-x^2 / 2), with the rounding error of the square put back: it would count 1 + x^2 / 2 times.
  const f32x16 half = mul(magnitude, splat(0.5f));
  const f32x16 square = mul(half, magnitude);
  const f32x16 lost = sub(zero_f32(), fma(half, magnitude, sub(zero_f32(), square)));
  const f32x16 gauss = exp(sub(zero_f32(), square));
  const f32x16 tail = mul(mul(sum, t), fma(gauss, lost, gauss));
  return select(less(x, zero_f32()), tail, sub(splat(1.0f), tail));
}

}  // namespace onward
