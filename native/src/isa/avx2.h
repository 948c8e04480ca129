// AVX2, FMA, F16C: 16 registers of 256 bits.
#pragma once
#include "x86_256.h"

namespace onward {

// acc[i] += the dot product of 4 unsigned bytes of w with 4 signed bytes of x, exact modulo 2^32.
// vpmaddubsw would saturate: even and odd bytes are widened to 16 bits instead.
inline i32x16 dot_i8(i32x16 acc, i32x16 w, i32x16 x) {
  const auto step = [](__m256i a, __m256i wp, __m256i xp) {
    const __m256i w_even = _mm256_and_si256(wp, _mm256_set1_epi16(0xff));
    const __m256i w_odd = _mm256_srli_epi16(wp, 8);
    const __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(xp, 8), 8);
    const __m256i x_odd = _mm256_srai_epi16(xp, 8);
    a = _mm256_add_epi32(a, _mm256_madd_epi16(w_even, x_even));
    return _mm256_add_epi32(a, _mm256_madd_epi16(w_odd, x_odd));
  };
  return {step(acc.lo, w.lo, x.lo), step(acc.hi, w.hi, x.hi)};
}

inline i32x16 dot_i8(i32x16 acc, i32x16 w, const int32_t* x) { return dot_i8(acc, w, splat(*x)); }
constexpr bool kDotsBytes = false;

// acc[i] += w[2i] * x[2i] + w[2i+1] * x[2i+1] over pairs of 16-bit integers, exact modulo 2^32.
inline i32x16 dot_i16(i32x16 acc, i32x16 w, i32x16 x) {
  return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(w.lo, x.lo)),
          _mm256_add_epi32(acc.hi, _mm256_madd_epi16(w.hi, x.hi))};
}

struct ByteWords {
  static constexpr bool kUsed = true;
  static i32x16 step(i32x16 acc, i32x16 w, i32x16 x) {
    return {_mm256_add_epi16(acc.lo, _mm256_maddubs_epi16(w.lo, x.lo)),
            _mm256_add_epi16(acc.hi, _mm256_maddubs_epi16(w.hi, x.hi))};
  }
  static i32x16 sums(i32x16 words) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(words.lo, one), _mm256_madd_epi16(words.hi, one)};
  }
};

}  // namespace onward
