// 16 vectors of 16 words, as the rows of a square, become its columns.
#pragma once
#include "../simd.h"

namespace onward {

#if defined(__AVX512F__)

__attribute__((always_inline)) inline void transpose(f32x16 (&v)[16]) {
  __m512 pairs[16], fours[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(v[i].v, v[i + 1].v);
    pairs[i + 1] = _mm512_unpackhi_ps(v[i].v, v[i + 1].v);
  }
  // fours[4 a + c]: column c of every quarter, rows 4 a … 4 a + 3.
  for (int i = 0; i < 16; i += 4) {
    for (int half = 0; half < 2; ++half) {
      const __m512d a = _mm512_castps_pd(pairs[i + half]), b = _mm512_castps_pd(pairs[i + half + 2]);
      fours[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      fours[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 a = _mm512_shuffle_f32x4(fours[c], fours[4 + c], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(fours[8 + c], fours[12 + c], 0x88);
    const __m512 d = _mm512_shuffle_f32x4(fours[c], fours[4 + c], 0xdd);
    const __m512 e = _mm512_shuffle_f32x4(fours[8 + c], fours[12 + c], 0xdd);
    v[c] = {_mm512_shuffle_f32x4(a, b, 0x88)};
    v[8 + c] = {_mm512_shuffle_f32x4(a, b, 0xdd)};
    v[4 + c] = {_mm512_shuffle_f32x4(d, e, 0x88)};
    v[12 + c] = {_mm512_shuffle_f32x4(d, e, 0xdd)};
  }
}

#elif defined(__AVX2__)

namespace avx2 {
// A square of 8.
__attribute__((always_inline)) inline void transpose(__m256 (&v)[8]) {
  __m256 pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int half = 0; half < 2; ++half) {
      fours[i + 2 * half] = _mm256_shuffle_ps(pairs[i + half], pairs[i + half + 2], 0x44);
      fours[i + 2 * half + 1] = _mm256_shuffle_ps(pairs[i + half], pairs[i + half + 2], 0xee);
    }
  }
  for (int c = 0; c < 4; ++c) {
    v[c] = _mm256_permute2f128_ps(fours[c], fours[4 + c], 0x20);
    v[4 + c] = _mm256_permute2f128_ps(fours[c], fours[4 + c], 0x31);
  }
}
}  // namespace avx2

inline void transpose(f32x16 (&v)[16]) {
  for (int part = 0; part < 3; ++part) {
    // The squares on the diagonal, then the other two, which change places.
    __m256 a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = part == 0 ? v[i].lo : part == 1 ? v[8 + i].hi : v[i].hi;
    avx2::transpose(a);
    if (part == 2) {
      for (int i = 0; i < 8; ++i) b[i] = v[8 + i].lo;
      avx2::transpose(b);
    }
    for (int i = 0; i < 8; ++i) {
      if (part == 0) v[i].lo = a[i];
      if (part == 1) v[8 + i].hi = a[i];
      if (part == 2) v[8 + i].lo = a[i], v[i].hi = b[i];
    }
  }
}

#else

inline void transpose(f32x16 (&v)[16]) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < i; ++j) {
      const float lane = v[i][j];
      v[i][j] = v[j][i];
      v[j][i] = lane;
    }
  }
}

#endif

}  // namespace onward
