// The sums of the lanes of several vectors at once. Each is taken in the order of sum_lanes: lane i
// and i + 8, then i + 4, i + 2, i + 1. Inlined whatever it costs: the vectors must stay in registers.
#pragma once
#include "../simd.h"

namespace onward {

#if defined(__AVX512F__)

constexpr int kSumsAtOnce = 16;

__attribute__((always_inline)) inline void sum_lanes_of(const f32x16 (&v)[16], float* sums) {
  // The vectors of a step hold half as many lanes of twice as many sums.
  __m512 quarters[4], pairs[2];
  for (int i = 0; i < 4; ++i) {
    const auto halves = [](f32x16 a, f32x16 b) {
      return _mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44),
                           _mm512_shuffle_f32x4(a.v, b.v, 0xee));
    };
    const __m512 a = halves(v[i], v[4 + i]), b = halves(v[8 + i], v[12 + i]);
    quarters[i] =
        _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  for (int i = 0; i < 2; ++i) {
    const __m512d a = _mm512_castps_pd(quarters[2 * i]), b = _mm512_castps_pd(quarters[2 * i + 1]);
    pairs[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88),
                                       _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd)));
}

#elif defined(__AVX2__)

constexpr int kSumsAtOnce = 4;

__attribute__((always_inline)) inline void sum_lanes_of(const f32x16 (&v)[4], float* sums) {
  __m128 four[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 eight = _mm256_add_ps(v[i].lo, v[i].hi);
    four[i] = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  }
  const __m128 a = _mm_add_ps(_mm_movelh_ps(four[0], four[1]), _mm_movehl_ps(four[1], four[0]));
  const __m128 b = _mm_add_ps(_mm_movelh_ps(four[2], four[3]), _mm_movehl_ps(four[3], four[2]));
  _mm_storeu_ps(sums, _mm_add_ps(_mm_shuffle_ps(a, b, 0x88), _mm_shuffle_ps(a, b, 0xdd)));
}

#else

constexpr int kSumsAtOnce = 2;

__attribute__((always_inline)) inline void sum_lanes_of(const f32x16 (&v)[2], float* sums) {
  for (int i = 0; i < 2; ++i) sums[i] = sum_lanes(v[i]);
}

#endif

}  // namespace onward
