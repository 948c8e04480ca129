// Root-mean-square and layer normalization of one row. norm.cpp calls them for rows, and the fused kernel in
// heads.cpp for heads.
//
// Every sum over a row has 64 lanes: element i is added to lane i % 64, and a fixed tree adds the lanes. So
// neither the row's place in memory nor other rows matter.
#pragma once
#include <cmath>

#include "simd.h"

namespace onward {

// The sum over i < count of term(x[i]). The last elements are padded with zeros; `valid` of them (16 or fewer)
// are real.
template <class T, class Term>
inline float sum_row(const T* x, int64_t count, Term&& term) {
  f32x16 sum[4] = {zero_f32(), zero_f32(), zero_f32(), zero_f32()};
  int64_t i = 0;
  for (; i + 64 <= count; i += 64) {
    for (int j = 0; j < 4; ++j) sum[j] = term(load(x + i + j * 16), sum[j], 16);
  }
  for (int j = 0; i < count; i += 16, ++j) {
    const int64_t valid = count - i < 16 ? count - i : 16;
    sum[j] = term(load_first(x + i, valid), sum[j], valid);
  }
  return sum_lanes(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
}

// 1 / sqrt(mean(x^2) + eps).
template <class T>
inline float inverse_rms(const T* x, int64_t count, float eps) {
  const float squares =
      sum_row(x, count, [](f32x16 v, f32x16 sum, int64_t) { return fma(v, v, sum); });
  return 1.0f / std::sqrt(squares / float(count) + eps);
}

// How the weight is applied, which differs between model families.
struct RmsWeight {
  const void* data;  // of the row's type, or null for no weight
  float offset;      // added to every weight: 1 for the families that store w - 1
  bool after_cast;   // Llama, Qwen: round x / rms to the row's type first. Gemma: everything in float32
};

// out[i] = x[i] * factor * (weight[i] + offset). out may be x.
template <class T>
inline void scale_row(const T* x, int64_t count, float factor, const RmsWeight& weight, T* out) {
  const f32x16 scale = splat(factor), offset = splat(weight.offset);
  const T* w = static_cast<const T*>(weight.data);
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t n = count - i;
    f32x16 v = mul(load_first(x + i, n), scale);
    if (w != nullptr) {
      if (weight.after_cast) {
        T rounded[16];
        store(rounded, v);
        v = load(rounded);
      }
      v = mul(v, add(load_first(w + i, n), offset));
    }
    store_first(out + i, v, n);
  }
}

template <class T>
inline void rms_norm_row(const T* x, int64_t count, float eps, const RmsWeight& weight, T* out) {
  scale_row(x, count, inverse_rms(x, count, eps), weight, out);
}

// out[i] = (x[i] - mean) / sqrt(variance + eps) * weight[i] + bias[i]; weight and bias may be null.
template <class T>
inline void layer_norm_row(const T* x, int64_t count, float eps, const T* weight, const T* bias,
                           T* out) {
  const float mean =
      sum_row(x, count, [](f32x16 v, f32x16 sum, int64_t) { return add(v, sum); }) / float(count);
  const f32x16 center = splat(mean);
  // Padding must not contribute 0 - mean.
  const float squares = sum_row(x, count, [&](f32x16 v, f32x16 sum, int64_t valid) {
    float lanes[16] = {};
    const f32x16 difference = sub(v, center);
    if (valid == 16) return fma(difference, difference, sum);
    store_first(lanes, difference, valid);
    const f32x16 kept = load(lanes);
    return fma(kept, kept, sum);
  });
  const f32x16 scale = splat(1.0f / std::sqrt(squares / float(count) + eps));
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t n = count - i;
    f32x16 v = mul(sub(load_first(x + i, n), center), scale);
    if (weight != nullptr) v = mul(v, load_first(weight + i, n));
    if (bias != nullptr) v = add(v, load_first(bias + i, n));
    store_first(out + i, v, n);
  }
}

}  // namespace onward
