// AVX-512 F, BW, VL, DQ, VNNI and BF16: 32 registers of 512 bits.
#pragma once
#include "x86_512.h"

namespace onward {

// vcvtneps2bf16 writes subnormal results as 0.
inline void store(Bf16* p, f32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
}

// acc[i] += w[2i] * x[2i] + w[2i+1] * x[2i+1] over bf16 pairs, without rounding the products;
// subnormal inputs and results count as 0 (vdpbf16ps).
inline f32x16 dot_bf16(f32x16 acc, i32x16 w, i32x16 x) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)x.v)};
}
constexpr bool kDotsBf16 = true;

}  // namespace onward
