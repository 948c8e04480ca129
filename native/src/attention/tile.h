// The two products of a tile: up to 6 query rows (heads of a group, neighbouring queries) against one
// block of keys, and their weights against its values.
//
// Every sum walks its terms in one order, in every instance: the bits do not depend on ROWS and
// VECTORS. The compiler must keep the accumulators in registers: read the disassembly when touching
// this.
#pragma once
#include "formats.h"

namespace onward::attention {

// Of shapes::attention, by instruction set:
//   kTileRows, tile_vectors(rows)   the accumulators of Blend: rows * vectors, beside the vectors and one broadcast. Few
//                                   rows take more vectors, for want of independent sums.
//   kSumsAtOnce                     dot products that dot_products takes together
//   kScoreRows, kScoreGroups        rows and groups of 16 packed keys that are scored together: their sums, and those
//                                   that wait for their partners in the tree of additions, in as many registers
using namespace shapes::attention;

// In which order the rows ahead of the keys are asked for. Rows that follow each other without a gap are
// asked for line by line, which the processor takes for the stream it is; in the order in which the loops
// read, across the rows, they came at four fifths of the pace.
enum class Fetch { kLines, kRows };

// The dot products of ROWS queries with neighbouring keys: kSumsAtOnce in all, row by row. WHOLE: dim
// is a multiple of what a vector holds.
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
  int64_t others = ahead.turn;  // who ask before it is this reader's turn
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

// Two rows of scores from `j` on, for the next 16 keys.
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

// scores = the dot products of the queries with the keys. Two rows go together and share each key; pairs
// take turns in asking for what is ahead.
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

// Against packed keys: queries from the first of the rows on, keys from the first of the groups on.
struct PackedScoring {
  const float* queries;
  int64_t query_words;
  const float* keys;
  int64_t steps;
};

// The sums of lanes LANE, LANE + WIDTH, … of the dot products of ROWS queries with GROUPS times 16 keys, in the order of
// sum_lanes: so they have the bits of dot_products. STEPS: those of the keys where the loop shall be unrolled, or 0.
template <class F, int ROWS, int GROUPS, int STEPS, int WIDTH, int LANE>
ONWARD_INLINE void sum_of_lanes(const PackedScoring& p, typename F::Sum (&sum)[ROWS * GROUPS]) {
  if constexpr (WIDTH == 16) {
    ONWARD_UNROLL_TILE for (int i = 0; i < ROWS * GROUPS; ++i) sum[i] = F::zero();
    const int64_t steps = STEPS > 0 ? STEPS : p.steps;
    const float *key = p.keys + LANE * steps * 16, *query = p.queries + LANE;
    ONWARD_UNROLL_TILE for (int64_t s = 0; s < steps; ++s) {
      typename F::Vector words[GROUPS];
      ONWARD_UNROLL_TILE for (int g = 0; g < GROUPS; ++g) words[g] = F::words(key + (g * steps * 16 + s) * 16);
      ONWARD_UNROLL_TILE for (int r = 0; r < ROWS; ++r) {
        const auto word = F::weight(query + r * p.query_words + s * 16);
        ONWARD_UNROLL_TILE for (int g = 0; g < GROUPS; ++g) {
          sum[r * GROUPS + g] = F::step(sum[r * GROUPS + g], words[g], word);
        }
      }
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

// score_keys against packed keys, for ROWS rows.
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

// The same for up to kScoreRows rows from `row` on; returns how many.
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

// What Blend adds to, and what it needs beside the values.
struct Blend {
  const float *weights, *decay, *factors;  // [rows, 64 / kPositions] words, [rows], [rows]: of integers
  int64_t positions;             // of the block, a multiple of 16
  float* out;                    // [rows, padded]
  int64_t dim, padded;
};

// out[r] = out[r] * decay[r] + weights[r] * values, for VECTORS vectors of features from d on. Integers are summed
// alone, and their sum times factors[r] is what is added.
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
  const Values rows = values;  // its own copy: requests for lines would make the compiler read it again
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

// The same for all features from d on.
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

// The same for a number of rows known at run time.
template <class F, int ROWS = 1, class Values>
inline void blend_values(int64_t rows, const Blend& blend, const Values& values) {
  if constexpr (ROWS < kTileRows) {
    if (rows > ROWS) return blend_values<F, ROWS + 1>(rows, blend, values);
  }
  blend_all_features<F, ROWS, tile_vectors(ROWS)>(blend, values, 0);
}

}  // namespace onward::attention
