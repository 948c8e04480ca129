// The two products of a tile: up to 6 query rows (heads of a group, consecutive queries) with one block of
// keys, and their weights with its values.
//
// Every instance adds the terms of a sum in the same order: the bits don't depend on ROWS and VECTORS.
// The compiler must keep the accumulators in registers. Check the disassembly after a change.
#pragma once
#include "formats.h"

namespace onward::attention {

// shapes::attention, per instruction set:
//   kTileRows, tile_vectors(rows)   Blend has rows * vectors accumulators, in addition to the vectors and one broadcast.
//                                   Few rows take more vectors, to have enough independent sums.
//   kSumsAtOnce                     dot products that dot_products computes together
//   kScoreRows, kScoreGroups        rows and groups of 16 packed keys that are scored together. Their sums need as many
//                                   registers again for partial results in the tree of additions.
using namespace shapes::attention;

// The order in which rows of keys are prefetched. Contiguous rows are prefetched line by line, so that the
// processor detects a stream. In the order in which the loops read them, across rows, reading was a fifth
// slower.
enum class Fetch { kLines, kRows };

// The dot products of ROWS queries with consecutive keys: kSumsAtOnce in all, row by row. WHOLE: dim is a
// multiple of the features of a vector.
template <class F, int ROWS, bool WHOLE, Fetch FETCH, class T>
ONWARD_INLINE void dot_products(const float* queries, int64_t query_words, const Rows<T>& keys,
                                int64_t first_key, int64_t dim, const Ahead<T>& ahead, float* out) {
  constexpr int kKeys = kSumsAtOnce / ROWS;
  const T* fetched = ahead.at(first_key);
  const int64_t by_key = FETCH == Fetch::kLines ? F::kFeatures : ahead.rows.stride;
  const int64_t by_feature = FETCH == Fetch::kLines ? kKeys : 1;
  const T* key_rows[kKeys] = {keys[first_key]};
  ONWARD_UNROLL_TILE for (int k = 1; k < kKeys; ++k) key_rows[k] = key_rows[k - 1] + keys.stride;
  typename F::Sum sum[kSumsAtOnce];
  ONWARD_UNROLL_TILE for (int i = 0; i < kSumsAtOnce; ++i) sum[i] = F::zero();
  int64_t others = ahead.turn;  // readers that prefetch before it is this reader's turn
  for (int64_t d = 0; d < dim; d += F::kFeatures, queries += 16) {
    const bool asks = others-- == 0;
    if (asks) others = ahead.turns - 1;
    typename F::Vector q[ROWS];
    ONWARD_UNROLL_TILE for (int r = 0; r < ROWS; ++r) q[r] = F::words(queries + r * query_words);
    ONWARD_UNROLL_TILE for (int k = 0; k < kKeys; ++k) {
      const auto key = F::template features<WHOLE>(key_rows[k], d, dim);
      ONWARD_UNROLL_TILE for (int r = 0; r < ROWS; ++r) {
        sum[r * kKeys + k] = F::step(sum[r * kKeys + k], key, q[r]);
      }
      if (asks) fetch_here(fetched + d * by_feature + k * by_key);
    }
  }
  sum_lanes_of(sum, out);
}

template <class T>
struct Scoring {
  const float* queries;  // [rows, query_words]
  int64_t rows, query_words;
  int64_t positions;  // of the block, a multiple of 16
  int64_t dim;
  Ahead<T> ahead;
  float* scores;  // [rows, 64]
};

// Two rows of scores for the 16 keys from `j` on.
template <class F, bool WHOLE, Fetch FETCH, class T>
ONWARD_INLINE void score_pair(const Scoring<T>& s, const Rows<T>& keys, const float* queries,
                              const Ahead<T>& ahead, float* scores, int64_t j) {
  constexpr int64_t kPair = kSumsAtOnce / 2;
  float sums[kSumsAtOnce];
  for (int64_t i = 0; i < kSumsAtOnce; i += kPair) {
    dot_products<F, 2, WHOLE, FETCH>(queries, s.query_words, keys, j + i, s.dim, ahead, sums);
    std::memcpy(scores + i, sums, kPair * sizeof(float));
    std::memcpy(scores + kBlock + i, sums + kPair, kPair * sizeof(float));
  }
}

// scores = the dot products of the queries with the keys. Rows are processed in pairs that share each load of
// a key; pairs take turns in prefetching.
template <class F, bool WHOLE, Fetch FETCH, class T>
ONWARD_APART void score_keys(const Scoring<T>& s, const Rows<T>& keys) {
  for (int64_t j = 0; j < s.positions; j += kSumsAtOnce) {
    const float* queries = s.queries;
    float* scores = s.scores + j;
    Ahead<T> ahead = s.ahead;
    int64_t left = s.rows;
    for (; left >= 2; left -= 2, queries += 2 * s.query_words, scores += 2 * kBlock, ++ahead.turn) {
      score_pair<F, WHOLE, FETCH>(s, keys, queries, ahead, scores, j);
    }
    if (left > 0) dot_products<F, 1, WHOLE, FETCH>(queries, s.query_words, keys, j, s.dim, ahead, scores);
  }
}

template <class F, Fetch FETCH, class T>
inline void score_keys(const Scoring<T>& s, const Rows<T>& keys) {
  if (s.dim % F::kFeatures == 0) {
    score_keys<F, true, FETCH>(s, keys);
  } else {
    score_keys<F, false, FETCH>(s, keys);
  }
}

inline f32x16 floats(f32x16 a) { return a; }
inline f32x16 floats(i32x16 a) { return to_f32(a); }

// Operands of score_packed: queries from the first row on, packed keys from the first group on.
struct PackedScoring {
  const float* queries;
  int64_t query_words;
  const float* keys;
  int64_t steps;
};

// The sums of lanes LANE, LANE + WIDTH, … of the dot products of ROWS queries with GROUPS times 16 keys, in the order of
// sum_lanes, so that they have the bits of dot_products. STEPS: vectors per key to unroll the loop, or 0.
template <class F, int ROWS, int GROUPS, int STEPS, int WIDTH, int LANE>
ONWARD_INLINE void sum_of_lanes(const PackedScoring& p, typename F::Sum (&sum)[ROWS * GROUPS]) {
  if constexpr (WIDTH == 16) {
    ONWARD_UNROLL_TILE for (int i = 0; i < ROWS * GROUPS; ++i) sum[i] = F::zero();
    const int64_t steps = STEPS > 0 ? STEPS : p.steps;
    const float *key = p.keys + LANE * steps * 16, *query = p.queries + LANE;
    const auto add_step = [&](int64_t s) __attribute__((always_inline)) {
      typename F::Vector words[GROUPS];
      ONWARD_UNROLL_TILE for (int g = 0; g < GROUPS; ++g) words[g] = F::words(key + (g * steps * 16 + s) * 16);
      ONWARD_UNROLL_TILE for (int r = 0; r < ROWS; ++r) {
        const auto word = F::weight(query + r * p.query_words + s * 16);
        ONWARD_UNROLL_TILE for (int g = 0; g < GROUPS; ++g) {
          sum[r * GROUPS + g] = F::step(sum[r * GROUPS + g], words[g], word);
        }
      }
    };
    if constexpr (STEPS > 0) {
      ONWARD_UNROLL_TILE for (int64_t s = 0; s < steps; ++s) add_step(s);
    } else {
      // In each of 16 lanes. Unrolled 16 times, they were a third of this file's code, and slower.
      _Pragma("GCC unroll 4") for (int64_t s = 0; s < steps; ++s) add_step(s);
    }
  } else {
    typename F::Sum others[ROWS * GROUPS];
    sum_of_lanes<F, ROWS, GROUPS, STEPS, 2 * WIDTH, LANE>(p, sum);
    sum_of_lanes<F, ROWS, GROUPS, STEPS, 2 * WIDTH, LANE + WIDTH>(p, others);
    ONWARD_UNROLL_TILE for (int i = 0; i < ROWS * GROUPS; ++i) sum[i] = add(sum[i], others[i]);
  }
}

template <class F, int ROWS, int GROUPS, int STEPS>
ONWARD_APART void score_packed(const PackedScoring& p, float* scores) {
  typename F::Sum sum[ROWS * GROUPS];
  sum_of_lanes<F, ROWS, GROUPS, STEPS, 1, 0>(p, sum);
  ONWARD_UNROLL_TILE for (int r = 0; r < ROWS; ++r) {
    ONWARD_UNROLL_TILE for (int g = 0; g < GROUPS; ++g) store(scores + r * kBlock + g * 16, floats(sum[r * GROUPS + g]));
  }
}

// score_keys for packed keys and ROWS rows.
template <class F, int ROWS, int STEPS, class T>
inline void score_rows(const Scoring<T>& s, const PackedKeys& keys, int64_t row) {
  const float* queries = s.queries + row * s.query_words;
  float* scores = s.scores + row * kBlock;
  int64_t j = 0;
  for (; j + kScoreGroups * 16 <= s.positions; j += kScoreGroups * 16) {
    score_packed<F, ROWS, kScoreGroups, STEPS>({queries, s.query_words, keys.group(j), keys.steps}, scores + j);
  }
  for (; j < s.positions; j += 16) {
    score_packed<F, ROWS, 1, STEPS>({queries, s.query_words, keys.group(j), keys.steps}, scores + j);
  }
}

// The same for up to kScoreRows rows from `row` on; returns their number.
template <class F, int STEPS, int ROWS = kScoreRows, class T>
inline int64_t score_some(const Scoring<T>& s, const PackedKeys& keys, int64_t row) {
  if constexpr (ROWS > 1) {
    if (s.rows - row < ROWS) return score_some<F, STEPS, ROWS - 1>(s, keys, row);
  }
  score_rows<F, ROWS, STEPS>(s, keys, row);
  return ROWS;
}

template <class F, int STEPS, class T>
inline void score_all(const Scoring<T>& s, const PackedKeys& keys) {
  for (int64_t row = 0; row < s.rows;) row += score_some<F, STEPS>(s, keys, row);
}

template <class F, class T>
inline void score_keys(const Scoring<T>& s, const PackedKeys& keys) {
  switch (keys.steps * F::kFeatures) {
    case 64: return score_all<F, 64 / F::kFeatures>(s, keys);
    case 128: return score_all<F, 128 / F::kFeatures>(s, keys);
    default: return score_all<F, 0>(s, keys);
  }
}

// The operands of a blend except the values.
struct Blend {
  const float *weights, *decay, *factors;  // [rows, 64 / kPositions] words, [rows], [rows]
  int64_t positions;             // of the block, a multiple of 16
  float* out;                    // [rows, padded]
  int64_t dim, padded;
};

// out[r] = out[r] * decay[r] + weights[r] * values, for VECTORS vectors of features from d on. Integer products are
// summed separately, and their sum times factors[r] is added.
template <class F, int ROWS, int VECTORS, bool WHOLE, class Values>
ONWARD_APART void blend_features(const Blend& b, const Values& values, int64_t d) {
  constexpr bool kExact = std::is_same_v<F, Integers>;
  typename F::Sum sum[ROWS][VECTORS];
  const auto decayed = [&](int r, int v) {
    return mul(load(b.out + r * b.padded + d + v * 16), splat(b.decay[r]));
  };
  ONWARD_UNROLL_TILE for (int r = 0; r < ROWS; ++r) {
    ONWARD_UNROLL_TILE for (int v = 0; v < VECTORS; ++v) {
      if constexpr (kExact) {
        sum[r][v] = F::zero();
      } else {
        sum[r][v] = decayed(r, v);
      }
    }
  }
  const float* weights = b.weights;
  const Values rows = values;  // a copy, because prefetches make the compiler read the original again
  for (int64_t j = 0; j < b.positions; j += F::kPositions, ++weights) {
    ONWARD_UNROLL_TILE for (int v = 0; v < VECTORS; v += F::kVectors) {
      typename F::Vector value[F::kVectors];
      rows.template read<WHOLE>(j, d + v * 16, value);
      ONWARD_UNROLL_TILE for (int r = 0; r < ROWS; ++r) {
        const auto weight = F::weight(weights + r * (kBlock / F::kPositions));
        ONWARD_UNROLL_TILE for (int i = 0; i < F::kVectors; ++i) {
          sum[r][v + i] = F::step(sum[r][v + i], value[i], weight);
        }
      }
    }
  }
  ONWARD_UNROLL_TILE for (int r = 0; r < ROWS; ++r) {
    ONWARD_UNROLL_TILE for (int v = 0; v < VECTORS; ++v) {
      float* out = b.out + r * b.padded + d + v * 16;
      if constexpr (kExact) {
        store(out, fma(to_f32(sum[r][v]), splat(b.factors[r]), decayed(r, v)));
      } else {
        store(out, sum[r][v]);
      }
    }
  }
}

// blend for all features from d on.
template <class F, int ROWS, int VECTORS, class Values>
inline void blend_all_features(const Blend& b, const Values& values, int64_t d) {
  for (; d + VECTORS * 16 <= b.dim; d += VECTORS * 16) {
    blend_features<F, ROWS, VECTORS, true>(b, values, d);
  }
  if constexpr (VECTORS > F::kVectors) {
    blend_all_features<F, ROWS, VECTORS / 2>(b, values, d);
  } else if (d < b.dim) {
    blend_features<F, ROWS, VECTORS, false>(b, values, d);
  }
}

// blend for a number of rows known only at run time.
template <class F, int ROWS = 1, class Values>
inline void blend_values(int64_t rows, const Blend& blend, const Values& values) {
  if constexpr (ROWS < kTileRows) {
    if (rows > ROWS) return blend_values<F, ROWS + 1>(rows, blend, values);
  }
  blend_all_features<F, ROWS, tile_vectors(ROWS)>(blend, values, 0);
}

}  // namespace onward::attention
