// The sums of the lanes of several vectors at once, as floats. Those of floats are taken in the order of
// sum_lanes: lane i and i + 8, then i + 4, i + 2, i + 1. Inlined whatever it costs: the vectors must stay in
// registers.
#pragma once
#include "../simd.h"

namespace onward {

#if defined(__AVX512F__)

constexpr int kSumsAtOnce = 16;

// The sums in lanes of their own. add: of two vectors.
template <class V, class Add>
__attribute__((always_inline)) inline __m512 folded_lanes(const V (&v)[16], Add add) {
  const auto bits = [](auto a) { return (__m512)a.v; };
  // The vectors of a step hold half as many lanes of twice as many sums.
  __m512 quarters[4], pairs[2];
  for (int i = 0; i < 4; ++i) {
    const auto halves = [&](__m512 a, __m512 b) {
      return add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    };
    const __m512 a = halves(bits(v[i]), bits(v[4 + i])), b = halves(bits(v[8 + i]), bits(v[12 + i]));
    quarters[i] = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  for (int i = 0; i < 2; ++i) {
    const __m512d a = _mm512_castps_pd(quarters[2 * i]), b = _mm512_castps_pd(quarters[2 * i + 1]);
    pairs[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  return add(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88), _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd));
}

__attribute__((always_inline)) inline void sum_lanes_of(const f32x16 (&v)[16], float* sums) {
  store(sums, f32x16{folded_lanes(v, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); })});
}

__attribute__((always_inline)) inline void sum_lanes_of(const i32x16 (&v)[16], float* sums) {
  const auto add = [](__m512 a, __m512 b) { return (__m512)_mm512_add_epi32((__m512i)a, (__m512i)b); };
  store(sums, to_f32(i32x16{(__m512i)folded_lanes(v, add)}));
}

#elif defined(__AVX2__)

constexpr int kSumsAtOnce = 4;

// four: the lanes i, i + 4, i + 8, i + 12 of each vector together.
template <class Add>
__attribute__((always_inline)) inline __m128 folded_lanes(const __m128 (&four)[4], Add add) {
  const __m128 a = add(_mm_movelh_ps(four[0], four[1]), _mm_movehl_ps(four[1], four[0]));
  const __m128 b = add(_mm_movelh_ps(four[2], four[3]), _mm_movehl_ps(four[3], four[2]));
  return add(_mm_shuffle_ps(a, b, 0x88), _mm_shuffle_ps(a, b, 0xdd));
}

__attribute__((always_inline)) inline void sum_lanes_of(const f32x16 (&v)[4], float* sums) {
  __m128 four[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 eight = _mm256_add_ps(v[i].lo, v[i].hi);
    four[i] = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  }
  _mm_storeu_ps(sums, folded_lanes(four, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); }));
}

__attribute__((always_inline)) inline void sum_lanes_of(const i32x16 (&v)[4], float* sums) {
  __m128 four[4];
  for (int i = 0; i < 4; ++i) {
    const __m256i eight = _mm256_add_epi32(v[i].lo, v[i].hi);
    four[i] = (__m128)_mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  }
  const auto add = [](__m128 a, __m128 b) { return (__m128)_mm_add_epi32((__m128i)a, (__m128i)b); };
  _mm_storeu_ps(sums, _mm_cvtepi32_ps((__m128i)folded_lanes(four, add)));
}

#else

constexpr int kSumsAtOnce = 2;

template <class V>
__attribute__((always_inline)) inline void sum_lanes_of(const V (&v)[2], float* sums) {
  for (int i = 0; i < 2; ++i) sums[i] = float(sum_lanes(v[i]));
}

#endif

}  // namespace onward
