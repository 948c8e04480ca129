// The formats in which terms are multiplied: floats (for every element type), pairs of bf16 (if one
// instruction multiplies and adds them into float32), or pairs of 16-bit integers (for a cache of 8-bit
// integers). Queries, weights and packed values are stored in 32-bit words, each a float or a pair.
#pragma once
#include <cstring>
#include <type_traits>

#include "../simd_math.h"
#include "problem.h"

namespace onward {

// An element of a row of 8-bit integers.
struct I8 {
  int8_t value;
};
inline f32x16 load(const I8* p) { return to_f32(load_bytes(&p->value)); }

}  // namespace onward

namespace onward::attention {

// The formats of a cache's rows (KVFormat.code in Python): floats of the queries' dtype, or D integers and
// their float scale.
constexpr int32_t kFloatRows = 0, kInt8Rows = 1;

// Whether rows of this element type have a scale. Dot products are of the integers alone; afterwards the scale of a key
// multiplies its scores, and the scale of a value multiplies its weights.
template <class S>
constexpr bool kScaled = std::is_same_v<S, I8>;
// Bytes of a scale, at the end of a row.
constexpr int64_t kScaleBytes = sizeof(float);

inline float scale_of(const I8* row, int64_t width) {
  float scale;
  std::memcpy(&scale, row + width - kScaleBytes, kScaleBytes);
  return scale;
}

// Quantizes `dim` floats to integers and returns their scale. Calls store(d, integers) for the features d, …, d + 15;
// features past `dim` are 0. The feature of the largest magnitude becomes +-limit. If a float is infinite or NaN, the
// scale is NaN; if all floats are below 1e-30, it is 0; in both cases the integers are 0.
template <class T, class Store>
inline float store_integers(const T* x, int64_t dim, float limit, Store store) {
  f32x16 most = zero_f32(), poison = zero_f32();
  for (int64_t d = 0; d < dim; d += 16) {
    const f32x16 v = load_first(x + d, dim - d);
    most = max(abs(v), most);
    poison = fma(v, zero_f32(), poison);
  }
  const float largest = max_lanes(most);
  const bool broken = any(is_nan(poison)), zero = largest < 1e-30f;
  if (broken || zero) {
    for (int64_t d = 0; d < dim; d += 16) store(d, zero_i32());
    return broken ? __builtin_nanf("") : 0.0f;
  }
  const f32x16 inverse = splat(limit / largest);
  for (int64_t d = 0; d < dim; d += 16) store(d, to_i32(mul(load_first(x + d, dim - d), inverse)));
  return largest / limit;
}

// Quantizes a row of the cache; the feature of the largest magnitude becomes +-127.
template <class T>
inline void store_row(const T* x, int64_t dim, I8* row) {
  const float scale = store_integers(x, dim, 127.0f, [&](int64_t d, i32x16 integers) {
    int8_t bytes[16];
    store_low_bytes(bytes, integers);
    std::memcpy(row + d, bytes, size_t(dim - d < 16 ? dim - d : 16));
  });
  std::memcpy(row + dim, &scale, kScaleBytes);
}

// For inner loops whose arrays must be kept in registers: they are unrolled and inlined into one function,
// which is not inlined, so that surrounding code doesn't change the compiler's choices.
#define ONWARD_UNROLL_TILE _Pragma("GCC unroll 16")
#define ONWARD_INLINE __attribute__((always_inline)) inline
#define ONWARD_APART __attribute__((noinline))

struct Floats {
  using Vector = f32x16;
  using Sum = f32x16;
  static constexpr int64_t kFeatures = 16;  // of a vector of keys and queries
  static constexpr int64_t kPositions = 1;  // per vector of values and per word of weights
  static constexpr int kVectors = 1;        // vectors of values that are read together

  static Sum zero() { return zero_f32(); }
  static Sum step(Sum sum, Vector a, Vector b) { return fma(a, b, sum); }

  // Features d, …, d + 15 of a row, zeros past `dim`.
  template <bool WHOLE, class T>
  static Vector features(const T* row, int64_t d, int64_t dim) {
    return WHOLE ? load(row + d) : load_first(row + d, dim - d);
  }
  // Returns the factor of the query's scores.
  template <class T>
  static float store_query(float* words, const T* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += kFeatures) store(words + d, load_first(row + d, dim - d));
    return 1.0f;
  }

  // Values of one position: 16 features in each vector.
  template <bool WHOLE, class T>
  static void values(const T* row, int64_t, int64_t d, int64_t dim, Vector (&vectors)[1]) {
    vectors[0] = features<WHOLE>(row, d, dim);
  }
  static Vector words(const float* p) { return load(p); }
  static f32x16 as_floats(Vector v) { return v; }
  static void store_words(float* p, Vector v) { store(p, v); }
  static Vector weight(const float* word) { return splat(*word); }
  // Rounds weights to the format of the words, stores them, and returns the rounded weights.
  static f32x16 store_weights(float* words, int64_t j, f32x16 weights) {
    store(words + j, weights);
    return weights;
  }
};

// 16-bit integers, for rows of 8-bit integers. Sums are exact, so their order doesn't matter. The scale of a query is
// set by its largest feature, that of a query's weights in a block by the largest weight; one step is 2^-15 of it.
struct Integers {
  using Vector = i32x16;
  using Sum = i32x16;
  static constexpr int64_t kFeatures = 32;
  static constexpr int64_t kPositions = 2;
  static constexpr int kVectors = shapes::attention::kIntegerVectors;
  static constexpr int64_t kMost = 32767;

  static Sum zero() { return zero_i32(); }
  static Sum step(Sum sum, Vector a, Vector b) { return dot_i16(sum, a, b); }

  template <bool WHOLE>
  static Vector features(const I8* row, int64_t d, int64_t dim) {
    return WHOLE ? widen_i8(&row[d].value) : widen_first_i8(&row[d].value, dim - d);
  }
  // The integers are so small that a sum of `dim` products with values up to 127 fits in 31 bits.
  template <class T>
  static float store_query(float* words, const T* row, int64_t dim) {
    const int64_t fits = 0x7fffffff / (127 * dim), limit = fits < kMost ? fits : kMost;
    auto* to = reinterpret_cast<int16_t*>(words);
    for (int64_t d = dim / kFeatures * kFeatures; d < dim; d += 16) store_low_words(to + d, zero_i32());
    return store_integers(row, dim, float(limit),
                          [&](int64_t d, i32x16 integers) { store_low_words(to + d, integers); });
  }

  // Values of two positions, paired: 16 features in each vector.
  template <bool WHOLE>
  static void values(const I8* row, int64_t stride, int64_t d, int64_t dim, Vector (&vectors)[kVectors]) {
    if constexpr (kVectors == 2) {
      pair_words(features<WHOLE>(row, d, dim), features<WHOLE>(row + stride, d, dim), vectors);
    } else {
      const auto sixteen = [&](const I8* p) {
        if (WHOLE) return load_bytes(&p[d].value);
        int8_t padded[16] = {};
        std::memcpy(padded, p + d, size_t(dim - d < 16 ? dim - d : 16));
        return load_bytes(padded);
      };
      vectors[0] = bit_or(bit_and(sixteen(row), 0xffff), shift_left<16>(sixteen(row + stride)));
    }
  }
  static Vector words(const float* p) { return load_i32(reinterpret_cast<const int32_t*>(p)); }
  static f32x16 as_floats(Vector v) { return as_f32(v); }
  static void store_words(float* p, Vector v) { store(p, as_f32(v)); }
  static Vector weight(const float* word) {
    int32_t pair;
    std::memcpy(&pair, word, sizeof pair);
    return splat(pair);
  }
  // Stores weights between 0 and their scale. Returns the factor of the integers; NaN if a weight is NaN.
  template <int VECTORS>
  static float store_weights(float* words, const f32x16 (&weights)[VECTORS]) {
    f32x16 most = zero_f32(), all = zero_f32();
    ONWARD_UNROLL_TILE for (int v = 0; v < VECTORS; ++v) {
      most = max(weights[v], most);
      all = add(all, weights[v]);
    }
    const float largest = any(is_nan(all)) ? __builtin_nanf("") : max_lanes(most);
    const f32x16 inverse = splat(largest >= 1e-33f ? float(kMost) / largest : 0.0f);
    auto* to = reinterpret_cast<int16_t*>(words);
    ONWARD_UNROLL_TILE for (int v = 0; v < VECTORS; ++v) {
      store_low_words(to + v * 16, to_i32(mul(weights[v], inverse)));
    }
    return largest / float(kMost);
  }
};

struct Bf16Pairs {
  using Vector = i32x16;
  using Sum = f32x16;
  static constexpr int64_t kFeatures = 32;
  static constexpr int64_t kPositions = 2;
  static constexpr int kVectors = 2;

  static Sum zero() { return zero_f32(); }
  static Sum step(Sum sum, Vector a, Vector b) { return dot_bf16(sum, a, b); }

  template <bool WHOLE>
  static Vector features(const Bf16* row, int64_t d, int64_t dim) {
    if (WHOLE) return load_i32(row + d);
    return load_first_words(row + d, dim - d);
  }
  static float store_query(float* words, const Bf16* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += kFeatures, words += 16) {
      store(words, as_f32(features<false>(row, d, dim)));
    }
    return 1.0f;
  }

  // Values of two positions, paired: 16 features in each vector.
  template <bool WHOLE>
  static void values(const Bf16* row, int64_t stride, int64_t d, int64_t dim,
                     Vector (&vectors)[2]) {
    pair_words(features<WHOLE>(row, d, dim), features<WHOLE>(row + stride, d, dim), vectors);
  }
  static Vector words(const float* p) { return load_i32(p); }
  static f32x16 as_floats(Vector v) { return as_f32(v); }
  static void store_words(float* p, Vector v) { store(p, as_f32(v)); }
  static Vector weight(const float* word) {
    int32_t pair;
    std::memcpy(&pair, word, sizeof pair);
    return splat(pair);
  }
  static f32x16 store_weights(float* words, int64_t j, f32x16 weights) {
    Bf16* rounded = reinterpret_cast<Bf16*>(words) + j;
    store(rounded, weights);
    return load(rounded);
  }
};

// T: element type of the queries. S: element type of the cache's rows.
template <class T, class S>
struct FormatOf {
  static constexpr bool kPairs = kDotsBf16 && std::is_same_v<T, Bf16> && std::is_same_v<S, Bf16>;
  using type = std::conditional_t<kScaled<S>, Integers, std::conditional_t<kPairs, Bf16Pairs, Floats>>;
};

// Rows of the cache, one per position.
template <class T>
struct Rows {
  const T* first = nullptr;
  int64_t stride = 0;
  const T* operator[](int64_t j) const { return first + j * stride; }
};

// The rows to prefetch while others are read: with row j, row j of `rows`, and from row `until` on the rows of
// `then`. The rows need not exist. Several readers of the same rows take turns.
template <class T>
struct Ahead {
  Rows<T> rows;
  int64_t until = 0;
  Rows<T> then;
  int64_t turns = 1, turn = 0;

  const T* at(int64_t j) const { return j < until ? rows[j] : then[j - until]; }
  // Whether rows of this width are contiguous in memory.
  bool dense(int64_t width) const { return rows.stride == width && then.stride == width; }
};

// Prefetches the cache line of `p` exactly here, between loads. The compiler would move prefetches together,
// which made reading the keys 3 to 5 % slower.
ONWARD_INLINE void fetch_here(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht0 %0" ::"m"(*static_cast<const char*>(p)) : "memory");
#else
  __builtin_prefetch(p, 0, 3);
#endif
}

// A block of values as stored in the cache.
template <class F, class T>
struct ValueRows {
  Rows<T> rows;
  int64_t dim;

  template <bool WHOLE>
  ONWARD_INLINE void read(int64_t j, int64_t d, typename F::Vector (&vectors)[F::kVectors]) const {
    F::template values<WHOLE>(rows[j], rows.stride, d, dim, vectors);
  }
};

// A block of values as stored in the cache, paired at every use, for units of few tiles. Every read prefetches as
// many lines.
template <class F, class T>
struct StreamedValues {
  ValueRows<F, T> values;
  Ahead<T> ahead;
  bool dense;
  uint64_t asks;  // bit i: whether reading positions kPositions i … prefetches

  template <bool WHOLE>
  ONWARD_INLINE void read(int64_t j, int64_t d, typename F::Vector (&vectors)[F::kVectors]) const {
    if (asks >> (j / F::kPositions) & 1) {
      const T* next = ahead.at(j) + (dense ? d * F::kPositions : d);
      const int64_t step = dense ? F::kVectors * 16 : ahead.rows.stride;
      ONWARD_UNROLL_TILE for (int64_t i = 0; i < F::kPositions; ++i) fetch_here(next + i * step);
    }
    values.template read<WHOLE>(j, d, vectors);
  }
};

// A packed block of values: [64 / kPositions, padded dim] words. For units of many tiles.
template <class F>
struct PackedValues {
  const float* packed;
  int64_t dim, padded;

  template <bool WHOLE>
  ONWARD_INLINE void read(int64_t j, int64_t d, typename F::Vector (&vectors)[F::kVectors]) const {
    const float* p = packed + j / F::kPositions * padded + d;
    ONWARD_UNROLL_TILE for (int i = 0; i < F::kVectors; ++i) vectors[i] = F::words(p + i * 16);
  }
};

// Packs the first `positions` values of a block.
template <class F, class T>
ONWARD_APART PackedValues<F> pack_values(const ValueRows<F, T>& values, int64_t positions, int64_t padded,
                                   float* packed) {
  constexpr int64_t kStep = F::kVectors * 16;
  const int64_t whole = values.dim / kStep * kStep;
  for (int64_t j = 0; j < positions; j += F::kPositions) {
    float* p = packed + j / F::kPositions * padded;
    typename F::Vector vectors[F::kVectors];
    for (int64_t d = 0; d < values.dim; d += kStep) {
      if (d < whole) {
        values.template read<true>(j, d, vectors);
      } else {
        values.template read<false>(j, d, vectors);
      }
      for (int i = 0; i < F::kVectors; ++i) F::store_words(p + d + i * 16, vectors[i]);
    }
  }
  return {packed, values.dim, padded};
}

// A block of keys for units of many tiles, 16 positions to a vector: word 16 s + l of the keys 16 g … 16 g + 15 is
// vector (16 g + l) * steps + s. The sum of lane l of a dot product reads consecutive vectors.
struct PackedKeys {
  const float* packed;
  int64_t steps;  // vectors of features of a key

  const float* group(int64_t first_key) const { return packed + first_key * steps * 16; }
};

// Packs the first `positions` keys of a block.
template <class F, class T>
ONWARD_APART PackedKeys pack_keys(const Rows<T>& keys, int64_t positions, int64_t dim, float* packed) {
  const int64_t steps = ceil_div(dim, F::kFeatures);
  for (int64_t j = 0; j < positions; j += 16) {
    for (int64_t s = 0; s < steps; ++s) {
      const int64_t d = s * F::kFeatures;
      f32x16 square[16];
      if (d + F::kFeatures <= dim) {
        for (int i = 0; i < 16; ++i) square[i] = F::as_floats(F::template features<true>(keys[j + i], d, dim));
      } else {
        for (int i = 0; i < 16; ++i) square[i] = F::as_floats(F::template features<false>(keys[j + i], d, dim));
      }
      transpose(square);
      for (int l = 0; l < 16; ++l) store(packed + ((j + l) * steps + s) * 16, square[l]);
    }
  }
  return {packed, steps};
}

}  // namespace onward::attention
