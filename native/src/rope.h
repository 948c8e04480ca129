// Rotary position embedding (Su et al., arXiv 2104.09864) of one row. rope.cpp calls it for heads, and the fused
// kernel in heads.cpp between a norm and the cache.
#pragma once
#include <cstring>

#include "simd.h"

namespace onward {

// Pairs (i, pairs + i). Every product and sum is rounded, as in the definition.
template <class T>
inline void rotate_split(const T* x, const float* cos, const float* sin, int64_t pairs, T* out) {
  for (int64_t i = 0; i < pairs; i += 16) {
    const int64_t n = pairs - i;
    const f32x16 c = load_first(cos + i, n), s = load_first(sin + i, n);
    const f32x16 first = load_first(x + i, n), second = load_first(x + pairs + i, n);
    store_first(out + i, sub(mul(first, c), mul(second, s)), n);
    store_first(out + pairs + i, add(mul(second, c), mul(first, s)), n);
  }
}

// Pairs (2i, 2i + 1).
template <class T>
inline void rotate_interleaved(const T* x, const float* cos, const float* sin, int64_t pairs,
                               T* out) {
  for (int64_t i = 0; i < pairs; i += 8) {
    const int64_t n = pairs - i < 8 ? pairs - i : 8;
    float lanes[16], swapped[16], c[16] = {}, s[16] = {};
    const f32x16 v = load_first(x + 2 * i, 2 * n);
    store(lanes, v);
    for (int64_t j = 0; j < 8; ++j) {
      swapped[2 * j] = lanes[2 * j + 1];
      swapped[2 * j + 1] = lanes[2 * j];
    }
    for (int64_t j = 0; j < n; ++j) {
      c[2 * j] = c[2 * j + 1] = cos[i + j];
      s[2 * j] = -sin[i + j];
      s[2 * j + 1] = sin[i + j];
    }
    store_first(out + 2 * i, add(mul(v, load(c)), mul(load(swapped), load(s))), 2 * n);
  }
}

// Rotates the first 2 * pairs features of a row and copies the others. out may be x.
template <class T>
inline void rotate_row(const T* x, int64_t dim, const float* cos, const float* sin, int64_t pairs,
                       bool interleaved, T* out) {
  if (interleaved) {
    rotate_interleaved(x, cos, sin, pairs, out);
  } else {
    rotate_split(x, cos, sin, pairs, out);
  }
  if (out != x && dim > 2 * pairs) {
    std::memcpy(out + 2 * pairs, x + 2 * pairs, size_t(dim - 2 * pairs) * sizeof(T));
  }
}

}  // namespace onward
