// One row's draw: argmax over the kept ids of score + Gumbel noise, without computing most of the noise.
//
// Gumbel noise is g = -log E with E = -log u exponential: the largest s + g belongs to the id of the
// smallest arrival time E / e^s, a race in which m = e^s is an id's speed. Let Z be the sum of all
// m: within a time T some T Z ids arrive. Only these are looked at closely, and who they are costs no
// logarithm, because E >= 1 - u:
//
//     an id with 1 - u >= 1.0001 m T arrives after T, so its s + g is below -log T.
//
// If the best of the others that is kept has s + g >= -log T, it is the draw; else T grows and
// the race is run again. The likeliest id is always kept and arrives before 23 (u >= 2^-33, so E < 22.9),
// which ends it. By the same bound an id whose score is 26.01 below the best is never drawn: E is
// 2^-33 at least, and 2^-33 e^26.01 > 22.9. The margin of 1.0001 is far above the rounding of m (3e-7)
// and of float and double arithmetic (1e-7, 1e-14).
//
// top-p needs no sort: an id is kept while the ids of a greater m have less than p Z together, which
// is one sum for each id asked about, in integers, so in any order. The first of the race is kept with
// probability p or more.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>

#include "arithmetic.h"
#include "team.h"

namespace onward {

constexpr int64_t kBlock = 64;   // ids that are skipped or looked at together: 16 words of Philox
constexpr int64_t kGrain = 128;  // blocks of a chunk of the team

struct SampleOptions {
  float temperature;  // 0: the largest logit
  int64_t top_k;      // 0: all
  float top_p;        // 1 or more: all
  float min_score;    // keep scores of at least this; -inf: all
  uint64_t seed;
  uint32_t position;
};

struct Candidate {
  double score;  // with its noise
  int64_t id;
  float m;
};

// What a row needs besides its logits, laid out in one piece of memory.
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
  Candidate* candidates;  // also the pool in which the k-th largest is looked for
  int64_t* sums;          // of a block's m, in units of 2^-40
  uint64_t* masks;        // of a block's ids that may arrive in time
  float* m;               // relative probabilities e^s; 0 for what a filter before top-p leaves out
  float* block_max;       // the largest logit; NaN where there is one
  float* block_m;         // the largest m
};

// A float as an integer of the same order, and back; not for NaN.
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
    // Infinite, nothing admitted or no numbers: the caller finds the mark where this points.
    if (!std::isfinite(best_) || options_.temperature == 0) return first_best();
    set_thresholds();
    weigh();
    return draw();
  }

  // The logarithm of the sum of e^x; NaN for a row that is no distribution.
  double log_sum() {
    find_maxima();
    if (!std::isfinite(best_)) return NAN;
    x_min_ = -FLT_MAX;  // -inf has no probability
    weigh();
    return double(best_) + logarithm(double(total_) * 0x1p-40);
  }

 private:
  // Elements 64 b + 16 v …, -inf past the end.
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

  // Filters that look at scores alone are thresholds on the logits themselves, because (x - best) / t
  // rounds monotonically. min-p follows top-p, so where there is a top-p it may not change Z.
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

  // k blocks whose largest is at least `bound` hold k elements that are: no other is the k-th.
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

  // m of every id, its largest and its sum in each block.
  void weigh() {
    const f32x16 best = splat(best_), t = splat(options_.temperature), lowest = splat(x_min_);
    parallel_for(at_.blocks, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        at_.block_m[block] = 0.0f;
        at_.sums[block] = 0;
        // Below a score of -28.5 an m is no unit and loses every race.
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
    const double z = double(total_) * 0x1p-40;  // 1 or more: the likeliest has m = 1
    // Some 24 of the kept arrive within the first T, so e^-24 is the chance of a second race.
    double time = 24.0 / (z * std::max(double(top_p_ ? options_.top_p : 1.0f), 0.125));
    // min-p in terms of m, generously; x_last_ decides.
    refused_ = x_last_ > x_min_ ? std::exp(options_.min_score) * 0.9999f : 0.0f;
    for (;; time = std::min(64 * time, 64.0)) {
      const int64_t found = collect(time);
      const double in_time = -logarithm(time);
      for (int64_t i = 0; i < found; ++i) {
        const Candidate& candidate = at_.candidates[i];
        if (candidate.score < in_time) break;
        if (keeps(candidate)) return candidate.id;
      }
      if (time >= 64) return first_best();  // not reached, by the bound above
    }
  }

  // The ids that may arrive within `time`, the first to arrive first.
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

  // Whether min-p and top-p keep it; what they refuse is refused from now on with all of smaller m.
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
  float x_min_ = 0;    // below it, top-k (and min-p where there is no top-p) keeps nothing
  float x_last_ = 0;   // below it, no filter on scores does
  float refused_ = 0;  // ids of this m or less have been refused
  int64_t total_ = 0;
};

}  // namespace onward
