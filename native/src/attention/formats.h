// What the terms of a sum are multiplied as: floats, which serve every element type, or pairs of
// bf16, which one instruction of AVX-512 multiplies and adds into float32. Queries, weights and packed
// values are laid out in words of 32 bits, each a float or a pair.
#pragma once
#include <cstring>
#include <type_traits>

#include "../simd_math.h"
#include "problem.h"
#include "transpose.h"

namespace onward {

// An element of a row of 8-bit integers.
struct I8 {
  int8_t value;
};
inline f32x16 load(const I8* p) { return to_f32(load_bytes(&p->value)); }

}  // namespace onward

namespace onward::attention {

// The formats of a cache's rows (KVFormat.code in Python): floats of the dtype of the queries, or D
// integers and the float that multiplies them.
constexpr int32_t kFloatRows = 0, kInt8Rows = 1;

// Whether rows of this element have a scale. Their products are taken without it: a key's scale then multiplies
// its scores, and a value's the weights.
template <class S>
constexpr bool kScaled = std::is_same_v<S, I8>;
// Bytes of a scale, which end a row.
constexpr int64_t kScaleBytes = sizeof(float);

inline float scale_of(const I8* row, int64_t width) {
  float scale;
  std::memcpy(&scale, row + width - kScaleBytes, kScaleBytes);
  return scale;
}

// Writes `dim` floats as a row of integers and their scale: the largest magnitude is 127. A row with a number
// that is infinite or NaN has the scale NaN, one that is all but 0 the scale 0.
template <class T>
inline void store_row(const T* x, int64_t dim, I8* row) {
  f32x16 most = zero_f32(), poison = zero_f32();
  for (int64_t d = 0; d < dim; d += 16) {
    const f32x16 v = load_first(x + d, dim - d);
    most = max(abs(v), most);
    poison = fma(v, zero_f32(), poison);
  }
  const float largest = max_lanes(most);
  const bool broken = any(is_nan(poison)), zero = largest < 1e-30f;
  const float scale = broken ? __builtin_nanf("") : zero ? 0.0f : largest / 127.0f;
  if (broken || zero) {
    std::memset(row, 0, size_t(dim));
  } else {
    const f32x16 inverse = splat(127.0f / largest);
    for (int64_t d = 0; d < dim; d += 16) {
      int8_t bytes[16];
      store_low_bytes(bytes, to_i32(mul(load_first(x + d, dim - d), inverse)));
      std::memcpy(row + d, bytes, size_t(dim - d < 16 ? dim - d : 16));
    }
  }
  std::memcpy(row + dim, &scale, kScaleBytes);
}

// Inner loops whose arrays must become registers: unrolled, inlined into one function each, and that
// function kept apart, so that the compiler's choices do not change with what surrounds them.
#define ONWARD_UNROLL_TILE _Pragma("GCC unroll 16")
#define ONWARD_INLINE __attribute__((always_inline)) inline
#define ONWARD_APART __attribute__((noinline))

struct Floats {
  using Vector = f32x16;
  static constexpr int64_t kFeatures = 16;  // of a vector of keys and queries
  static constexpr int64_t kPositions = 1;  // that a vector of values and a word of weights hold
  static constexpr int kVectors = 1;        // of values that are read together

  static f32x16 step(f32x16 sum, Vector a, Vector b) { return fma(a, b, sum); }

  // Features d, …, d + 15 of a row, zeros past `dim`.
  template <bool WHOLE, class T>
  static Vector features(const T* row, int64_t d, int64_t dim) {
    return WHOLE ? load(row + d) : load_first(row + d, dim - d);
  }
  template <class T>
  static void store_query(float* words, const T* row, int64_t d, int64_t dim) {
    store(words, load_first(row + d, dim - d));
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
  // Rounds weights to what the words can hold, stores them, returns them as stored.
  static f32x16 store_weights(float* words, int64_t j, f32x16 weights) {
    store(words + j, weights);
    return weights;
  }
};

template <class T>
struct FormatOf {
  using type = Floats;
};

#if defined(__AVX512F__)

struct Bf16Pairs {
  using Vector = i32x16;
  static constexpr int64_t kFeatures = 32;
  static constexpr int64_t kPositions = 2;
  static constexpr int kVectors = 2;

  static f32x16 step(f32x16 sum, Vector a, Vector b) { return dot_bf16(sum, a, b); }

  template <bool WHOLE>
  static Vector features(const Bf16* row, int64_t d, int64_t dim) {
    if (WHOLE) return load_i32(row + d);
    const int64_t left = dim - d;
    const auto real = left >= 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
    return {_mm512_maskz_loadu_epi16(real, row + d)};
  }
  // Integers of 8 bits are exact in bf16.
  template <bool WHOLE>
  static Vector features(const I8* row, int64_t d, int64_t dim) {
    const __m256i bytes = load_i8<WHOLE>(row, d, dim);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return {(__m512i)_mm512_cvtne2ps_pbh(high, low)};
  }
  template <bool WHOLE>
  static __m256i load_i8(const I8* row, int64_t d, int64_t dim) {
    if (WHOLE) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + d));
    const int64_t left = dim - d;
    const auto real = left >= 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
    return _mm256_maskz_loadu_epi8(real, row + d);
  }
  static void store_query(float* words, const Bf16* row, int64_t d, int64_t dim) {
    _mm512_storeu_si512(words, features<false>(row, d, dim).v);
  }

  // Values of two positions, paired: 16 features in each vector.
  template <bool WHOLE>
  static void values(const Bf16* row, int64_t stride, int64_t d, int64_t dim,
                     Vector (&vectors)[2]) {
    alignas(64) static constexpr int16_t kPairs[32] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5,
                                                       37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42,
                                                       11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kPairs);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i a = features<WHOLE>(row, d, dim).v, b = features<WHOLE>(row + stride, d, dim).v;
    vectors[0] = {_mm512_permutex2var_epi16(a, low, b)};
    vectors[1] = {_mm512_permutex2var_epi16(a, high, b)};
  }
  template <bool WHOLE>
  static void values(const I8* row, int64_t stride, int64_t d, int64_t dim, Vector (&vectors)[2]) {
    const __m256i a = load_i8<WHOLE>(row, d, dim), b = load_i8<WHOLE>(row + stride, d, dim);
    const auto paired = [](__m128i first, __m128i second) {
      const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(first));
      const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(second));
      return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high));
    };
    vectors[0] = {paired(_mm256_castsi256_si128(a), _mm256_castsi256_si128(b))};
    vectors[1] = {paired(_mm256_extracti128_si256(a, 1), _mm256_extracti128_si256(b, 1))};
  }
  static Vector words(const float* p) { return load_i32(p); }
  static f32x16 as_floats(Vector v) { return {_mm512_castsi512_ps(v.v)}; }
  static void store_words(float* p, Vector v) { _mm512_storeu_si512(p, v.v); }
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

template <>
struct FormatOf<Bf16> {
  using type = Bf16Pairs;
};

#endif

// Rows of the cache, one a position.
template <class T>
struct Rows {
  const T* first = nullptr;
  int64_t stride = 0;
  const T* operator[](int64_t j) const { return first + j * stride; }
};

// What to ask memory for while rows are read: at row j the row j of `rows`, from row `until` on those of
// `then`. The rows need not exist. Several readers of the same rows take turns in asking.
template <class T>
struct Ahead {
  Rows<T> rows;
  int64_t until = 0;
  Rows<T> then;
  int64_t turns = 1, turn = 0;

  const T* at(int64_t j) const { return j < until ? rows[j] : then[j - until]; }
  // Whether rows of this width follow each other in memory without a gap.
  bool dense(int64_t width) const { return rows.stride == width && then.stride == width; }
};

// Asks for the line of `p` at this place between loads: a compiler would gather such requests, and then
// keys came 3 to 5 % slower.
ONWARD_INLINE void fetch_here(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht0 %0" ::"m"(*static_cast<const char*>(p)) : "memory");
#else
  __builtin_prefetch(p, 0, 3);
#endif
}

// A block of values as it lies in the cache.
template <class F, class T>
struct ValueRows {
  Rows<T> rows;
  int64_t dim;

  template <bool WHOLE>
  ONWARD_INLINE void read(int64_t j, int64_t d, typename F::Vector (&vectors)[F::kVectors]) const {
    F::template values<WHOLE>(rows[j], rows.stride, d, dim, vectors);
  }
};

// The same, paired at every use, for a unit of one tile: every read asks for as many lines ahead.
template <class F, class T>
struct StreamedValues {
  ValueRows<F, T> values;
  Ahead<T> ahead;
  bool dense;
  uint64_t asks;  // bit i: whether reading positions kPositions i … asks for what is ahead

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

// The same packed: [64 / kPositions, padded dim] words. For units of many tiles.
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
// vector (16 g + l) * steps + s. The sum of lane l of a dot product walks along neighbouring vectors.
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
