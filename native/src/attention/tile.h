// The two products of a tile: up to 6 query rows (heads of a group, neighbouring queries) against one
// block of keys, and their weights against its values.
//
// Every sum walks its terms in one order, in every instance: the bits do not depend on ROWS and
// VECTORS. The compiler must keep the accumulators in registers: read the disassembly when touching
// this.
#pragma once
#include "formats.h"
#include "sums.h"

namespace onward::attention {

// Accumulators of Blend: rows * vectors, beside the vectors and one broadcast, in 32 registers of 16
// floats (AVX-512), 16 of 8 (AVX2), 16 of 4 elsewhere. Few rows take more vectors, for want of
// independent sums.
#if defined(__AVX512F__)
constexpr int kTileRows = 6;
constexpr int tile_vectors(int rows) { return rows <= 3 ? 8 : 4; }
#elif defined(__AVX2__)
constexpr int kTileRows = 6;
constexpr int tile_vectors(int rows) { return rows <= 2 ? 2 : 1; }
#else
constexpr int kTileRows = 2;
constexpr int tile_vectors(int) { return 1; }
#endif

// The dot products of ROWS queries with neighbouring keys: kSumsAtOnce in all, row by row. WHOLE: dim
// is a multiple of what a vector holds.
template <class F, int ROWS, bool WHOLE, class T>
ONWARD_INLINE void dot_products(const float* queries, int64_t query_words, const Rows<T>& keys,
                                int64_t first_key, int64_t dim, float* out) {
  constexpr int kKeys = kSumsAtOnce / ROWS;
  const T* key_rows[kKeys] = {keys[first_key]};
  ONWARD_UNROLL_TILE for (int k = 1; k < kKeys; ++k) key_rows[k] = key_rows[k - 1] + keys.stride;
  f32x16 sum[kSumsAtOnce];
  ONWARD_UNROLL_TILE for (int i = 0; i < kSumsAtOnce; ++i) sum[i] = zero_f32();
  for (int64_t d = 0; d < dim; d += F::kFeatures, queries += 16) {
    typename F::Vector q[ROWS];
    ONWARD_UNROLL_TILE for (int r = 0; r < ROWS; ++r) q[r] = F::words(queries + r * query_words);
    ONWARD_UNROLL_TILE for (int k = 0; k < kKeys; ++k) {
      const auto key = F::template features<WHOLE>(key_rows[k], d, dim);
      ONWARD_UNROLL_TILE for (int r = 0; r < ROWS; ++r) {
        sum[r * kKeys + k] = F::step(sum[r * kKeys + k], key, q[r]);
      }
    }
  }
  sum_lanes_of(sum, out);
}

struct Scoring {
  const float* queries;  // [rows, query_words]
  int64_t rows, query_words;
  int64_t positions;  // of the block, a multiple of 16
  int64_t dim;
  float* scores;  // [rows, 64]
};

// scores = the dot products of the queries with the keys. Two rows go together and share each key.
template <class F, bool WHOLE, class T>
ONWARD_APART void score_keys(const Scoring& s, const Rows<T>& keys) {
  constexpr int64_t kPair = kSumsAtOnce / 2;
  float sums[kSumsAtOnce];
  for (int64_t j = 0; j < s.positions; j += kSumsAtOnce) {
    const float* queries = s.queries;
    float* scores = s.scores + j;
    int64_t left = s.rows;
    for (; left >= 2; left -= 2) {
      for (int64_t i = 0; i < kSumsAtOnce; i += kPair) {
        dot_products<F, 2, WHOLE>(queries, s.query_words, keys, j + i, s.dim, sums);
        std::memcpy(scores + i, sums, kPair * sizeof(float));
        std::memcpy(scores + kBlock + i, sums + kPair, kPair * sizeof(float));
      }
      queries += 2 * s.query_words;
      scores += 2 * kBlock;
    }
    if (left == 1) dot_products<F, 1, WHOLE>(queries, s.query_words, keys, j, s.dim, scores);
  }
}

template <class F, class T>
inline void score_keys(const Scoring& s, const Rows<T>& keys) {
  if (s.dim % F::kFeatures == 0) {
    score_keys<F, true>(s, keys);
  } else {
    score_keys<F, false>(s, keys);
  }
}

// What Blend adds to, and what it needs beside the values.
template <class T>
struct Blend {
  const float *weights, *decay;  // [rows, 64 / kPositions] words, [rows]
  int64_t positions;             // of the block, a multiple of 16
  float* out;                    // [rows, padded]
  int64_t dim, padded;
  Rows<T> next_keys;
};

// out[r] = out[r] * decay[r] + weights[r] * values, for VECTORS vectors of features from d on.
template <class F, int ROWS, int VECTORS, bool WHOLE, class Values, class T>
ONWARD_APART void blend_features(const Blend<T>& b, const Values& values, int64_t d) {
  f32x16 sum[ROWS][VECTORS];
  ONWARD_UNROLL_TILE for (int r = 0; r < ROWS; ++r) {
    const f32x16 factor = splat(b.decay[r]);
    ONWARD_UNROLL_TILE for (int v = 0; v < VECTORS; ++v) {
      sum[r][v] = mul(load(b.out + r * b.padded + d + v * 16), factor);
    }
  }
  const float* weights = b.weights;
  for (int64_t j = 0; j < b.positions; j += F::kPositions, ++weights) {
    if (d == 0) fetch_rows(b.next_keys, j, F::kPositions, b.dim);
    ONWARD_UNROLL_TILE for (int v = 0; v < VECTORS; v += F::kVectors) {
      typename F::Vector value[F::kVectors];
      values.template read<WHOLE>(j, d + v * 16, value);
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
      store(b.out + r * b.padded + d + v * 16, sum[r][v]);
    }
  }
}

// The same for all features from d on.
template <class F, int ROWS, int VECTORS, class Values, class T>
inline void blend_all_features(const Blend<T>& b, const Values& values, int64_t d) {
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
template <class F, int ROWS = 1, class Values, class T>
inline void blend_values(int64_t rows, const Blend<T>& blend, const Values& values) {
  if constexpr (ROWS < kTileRows) {
    if (rows > ROWS) return blend_values<F, ROWS + 1>(rows, blend, values);
  }
  blend_all_features<F, ROWS, tile_vectors(ROWS)>(blend, values, 0);
}

}  // namespace onward::attention
