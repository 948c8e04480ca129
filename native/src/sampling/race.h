// Draws an id for one row: argmax of score + Gumbel noise over the kept ids, without computing most of the noise.
//
// Gumbel noise is g = -log E, where E = -log u is exponentially distributed. The id with the largest s + g is the
// one with the smallest arrival time E / e^s, in a race in which the speed of an id is m = e^s. Let Z be the sum of
// all m. Within a time T, about T Z ids arrive. Only their noise is computed, and finding them needs no logarithm,
// because E >= 1 - u:
//
//     an id with 1 - u >= 1.0001 m T arrives after T, so its s + g is below -log T.
//
// If the best kept id of the others has s + g >= -log T, it is drawn; otherwise the race is repeated with a larger
// T. The most likely id is always kept and arrives before 23 (u >= 2^-33, so E < 22.9), which ends the race. By the
// same bound, an id whose score is 26.01 below the best is never drawn: E is at least 2^-33, and
// 2^-33 e^26.01 > 22.9. The margin of 1.0001 is far above the rounding errors of m (3e-7) and of float and double
// arithmetic (1e-7, 1e-14).
//
// top-p needs no sort: an id is kept if the ids with a larger m have a sum below p Z. This takes one sum per tested
// id, of integers and therefore in any order. The first id to arrive is kept with a probability of at least p.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>

#include "arithmetic.h"
#include "team.h"

namespace onward {

constexpr int64_t kBlock = 64;   // ids that are skipped or computed together: 16 Philox counters
constexpr int64_t kGrain = 128;  // blocks per chunk

struct SampleOptions {
  float temperature;  // 0: greedy
  int64_t top_k;      // 0: all
  float top_p;        // 1 or more: all
  float min_score;    // keeps ids with at least this score; -inf: all
  uint64_t seed;
  uint32_t position;
};

struct Candidate {
  double score;  // including noise
  int64_t id;
  float m;
};

// The working memory of a row, in one allocation.
struct RowMemory {
  explicit RowMemory(int64_t columns) : blocks(ceil_div(columns, kBlock)) {}

  int64_t bytes() const {
    const int64_t ids = blocks * kBlock;
    return blocks * (8 + 8 + 4 + 4) + ids * (4 + int64_t(sizeof(Candidate)));
  }
  void place(char* memory) {
    const auto take = [&memory](auto*& array, int64_t count) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory);
      memory += count * int64_t(sizeof *array);
    };
    take(candidates, blocks * kBlock);
    take(sums, blocks);
    take(masks, blocks);
    take(m, blocks * kBlock);
    take(block_max, blocks);
    take(block_m, blocks);
  }

  int64_t blocks;
  Candidate* candidates;  // also used to find the k-th largest logit
  int64_t* sums;          // per block: the sum of m, in units of 2^-40
  uint64_t* masks;        // per block: the ids that may arrive in time
  float* m;               // relative probabilities e^s; 0 for ids that a filter before top-p removes
  float* block_max;       // per block: the largest logit, or NaN if the block has one
  float* block_m;         // per block: the largest m
};

// Converts floats other than NaN to integers of the same order, and back.
inline int32_t ordered_bits(float a) {
  int32_t i;
  std::memcpy(&i, &a, sizeof i);
  return i < 0 ? int32_t(0x80000000u - uint32_t(i)) : i;
}
inline float from_ordered_bits(int32_t i) {
  if (i < 0) i = int32_t(0x80000000u - uint32_t(i));
  float a;
  std::memcpy(&a, &i, sizeof a);
  return a;
}

template <class T>
class Race {
 public:
  Race(const T* x, int64_t columns, const SampleOptions& options, RowMemory& memory)
      : x_(x), columns_(columns), options_(options), at_(memory) {}

  int64_t run() {
    find_maxima();
    // If the best logit is infinite or NaN, the caller finds it at the returned id.
    if (!std::isfinite(best_) || options_.temperature == 0) return first_best();
    set_thresholds();
    weigh();
    return draw();
  }

  // The logarithm of the sum of e^x; NaN if the row isn't a distribution.
  double log_sum() {
    find_maxima();
    if (!std::isfinite(best_)) return NAN;
    x_min_ = -FLT_MAX;  // -inf has no probability
    weigh();
    return double(best_) + logarithm(double(total_) * 0x1p-40);
  }

 private:
  // The 16 elements from 64 * block + 16 * v on; -inf past the end.
  f32x16 logits(int64_t block, int v) const {
    const int64_t at = block * kBlock + 16 * v, left = columns_ - at;
    if (left >= 16) return load(x_ + at);
    float lanes[16];
    store(lanes, load_first(x_ + at, left < 0 ? 0 : left));
    for (int64_t i = left < 0 ? 0 : left; i < 16; ++i) lanes[i] = -INFINITY;
    return load(lanes);
  }
  float logit(int64_t id) const {
    float lanes[16];
    store(lanes, load_first(x_ + id, 1));
    return lanes[0];
  }
  float score(float x) const { return (x - best_) / options_.temperature; }

  void find_maxima() {
    parallel_for(at_.blocks, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        f32x16 largest = logits(block, 0);
        mask16 nan = is_nan(largest);
        for (int v = 1; v < 4; ++v) {
          const f32x16 next = logits(block, v);
          nan = either(nan, is_nan(next));
          largest = max(next, largest);
        }
        at_.block_max[block] = any(nan) ? NAN : highest(largest);
      }
    });
    best_ = -INFINITY;
    for (int64_t block = 0; block < at_.blocks; ++block) {
      const float top = at_.block_max[block];
      if (!(top <= best_)) best_ = top;
      if (std::isnan(best_)) return;
    }
  }

  int64_t first_best() const {
    const bool nan = std::isnan(best_);
    for (int64_t block = 0; block < at_.blocks; ++block) {
      const float top = at_.block_max[block];
      if (nan ? !std::isnan(top) : top != best_) continue;
      for (int64_t id = block * kBlock; id < columns_; ++id) {
        const float x = logit(id);
        if (nan ? std::isnan(x) : x == best_) return id;
      }
    }
    return 0;
  }

  // Filters that depend only on the score become thresholds on logits, because (x - best) / t is monotonic also
  // when rounded. min-p comes after top-p, so it must not change Z if there is a top-p.
  void set_thresholds() {
    top_p_ = options_.top_p < 1;
    x_min_ = -FLT_MAX;  // -inf is never kept
    if (options_.top_k > 0 && options_.top_k < columns_) {
      const float kth = kth_largest(options_.top_k);
      if (kth >= -FLT_MAX) x_min_ = smallest_scoring(score(kth));
    }
    x_last_ = x_min_;
    if (options_.min_score > -INFINITY) {
      x_last_ = std::max(x_min_, smallest_scoring(options_.min_score));
      if (!top_p_) x_min_ = x_last_;
    }
  }

  // The smallest x whose score is at least `floor`, by bisection; floor <= 0.
  float smallest_scoring(float floor) const {
    int64_t below = ordered_bits(-INFINITY), found = ordered_bits(best_);
    while (found - below > 1) {
      const int64_t middle = (below + found) >> 1;
      (score(from_ordered_bits(int32_t(middle))) >= floor ? found : below) = middle;
    }
    return from_ordered_bits(int32_t(found));
  }

  // If the maxima of k blocks are at least `bound`, so are k elements: the k-th largest is not below it.
  float kth_largest(int64_t k) {
    float* pool = reinterpret_cast<float*>(at_.candidates);
    float bound = -INFINITY;
    if (k <= at_.blocks) {
      std::copy(at_.block_max, at_.block_max + at_.blocks, pool);
      std::nth_element(pool, pool + (k - 1), pool + at_.blocks, std::greater<float>());
      bound = pool[k - 1];
      if (bound == best_) return bound;
    }
    int64_t count = 0;
    for (int64_t block = 0; block < at_.blocks; ++block) {
      if (at_.block_max[block] < bound) continue;
      for (int v = 0; v < 4; ++v) {
        const f32x16 x = logits(block, v);
        float lanes[16];
        store(lanes, x);
        for (uint32_t low = bits(less(x, splat(bound))) ^ 0xffff; low != 0; low &= low - 1) {
          pool[count++] = lanes[__builtin_ctz(low)];
        }
      }
    }
    std::nth_element(pool, pool + (k - 1), pool + count, std::greater<float>());
    return pool[k - 1];
  }

  // Computes the m of every id, and its maximum and sum for each block.
  void weigh() {
    const f32x16 best = splat(best_), t = splat(options_.temperature), lowest = splat(x_min_);
    parallel_for(at_.blocks, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        at_.block_m[block] = 0.0f;
        at_.sums[block] = 0;
        // Below a score of -28.5, m is less than one unit, and the id loses every race.
        const float top = at_.block_max[block];
        if (top < x_min_ || score(top) < -28.5f) continue;
        f32x16 largest = zero_f32();
        UnitSums sums;
        for (int v = 0; v < 4; ++v) {
          const f32x16 x = logits(block, v);
          const f32x16 kept = relative_probability(div(sub(x, best), t));
          const f32x16 m = select(less(x, lowest), zero_f32(), kept);
          store(at_.m + block * kBlock + 16 * v, m);
          largest = max(m, largest);
          sums.add(m);
        }
        at_.block_m[block] = highest(largest);
        at_.sums[block] = sums.total();
      }
    });
    total_ = 0;
    for (int64_t block = 0; block < at_.blocks; ++block) total_ += at_.sums[block];
  }

  int64_t draw() {
    const double z = double(total_) * 0x1p-40;  // 1 or more: the most likely id has m = 1
    // About 24 of the kept ids arrive within the first T, so the probability of a second race is e^-24.
    double time = 24.0 / (z * std::max(double(top_p_ ? options_.top_p : 1.0f), 0.125));
    // A lower bound on m from min-p, with a margin; the exact test is x_last_.
    refused_ = x_last_ > x_min_ ? std::exp(options_.min_score) * 0.9999f : 0.0f;
    for (;; time = std::min(64 * time, 64.0)) {
      const int64_t found = collect(time);
      const double in_time = -logarithm(time);
      for (int64_t i = 0; i < found; ++i) {
        const Candidate& candidate = at_.candidates[i];
        if (candidate.score < in_time) break;
        if (keeps(candidate)) return candidate.id;
      }
      if (time >= 64) return first_best();  // never reached: the most likely id arrives before 23
    }
  }

  // Collects the ids that may arrive within `time`, in order of arrival. Returns their number.
  int64_t collect(double time) {
    const float reach = float(time * 0x1p24 * 1.0001);
    const f32x16 reaches = splat(reach), refused = splat(refused_);
    parallel_for(at_.blocks, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        at_.masks[block] = 0;
        const float top = at_.block_m[block];
        if (!(top > refused_) || double(top) * time < 0x1p-33 * 0.999) continue;
        uint32_t words[kBlock];
        philox_block(uint32_t(block * kBlock / 4), options_.position, options_.seed, words);
        uint64_t mask = 0;
        for (int v = 0; v < 4; ++v) {
          const f32x16 m = load(at_.m + block * kBlock + 16 * v);
          // 1 - u = (2^32 - word - 0.5) / 2^32, rounded down to 24 bits.
          const mask16 early = less(complement_24(words + 16 * v), mul(m, reaches));
          mask |= uint64_t(bits(early) & bits(less(refused, m))) << (16 * v);
        }
        at_.masks[block] = mask;
      }
    });
    int64_t found = 0;
    for (int64_t block = 0; block < at_.blocks; ++block) {
      for (uint64_t mask = at_.masks[block]; mask != 0; mask &= mask - 1) {
        const int64_t id = block * kBlock + __builtin_ctzll(mask);
        uint32_t words[4];
        philox(uint32_t(id / 4), options_.position, options_.seed, words);
        at_.candidates[found++] = {double(score(logit(id))) + gumbel(words[id % 4]), id, at_.m[id]};
      }
    }
    std::sort(at_.candidates, at_.candidates + found, [](const Candidate& a, const Candidate& b) {
      return a.score != b.score ? a.score > b.score : a.id < b.id;
    });
    return found;
  }

  // Whether min-p and top-p keep the candidate. If top-p removes it, every id with the same or a smaller m is
  // skipped from then on.
  bool keeps(const Candidate& candidate) {
    if (candidate.m <= refused_ || logit(candidate.id) < x_last_) return false;
    if (!top_p_) return true;
    const int64_t above = units_above(candidate.m);
    if (above == 0 || double(above) < double(options_.top_p) * double(total_)) return true;
    refused_ = candidate.m;
    return false;
  }

  int64_t units_above(float m) {
    const f32x16 limit = splat(m);
    parallel_for(at_.blocks, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        at_.sums[block] = 0;
        if (at_.block_m[block] <= m) continue;
        UnitSums sums;
        for (int v = 0; v < 4; ++v) {
          const f32x16 next = load(at_.m + block * kBlock + 16 * v);
          sums.add(select(less(limit, next), next, zero_f32()));
        }
        at_.sums[block] = sums.total();
      }
    });
    int64_t total = 0;
    for (int64_t block = 0; block < at_.blocks; ++block) total += at_.sums[block];
    return total;
  }

  const T* x_;
  int64_t columns_;
  const SampleOptions& options_;
  RowMemory& at_;
  float best_ = 0;
  bool top_p_ = false;
  float x_min_ = 0;    // the threshold of top-k (and of min-p if there is no top-p)
  float x_last_ = 0;   // the threshold of all filters that depend only on the score
  float refused_ = 0;  // ids with this m or less are removed
  int64_t total_ = 0;
};

}  // namespace onward
