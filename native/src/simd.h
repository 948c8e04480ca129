// Vectors of 16 floats or 16 int32, the width of a weight block, on every instruction set.
//
// The three headers below offer the same names:
//   f32x16, i32x16             the vectors
//   splat(float), splat(int32_t), zero_f32(), zero_i32()
//   load(const T*) -> f32x16   T one of float, Bf16, F16; store(T*, f32x16) rounds to nearest even
//   load_i32(const int32_t*)
//   add, sub, mul, div, min, max, fma(a, b, c) = a*b + c, abs, sqrt, to_f32(i32x16)
//   to_i32(f32x16), add(i32x16, i32x16), sum_lanes(i32x16), store_low_bytes(int8_t*, i32x16)
//   sum_lanes, max_lanes       of f32x16, in one fixed order: lane i with lane i + 8, then + 4, 2, 1
//   prefetch(p)                into the nearest cache; p may lie outside of any object
//   shift_left<n>, shift_right<n>, bit_and(i32x16, int32_t), bit_or, as_f32 (the same bits)
//   load_bytes(const uint8_t* or int8_t*) -> i32x16, look_up   a table of 16 bytes
//   dot_bf16, dot_i8, dot_i16, low_nibbles, high_nibbles   steps of the low precision dot products, see there
//   widen_i8, widen_first_i8, store_low_words   pairs of 16-bit integers
//   factors_of, times_power, broken_lanes, with_nan   products with powers of two, see simd_avx512.h
// fma rounds once, except in the portable library, where it rounds twice; either way it does the same
// in every kernel of one library.
#pragma once
#include <cstring>

#include "api.h"

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace onward {

#if !defined(__AVX512F__)
// Of simd_avx512.h. Elsewhere a product with a power of two is a product, and nothing has to be kept in
// mind.
using LaneMask = int;
struct Factors { f32x16 v; };
inline Factors factors_of(f32x16 a) { return {a}; }
inline f32x16 times_power(const Factors& a, const float* power) { return mul(a.v, splat(*power)); }
inline LaneMask broken_lanes(f32x16) { return 0; }
inline f32x16 with_nan(f32x16 a, LaneMask) { return a; }
#endif

// The first n of 16 elements; the others are 0. n in 0 … 16.
template <class T>
inline f32x16 load_first(const T* p, int64_t n) {
  if (n >= 16) return load(p);
  T padded[16];
  std::memset(padded, 0, sizeof padded);
  if (n > 0) std::memcpy(padded, p, size_t(n) * sizeof(T));
  return load(padded);
}

template <class T>
inline void store_first(T* p, f32x16 v, int64_t n) {
  if (n >= 16) return store(p, v);
  T padded[16];
  store(padded, v);
  if (n > 0) std::memcpy(p, padded, size_t(n) * sizeof(T));
}

}  // namespace onward
