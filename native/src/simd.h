// Vectors of 16 floats or 16 int32, the width of a weight block, on every instruction set.
//
// An instruction set is a header isa/NAME.h and a line in CMakeLists.txt, which defines ONWARD_ISA_HEADER for its
// library. Kernels never test for an instruction set by name. Every header defines:
//   f32x16, i32x16             the vectors
//   splat(float), splat(int32_t), zero_f32(), zero_i32()
//   load(const T*) -> f32x16   T is float, Bf16 or F16; store(T*, f32x16) rounds to nearest even
//   load_i32(const int32_t*)
//   add, sub, mul, div, min, max, fma(a, b, c) = a*b + c, abs, sqrt, to_f32(i32x16)
//   to_i32(f32x16), add(i32x16, i32x16), sum_lanes(i32x16), store_low_bytes(int8_t*, i32x16)
//   sum_lanes, max_lanes       of f32x16, in one fixed order: lane i with lane i + 8, then + 4, 2, 1
//   prefetch(p)                into the L1 cache; p may be outside of any object
//   shift_left<n>, shift_right<n>, bit_and(i32x16, int32_t), bit_or, as_f32 (the same bits)
//   load_bytes(const uint8_t* or int8_t*) -> i32x16, look_up   in a table of 16 bytes
//   dot_bf16, dot_i8, dot_i16, low_nibbles, high_nibbles   steps of the low-precision dot products, see the headers
//   widen_i8, widen_first_i8, store_low_words   pairs of 16-bit integers
//   load_first_words, pair_words   16-bit words
//   kDotsBf16, kDotsBytes      whether dot_bf16 and dot_i8 are one instruction. If not, products of floats and of 16-bit
//                              words are cheaper (linear/kernels.h), and attention over bf16 uses floats
//   ByteWords                  whether (kUsed) and how dot products of bytes are summed in 16-bit words, as long as no
//                              sum overflows: step adds products to words, sums adds pairs of words
//   mask16 and its operations, round, times_power_of_two, highest   see simd_math.h
//   sum_lanes_of(const V (&)[N], float*)   sum_lanes of several vectors, if there is a cheaper way than below
//   transpose(f32x16 (&)[16])
//   bits, complement_24, UnitSums, PhiloxLanes   see sampling/lanes.h
//   shapes                     tile shapes of the kernels that keep their sums in registers
// fma rounds once, except in the portable library, where it rounds twice. It is the same in all kernels of a library.
#pragma once
#include <cstring>

#include "api.h"

namespace onward {

// Relative probabilities are integers in these units, so that their sums are exact and don't depend on the order.
constexpr float kUnits = 0x1p40f;

}  // namespace onward

#include ONWARD_ISA_HEADER

namespace onward {

// The sums of the lanes of several vectors as floats, with the bits of sum_lanes.
template <class V, int N>
__attribute__((always_inline)) inline void sum_lanes_of(const V (&v)[N], float* sums) {
  _Pragma("GCC unroll 32") for (int i = 0; i < N; ++i) sums[i] = float(sum_lanes(v[i]));
}

// Loads the first n of 16 elements; the others are 0. n in 0 … 16.
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
