// Shared by the kernels whose recurrent state is a matrix S [K, V] per head. The cache has S at the beginning of a
// block of 16 positions and, for each position j of the block, the key k_j [K], the update d_j [V], and the sum
// G_j = g_0 + … + g_j of the logarithms of the decays:
//
//     S after position j = e^{G_j} S + sum over i <= j of e^{G_j - G_i} k_i d_i^T
//
// Every sum has a fixed order, and a column's bits don't depend on the vectors in which it is computed.
#pragma once
#include <cmath>
#include <cstring>
#include <limits>

#include "../sampling/arithmetic.h"
#include "../simd_math.h"
#include "places.h"

namespace onward {

constexpr int64_t kBlock = kStateBlock;
constexpr int64_t kWidest = 256;  // maximum of K and V
using shapes::state::kWide;  // vectors of S that are multiplied at once

// Vectors of 16 columns from `column` on; the last vector of a row may have fewer.
template <int kVectors, bool kPart>
struct Strip {
  int64_t columns;  // in the last vector, if kPart
  f32x16 get(const float* p, int v) const {
    return kPart ? load_first(p + 16 * v, columns) : load(p + 16 * v);
  }
  void put(float* p, int v, f32x16 x) const {
    if (kPart) store_first(p + 16 * v, x, columns);
    else store(p + 16 * v, x);
  }
};

// Calls body(strip, vectors, column) for each whole strip of kVectors vectors from `column` on; returns their end.
template <int kVectors, class Body>
inline int64_t over_whole_strips(int64_t column, int64_t width, Body& body) {
  for (; column + 16 * kVectors <= width; column += 16 * kVectors) {
    body(Strip<kVectors, false>{16}, std::integral_constant<int, kVectors>{}, column);
  }
  return column;
}

// Calls body(strip, vectors, column) for strips that cover `width` columns.
template <class Body>
inline void over_strips(int64_t width, Body&& body) {
  int64_t column = over_whole_strips<kWide>(0, width, body);
  column = over_whole_strips<kWide / 2>(column, width, body);
  if (kWide / 2 > 1) column = over_whole_strips<1>(column, width, body);
  if (column < width) body(Strip<1, true>{width - column}, std::integral_constant<int, 1>{}, column);
}

inline float dot(const float* a, const float* b, int64_t count) {
  f32x16 sum = zero_f32();
  for (int64_t i = 0; i < count; i += 16) sum = fma(load_first(a + i, count - i), load_first(b + i, count - i), sum);
  return sum_lanes(sum);
}

inline float first_lane(f32x16 x) {
  float lanes[16];
  store(lanes, x);
  return lanes[0];
}

inline float softplus(float x) {
  const float tail = first_lane(exp(splat(x > 0 ? -x : x)));
  return (x > 0 ? x : 0.0f) + float(logarithm(1.0 + double(tail)));
}

// out[x, columns of the strip] = S^T x for kTogether of the `count` vectors x from `first` on.
template <int kTogether, int kVectors, class Columns>
inline void read_strip(const float* state, int64_t key_dim, int64_t value_dim, const float* const* x, int64_t first,
                       int64_t count, float* const* out, Columns strip, int64_t column) {
  const float* some[kTogether];
  for (int i = 0; i < kTogether; ++i) some[i] = x[first + i < count ? first + i : first];
  f32x16 sum[kTogether][kVectors];
  for (auto& of_x : sum) {
    for (auto& each : of_x) each = zero_f32();
  }
  for (int64_t k = 0; k < key_dim; ++k) {
    const float* row = state + k * value_dim + column;
    f32x16 s[kVectors];
    for (int v = 0; v < kVectors; ++v) s[v] = strip.get(row, v);
    for (int i = 0; i < kTogether; ++i) {
      const f32x16 factor = splat(some[i][k]);
      for (int v = 0; v < kVectors; ++v) sum[i][v] = fma(factor, s[v], sum[i][v]);
    }
  }
  for (int i = 0; i < kTogether && first + i < count; ++i) {
    for (int v = 0; v < kVectors; ++v) strip.put(out[first + i] + column, v, sum[i][v]);
  }
}

// out[x, :] = S^T x for `count` vectors x [K]. Sums are in the order of the key's features.
inline void read_state(const float* state, int64_t key_dim, int64_t value_dim, const float* const* x, int64_t count,
                       float* const* out) {
  over_strips(value_dim, [&](auto strip, auto vectors, int64_t column) {
    constexpr int kVectors = decltype(vectors)::value;
    constexpr int kTogether = kVectors < kWide ? 4 : 2;
    int64_t first = 0;
    for (; count - first > 1; first += kTogether) {
      read_strip<kTogether, kVectors>(state, key_dim, value_dim, x, first, count, out, strip, column);
    }
    if (first < count) read_strip<1, kVectors>(state, key_dim, value_dim, x, first, count, out, strip, column);
  });
}

// to = S after the 16 positions of a block; may be the same memory as S. keys: k_i of each position. added: d_i
// [16, V]. scaled: working memory [16, V].
inline void end_block(const float* state, const float* const* keys, const float* added, const float* decays, float* to,
                      int64_t key_dim, int64_t value_dim, float* scaled) {
  const float last = decays[kBlock - 1];
  float fading[16];
  store(fading, exp(sub(splat(last), load(decays))));
  const f32x16 whole = exp(splat(last));
  for (int64_t i = 0; i < kBlock; ++i) {
    const f32x16 factor = splat(fading[i]);
    for (int64_t c = 0; c < value_dim; c += 16) {
      const f32x16 d = load_first(added + i * value_dim + c, value_dim - c);
      store_first(scaled + i * value_dim + c, mul(factor, d), value_dim - c);
    }
  }
  over_strips(value_dim, [&](auto strip, auto vectors, int64_t column) {
    constexpr int kVectors = decltype(vectors)::value;
    for (int64_t k = 0; k < key_dim; ++k) {
      f32x16 sum[kVectors];
      for (int v = 0; v < kVectors; ++v) sum[v] = mul(whole, strip.get(state + k * value_dim + column, v));
      for (int64_t i = 0; i < kBlock; ++i) {
        const f32x16 factor = splat(keys[i][k]);
        for (int v = 0; v < kVectors; ++v) {
          sum[v] = fma(factor, strip.get(scaled + i * value_dim + column, v), sum[v]);
        }
      }
      for (int v = 0; v < kVectors; ++v) strip.put(to + k * value_dim + column, v, sum[v]);
    }
  });
}

// data[b, t, h] as a float. strides: of b and t.
template <class T>
inline float scalar_at(const void* data, const int64_t* strides, int64_t b, int64_t t, int64_t h) {
  return first_lane(load_first(static_cast<const T*>(data) + b * strides[0] + t * strides[1] + h, 1));
}

// The output of a row whose state is missing: `count` NaNs.
template <class T>
inline void store_nan(T* out, int64_t count) {
  const f32x16 nan = splat(std::numeric_limits<float>::quiet_NaN());
  for (int64_t c = 0; c < count; c += 16) store_first(out + c, nan, count - c);
}

}  // namespace onward
