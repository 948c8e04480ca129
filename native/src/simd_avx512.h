// AVX-512 F, BW, VL, DQ, VNNI, BF16. Included by simd.h.
#pragma once
#include <immintrin.h>

#include "api.h"

namespace onward {

struct f32x16 { __m512 v; };
struct i32x16 { __m512i v; };

inline f32x16 zero_f32() { return {_mm512_setzero_ps()}; }
inline i32x16 zero_i32() { return {_mm512_setzero_si512()}; }
inline f32x16 splat(float a) { return {_mm512_set1_ps(a)}; }
inline i32x16 splat(int32_t a) { return {_mm512_set1_epi32(a)}; }

inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline f32x16 load(const Bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline f32x16 load(const F16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline i32x16 load_i32(const void* p) { return {_mm512_loadu_si512(p)}; }

inline void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
// vcvtneps2bf16 writes subnormal results as 0.
inline void store(Bf16* p, f32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
}
inline void store(F16* p, f32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline f32x16 abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
inline f32x16 sqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
inline f32x16 to_f32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }

namespace avx512 {
// Lanes 8 … 15 over 0 … 7, and further halves: each step folds the upper half onto the lower.
template <class Op128>
inline float fold(__m256 eight, Op128 op) {
  const __m128 four = op(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = op(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(op(two, _mm_movehdup_ps(two)));
}
inline __m256 low_half(__m512 v) { return _mm512_castps512_ps256(v); }
inline __m256 high_half(__m512 v) { return _mm512_extractf32x8_ps(v, 1); }
}  // namespace avx512

inline float sum_lanes(f32x16 a) {
  return avx512::fold(_mm256_add_ps(avx512::low_half(a.v), avx512::high_half(a.v)),
                      [](__m128 x, __m128 y) { return _mm_add_ps(x, y); });
}
inline float max_lanes(f32x16 a) {
  return avx512::fold(_mm256_max_ps(avx512::low_half(a.v), avx512::high_half(a.v)),
                      [](__m128 x, __m128 y) { return _mm_max_ps(x, y); });
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// To the nearest integer, ties to even; what does not fit is undefined.
inline i32x16 to_i32(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
// The low byte of every lane.
inline void store_low_bytes(int8_t* p, i32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
inline int32_t sum_lanes(i32x16 a) { return _mm512_reduce_add_epi32(a.v); }
inline i32x16 add(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }

// acc[i] += w[2i] * x[2i] + w[2i+1] * x[2i+1] over bf16 pairs, without rounding the products;
// subnormal inputs and results count as 0 (vdpbf16ps).
inline f32x16 dot_bf16(f32x16 acc, i32x16 w, i32x16 x) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)x.v)};
}

// acc[i] += the dot product of 4 unsigned bytes of w with 4 signed bytes of x, exact modulo 2^32.
// Assembly, because GCC 12 copies the accumulator before and after the intrinsic, which costs a
// micro-kernel a third of its speed.
inline i32x16 dot_i8(i32x16 acc, i32x16 w, i32x16 x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(x.v));
  return acc;
}

// The same with one word of x for all lanes, read as an operand of the instruction.
inline i32x16 dot_i8(i32x16 acc, i32x16 w, const int32_t* x) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(w.v), "m"(*x));
  return acc;
}

// acc[i] += w[2i] * x[2i] + w[2i+1] * x[2i+1] over pairs of 16-bit integers, exact modulo 2^32.
inline i32x16 dot_i16(i32x16 acc, i32x16 w, i32x16 x) {
  asm("vpdpwssd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(x.v));
  return acc;
}

// 32 bytes as pairs of 16-bit integers, all of them or the first n.
inline i32x16 widen_i8(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline i32x16 widen_first_i8(const int8_t* p, int64_t n) {
  const auto real = n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1;
  return {_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(real, p))};
}
// The low 16 bits of every lane.
inline void store_low_words(int16_t* p, i32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}

template <int kBits>
inline i32x16 shift_left(i32x16 a) { return {_mm512_slli_epi32(a.v, kBits)}; }
template <int kBits>
inline i32x16 shift_right(i32x16 a) { return {_mm512_srli_epi32(a.v, kBits)}; }
inline i32x16 bit_and(i32x16 a, int32_t b) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(b))}; }
inline i32x16 bit_or(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
inline f32x16 as_f32(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
inline i32x16 load_bytes(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline i32x16 load_bytes(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// Of every byte, 0 … 15, the byte of a table.
inline i32x16 look_up(i32x16 a, const uint8_t* table) {
  const __m128i lane = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(lane), a.v)};
}

// Of every lane's lowest 4 bits the float of a table.
inline f32x16 look_up(i32x16 a, const float* table) {
  return {_mm512_permutexvar_ps(a.v, _mm512_loadu_ps(table))};
}
// 16 numbers in E4M3, divided by 256: as float16 their exponents are 8 less. NaN is no number's.
inline f32x16 e4m3_256th(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xbf80)));
  return {_mm512_cvtph_ps(half)};
}

// The low and the high 4 bits of every byte, as bytes.
inline i32x16 low_nibbles(i32x16 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline i32x16 high_nibbles(i32x16 a) {
  return {_mm512_and_si512(_mm512_srli_epi32(a.v, 4), _mm512_set1_epi8(15))};
}
// 16 times the high 4 bits of every byte, and a lane divided by 16: cheaper than high_nibbles where
// the sums of low and high halves are kept apart.
inline i32x16 high_nibbles_16(i32x16 a) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi8(char(0xf0)))};
}
inline i32x16 sixteenth(i32x16 a) { return {_mm512_srai_epi32(a.v, 4)}; }

// Floats to be multiplied by many powers of two, each of which is one addition to their exponents. Zeros
// stay; no product may leave the normal numbers; lanes that are infinite or NaN come out as anything,
// and are for the caller to keep in mind.
using LaneMask = __mmask16;
struct Factors { __m512i over_one; __mmask16 nonzero; };
inline Factors factors_of(f32x16 a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  return {_mm512_sub_epi32(bits, _mm512_castps_si512(_mm512_set1_ps(1.0f))),
          _mm512_cmp_ps_mask(a.v, _mm512_setzero_ps(), _CMP_NEQ_UQ)};
}
inline f32x16 times_power(const Factors& a, const float* power) {
  const __m512i exponent = _mm512_castps_si512(_mm512_set1_ps(*power));
  return {_mm512_castsi512_ps(_mm512_maskz_add_epi32(a.nonzero, a.over_one, exponent))};
}
inline LaneMask broken_lanes(f32x16 a) { return _mm512_fpclass_ps_mask(a.v, 0x99); }
inline f32x16 with_nan(f32x16 a, LaneMask lanes) {
  return {_mm512_mask_mov_ps(a.v, lanes, _mm512_set1_ps(__builtin_nanf("")))};
}

}  // namespace onward
