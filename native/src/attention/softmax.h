// Computes weights from the scores of a tile and a block, with a running maximum (Milakov & Gimelshein,
// arXiv 1805.02867), and merges two states.
#pragma once
#include <limits>

#include "../simd_math.h"
#include "formats.h"

namespace onward::attention {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The maximum of a query that has seen no key is -inf. 0 is subtracted from its scores instead, because
// (-inf) - (-inf) would be NaN and the weight must be 0.
inline float reference_of(float max) { return max == -kInfinity ? 0.0f : max; }
inline f32x16 reference_of(f32x16 max) {
  return select(less(splat(-kInfinity), max), max, zero_f32());
}

// min(limit, score) hides positions outside a span: 64 times -inf, 64 times +inf, 64 times -inf.
struct Curtain {
  alignas(64) float limits[3 * kBlock] = {};
  constexpr Curtain() {
    for (int64_t i = 0; i < 3 * kBlock; ++i) limits[i] = i / kBlock == 1 ? kInfinity : -kInfinity;
  }
  // The limits of positions j … j + 15 of a block of which [first, last) is seen.
  f32x16 at(Span seen, int64_t j) const {
    return min(load(limits + kBlock - seen.first + j), load(limits + 2 * kBlock - seen.last + j));
  }
};
inline constexpr Curtain kCurtain;

// 16 entries of a mask from position `j` on; 0 past the last key.
inline f32x16 load_mask(const float* mask, int64_t stride, int64_t j, int64_t positions) {
  const int64_t n = positions - j;
  if (n <= 0) return zero_f32();
  if (stride == 1) return load_first(mask + j, n);
  float lanes[16] = {};
  for (int64_t i = 0; i < 16 && i < n; ++i) lanes[i] = mask[(j + i) * stride];
  return load(lanes);
}

// The part of a block that a query sees.
struct View {
  Span seen;           // in 0 … 64
  const float* mask;   // at the block's first position, or null
  int64_t mask_stride, mask_length;
};

// score = cap * tanh(score * scale / cap) for the first `positions` of a block (Gemma 2, arXiv 2408.00118).
inline void cap_scores(float* scores, int64_t positions, float scale, float cap) {
  for (int64_t j = 0; j < positions; j += 16) {
    const f32x16 part = div(mul(load(scores + j), splat(scale)), splat(cap));
    store(scores + j, mul(tanh(part), splat(cap)));
  }
}

// Computes the final scores of the first `positions` of a block in place; returns the largest.
inline float finish_scores(float* scores, int64_t positions, float scale, const View& view) {
  f32x16 largest = splat(-kInfinity);
  for (int64_t j = 0; j < positions; j += 16) {
    f32x16 score = mul(load(scores + j), splat(scale));
    if (view.mask != nullptr) {
      score = add(score, load_mask(view.mask, view.mask_stride, j, view.mask_length));
    }
    // This order of the operands turns NaN into the limit: -inf outside the span, so that it has no effect;
    // +inf inside, which makes the maximum infinite and the result NaN.
    if (view.seen.first > 0 || view.seen.last < kBlock) {
      score = min(score, kCurtain.at(view.seen, j));
    }
    store(scores + j, score);
    largest = max(score, largest);
  }
  return highest(largest);
}

// finish_scores for a block that is entirely visible and has no mask.
inline float finish_whole_scores(float* scores, float scale) {
  f32x16 score[4];
  ONWARD_UNROLL_TILE for (int v = 0; v < 4; ++v) {
    score[v] = mul(load(scores + v * 16), splat(scale));
    store(scores + v * 16, score[v]);
  }
  // As in finish_scores: a NaN score leaves the maximum unchanged.
  f32x16 largest = splat(-kInfinity);
  ONWARD_UNROLL_TILE for (int v = 0; v < 4; ++v) largest = max(score[v], largest);
  return highest(largest);
}

// Computes weights from scores, stores them as words of F, and adds them to the lanes of `sum`. The sum is of the
// rounded weights, which also multiply the values: so the output stays between the smallest and the largest
// value. If rows have `scales` (those of the values), the products of weights and scales are stored as integers.
// Returns the factor of the stored weights.
template <class F, int VECTORS>
inline float make_weights(const float* scores, float max, float decay, float* words, float* sum, const float* scales) {
  const f32x16 reference = splat(reference_of(max));
  f32x16 weights[4] = {zero_f32(), zero_f32(), zero_f32(), zero_f32()};
  ONWARD_UNROLL_TILE for (int v = 0; v < VECTORS; ++v) {
    weights[v] = exp(sub(load(scores + v * 16), reference));
  }
  float factor = 1.0f;
  if constexpr (std::is_same_v<F, Integers>) {
    f32x16 scaled[VECTORS];
    ONWARD_UNROLL_TILE for (int v = 0; v < VECTORS; ++v) scaled[v] = mul(weights[v], load(scales + v * 16));
    factor = F::store_weights(words, scaled);
  } else {
    ONWARD_UNROLL_TILE for (int v = 0; v < VECTORS; ++v) weights[v] = F::store_weights(words, v * 16, weights[v]);
  }
  const f32x16 added = add(add(weights[0], weights[1]), add(weights[2], weights[3]));
  store(sum, fma(load(sum), splat(decay), added));
  return factor;
}

template <class F>
inline float make_weights(const float* scores, int64_t positions, float max, float decay, float* words,
                         float* sum, const float* scales) {
  switch (positions / 16) {
    case 4: return make_weights<F, 4>(scores, max, decay, words, sum, scales);
    case 3: return make_weights<F, 3>(scores, max, decay, words, sum, scales);
    case 2: return make_weights<F, 2>(scores, max, decay, words, sum, scales);
    default: return make_weights<F, 1>(scores, max, decay, words, sum, scales);
  }
}

// e^(before - after) for up to 16 rows.
inline f32x16 decay_of(f32x16 before, f32x16 after) {
  return exp(sub(before, reference_of(after)));
}

// Adds the state of a later segment to `total`.
inline void merge(const State& total, const State& later, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    const float before = total.max[r], max = before < later.max[r] ? later.max[r] : before;
    const f32x16 keep = decay_of(splat(before), splat(max));
    const f32x16 take = decay_of(splat(later.max[r]), splat(max));
    total.max[r] = max;
    store(total.sum + r * 16,
          fma(load(later.sum + r * 16), take, mul(load(total.sum + r * 16), keep)));
    float* out = total.out + r * total.dim;
    const float* more = later.out + r * total.dim;
    for (int64_t d = 0; d < total.dim; d += 16) {
      store(out + d, fma(load(more + d), take, mul(load(out + d), keep)));
    }
  }
}

}  // namespace onward::attention
