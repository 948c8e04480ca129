// Chooses each token's experts and their weights from a router's logits.
#include <cmath>

#include "../program.h"
#include "../simd_math.h"
#include "../team.h"

namespace onward::experts {
namespace {

enum Score : int32_t { kSoftmax, kSoftmaxOfChosen, kSigmoid, kScores };

constexpr int64_t kMostExperts = 4096;
constexpr int64_t kLogitsPerChunk = 1 << 13;

struct Router {
  int64_t experts, count, groups, kept_groups, group_best;
  const float* bias;  // or null
  int32_t score;
  bool normalize;
  float scale;

  // Without bias and groups, logits and scores have the same order, and logits have no rounding errors.
  bool by_logits() const { return score == kSoftmaxOfChosen || (bias == nullptr && groups == 1); }
};

// NaN beats every number, so that a broken row is noticed. Among equal values the first wins.
bool beats(float challenger, float best) {
  return !std::isnan(best) && (std::isnan(challenger) || challenger > best);
}

// The `most` best values, the best first; among equal values the first comes first.
struct Best {
  float* values;
  int32_t* ids;
  int64_t most, count = 0;

  void take(float value, int32_t id) {
    if (count == most && !beats(value, values[count - 1])) return;
    int64_t at = count < most ? count++ : count - 1;
    for (; at > 0 && beats(value, values[at - 1]); --at) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = id;
  }
};

// Replaces x[0 … n - 1] by the numerators of its softmax, and returns their sum, taken in one fixed order. x is padded
// to whole vectors.
float exponentials(float* x, int64_t n) {
  float largest = -INFINITY;
  for (int64_t i = 0; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  for (int64_t i = n; i < round_up(n, 16); ++i) x[i] = -INFINITY;
  f32x16 sum = zero_f32();
  for (int64_t i = 0; i < n; i += 16) {
    const f32x16 power = exp(sub(load(x + i), splat(largest)));
    sum = add(sum, power);
    store(x + i, power);
  }
  return sum_lanes(sum);
}

// Replaces the logit of each expert by its score.
void score(const Router& router, float* x) {
  if (router.score == kSigmoid) {
    for (int64_t i = router.experts; i < round_up(router.experts, 16); ++i) x[i] = 0.0f;
    for (int64_t i = 0; i < router.experts; i += 16) store(x + i, times_sigmoid(splat(1.0f), load(x + i)));
  } else {
    const float sum = exponentials(x, router.experts);
    for (int64_t i = 0; i < router.experts; ++i) x[i] /= sum;
  }
}

// Marks the groups with the largest sums of the scores of their one or two best experts.
void keep_groups(const Router& router, const float* values, bool* kept) {
  float sums[kMostExperts];
  int32_t ids[kMostExperts];
  Best best{sums, ids, router.kept_groups};
  const int64_t size = router.experts / router.groups;
  for (int64_t group = 0; group < router.groups; ++group) {
    float two[2];
    int32_t places[2];
    Best pair{two, places, 2};
    for (int64_t i = 0; i < size; ++i) pair.take(values[group * size + i], int32_t(i));
    best.take(router.group_best > 1 && size > 1 ? two[0] + two[1] : two[0], int32_t(group));
    kept[group] = false;
  }
  for (int64_t i = 0; i < best.count; ++i) kept[ids[i]] = true;
}

void choose(const Router& router, const float* values, int32_t* ids) {
  float best_values[kMostExperts];
  bool kept[kMostExperts];
  Best best{best_values, ids, router.count};
  if (router.groups > 1) keep_groups(router, values, kept);
  const int64_t size = router.experts / router.groups;
  for (int64_t group = 0; group < router.groups; ++group) {
    if (router.groups > 1 && !kept[group]) continue;
    for (int64_t i = group * size; i < (group + 1) * size; ++i) best.take(values[i], int32_t(i));
  }
}

// Routes one row. x holds its logits and has room for whole vectors.
void route(const Router& router, float* x, int32_t* ids, float* weights) {
  if (router.by_logits()) choose(router, x, ids);
  if (router.score == kSoftmaxOfChosen) {
    float chosen[kMostExperts];
    for (int64_t i = 0; i < router.count; ++i) chosen[i] = x[ids[i]];
    const float sum = exponentials(chosen, router.count);
    for (int64_t i = 0; i < router.count; ++i) weights[i] = chosen[i] / sum;
  } else {
    score(router, x);
    if (!router.by_logits()) {
      float values[kMostExperts];
      for (int64_t i = 0; i < router.experts; ++i) {
        values[i] = router.bias == nullptr ? x[i] : x[i] + router.bias[i];
      }
      choose(router, values, ids);
    }
    for (int64_t i = 0; i < router.count; ++i) weights[i] = x[ids[i]];
  }
  float sum = 0.0f;
  for (int64_t i = 0; i < router.count; ++i) sum += weights[i];
  for (int64_t i = 0; i < router.count; ++i) {
    weights[i] = (router.normalize ? weights[i] / (sum + 1e-20f) : weights[i]) * router.scale;
  }
}

}  // namespace
}  // namespace onward::experts

// For each row of logits [rows, experts]: the ids [rows, count] of the experts with the highest scores, the highest
// first and among equal scores the lowest id first, and their weights. `score`: softmax (0), softmax over the
// chosen experts only (1), sigmoid (2). With `bias` [experts] (or null), experts are chosen by score + bias. With
// `groups` > 1, they are chosen from the `kept_groups` groups whose `group_best` (one or two) best experts have the
// largest sum. Weights are scores, divided by their sum (+ 1e-20) with `normalize`, times scale.
ONWARD_API int32_t onward_top_experts(int64_t rows, int64_t experts, const void* logits, int32_t dtype,
                                      int64_t stride, int64_t count, int32_t score, const float* bias,
                                      int64_t groups, int64_t kept_groups, int64_t group_best,
                                      int32_t normalize, float scale,
                                      int32_t* ids, float* weights) {
  using namespace onward;
  using namespace onward::experts;
  const bool sizes = rows >= 0 && experts > 0 && experts <= kMostExperts && groups > 0 &&
                     experts % groups == 0 && kept_groups > 0 && kept_groups <= groups;
  if (!sizes || count < 1 || count > experts / groups * kept_groups) return kBadArgument;
  if (score < 0 || score >= kScores || group_best < 1 || group_best > 2) return kBadArgument;
  const Router router{experts, count, groups, kept_groups, group_best, bias, score, normalize != 0, scale};
  const bool known = with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(rows, ceil_div(kLogitsPerChunk, experts), [&](int64_t begin, int64_t end) {
      alignas(64) float x[kMostExperts];
      for (int64_t row = begin; row < end; ++row) {
        const T* from = static_cast<const T*>(logits) + row * stride;
        for (int64_t i = 0; i < experts; i += 16) store(x + i, load_first(from + i, experts - i));
        route(router, x, ids + row * count, weights + row * count);
      }
    });
  });
  return known ? kOk : kBadArgument;
}
ONWARD_INSTRUCTION(onward_top_experts);
