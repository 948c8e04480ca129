// AVX-512 F, BW, VL, DQ and VNNI without BF16 (Cascade Lake, Ice Lake): 32 registers of 512 bits.
//
// Every sum has the order that it has with AVX2, whose bits these are (docs/decisions/0025).
#pragma once
#include "x86_512.h"

namespace onward {

// Round to nearest even by adding half of the last bit that stays; NaN keeps its sign and becomes quiet.
inline void store(Bf16* p, f32x16 a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i all = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x00400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(all, 16)));
}

// acc[i] += w[2i+1] * x[2i+1], then += w[2i] * x[2i], over bf16 pairs: the order of vdpbf16ps.
inline f32x16 dot_bf16(f32x16 acc, i32x16 w, i32x16 x) {
  const __m512i high = _mm512_set1_epi32(int32_t(0xffff0000));
  acc.v = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w.v, high)),
                          _mm512_castsi512_ps(_mm512_and_si512(x.v, high)), acc.v);
  return {_mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w.v, 16)),
                          _mm512_castsi512_ps(_mm512_slli_epi32(x.v, 16)), acc.v)};
}
constexpr bool kDotsBf16 = false;

}  // namespace onward
