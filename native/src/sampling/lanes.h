// What sampling needs of vectors beyond simd.h: masks as bits, exact sums, Philox for a block of ids.
//
//   bits(mask16)             one bit a lane
//   complement_24(words)     the upper 24 bits of ~word as floats
//   UnitSums                 exact sums of floats in units of 2^-40
//   philox_block             the 64 words of random bits of 64 neighbouring ids, in their order
#pragma once
#include <cmath>

#include "philox.h"
#include "simd_math.h"

namespace onward {

// Relative probabilities are counted in these units: as integers, so that their sums are exact and
// depend on no order.
constexpr float kUnits = 0x1p40f;

#if defined(__AVX512F__)

inline uint32_t bits(mask16 m) { return m.v; }
inline f32x16 complement_24(const uint32_t* words) {
  const __m512i w = _mm512_loadu_si512(words);
  return {_mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_ternarylogic_epi32(w, w, w, 0x55), 8))};
}

class UnitSums {
 public:
  // Every lane in 0 … 1.
  void add(f32x16 a) {
    const __m512 units = _mm512_mul_ps(a.v, _mm512_set1_ps(kUnits));
    sums_ = _mm512_add_epi64(sums_, _mm512_cvtps_epi64(avx512::low_half(units)));
    sums_ = _mm512_add_epi64(sums_, _mm512_cvtps_epi64(avx512::high_half(units)));
  }
  int64_t total() const { return _mm512_reduce_add_epi64(sums_); }

 private:
  __m512i sums_ = _mm512_setzero_si512();
};

struct PhiloxLanes {
  static constexpr int kLanes = 16;
  using Word = __m512i;
  static Word load(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static Word splat(uint32_t a) { return _mm512_set1_epi32(int32_t(a)); }
  static Word mix(Word a, Word b, uint32_t key) {
    return _mm512_ternarylogic_epi32(a, b, splat(key), 0x96);
  }
  static void multiply(Word a, uint32_t by, Word& high, Word& low) {
    const Word even = _mm512_mul_epu32(a, splat(by));
    const Word odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), splat(by));
    high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  }
  // Transposes 4 x 4 words within every 128 bits.
  static void store_transposed(uint32_t* to, const Word (&w)[4]) {
    const Word a = _mm512_unpacklo_epi32(w[0], w[1]), b = _mm512_unpackhi_epi32(w[0], w[1]);
    const Word c = _mm512_unpacklo_epi32(w[2], w[3]), d = _mm512_unpackhi_epi32(w[2], w[3]);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi64(a, c));
    _mm512_storeu_si512(to + 16, _mm512_unpackhi_epi64(a, c));
    _mm512_storeu_si512(to + 32, _mm512_unpacklo_epi64(b, d));
    _mm512_storeu_si512(to + 48, _mm512_unpackhi_epi64(b, d));
  }
};

#elif defined(__AVX2__)

inline uint32_t bits(mask16 m) {
  return uint32_t(_mm256_movemask_ps(m.lo)) | uint32_t(_mm256_movemask_ps(m.hi)) << 8;
}
inline f32x16 complement_24(const uint32_t* words) {
  const auto eight = [](const uint32_t* p) {
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_cvtepi32_ps(_mm256_srli_epi32(_mm256_xor_si256(w, _mm256_set1_epi32(-1)), 8));
  };
  return {eight(words), eight(words + 8)};
}

class UnitSums {
 public:
  // Every lane in 0 … 1.
  void add(f32x16 a) {
    add_quad(_mm256_castps256_ps128(a.lo));
    add_quad(_mm256_extractf128_ps(a.lo, 1));
    add_quad(_mm256_castps256_ps128(a.hi));
    add_quad(_mm256_extractf128_ps(a.hi, 1));
    added_ += 16;
  }
  int64_t total() const {
    uint64_t lanes[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), sums_);
    return int64_t(lanes[0] + lanes[1] + lanes[2] + lanes[3] - added_ * kBias);
  }

 private:
  // A double of 1.5 * 2^52 and more holds an integer in its low bits: its bits, summed modulo 2^64,
  // are the sum of the integers and as many biases.
  static constexpr uint64_t kBias = 0x4338000000000000;
  void add_quad(__m128 a) {
    const __m256d units = _mm256_cvtps_pd(_mm_mul_ps(a, _mm_set1_ps(kUnits)));
    const __m256d biased = _mm256_add_pd(units, _mm256_set1_pd(0x1.8p52));
    sums_ = _mm256_add_epi64(sums_, _mm256_castpd_si256(biased));
  }
  __m256i sums_ = _mm256_setzero_si256();
  uint64_t added_ = 0;
};

struct PhiloxLanes {
  static constexpr int kLanes = 8;
  using Word = __m256i;
  static Word load(const uint32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static Word splat(uint32_t a) { return _mm256_set1_epi32(int32_t(a)); }
  static Word mix(Word a, Word b, uint32_t key) {
    return _mm256_xor_si256(_mm256_xor_si256(a, b), splat(key));
  }
  static void multiply(Word a, uint32_t by, Word& high, Word& low) {
    const Word even = _mm256_mul_epu32(a, splat(by));
    const Word odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), splat(by));
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  }
  static void store_transposed(uint32_t* to, const Word (&w)[4]) {
    const Word a = _mm256_unpacklo_epi32(w[0], w[1]), b = _mm256_unpackhi_epi32(w[0], w[1]);
    const Word c = _mm256_unpacklo_epi32(w[2], w[3]), d = _mm256_unpackhi_epi32(w[2], w[3]);
    const auto store = [to](int at, Word v) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + at), v);
    };
    store(0, _mm256_unpacklo_epi64(a, c));
    store(8, _mm256_unpackhi_epi64(a, c));
    store(16, _mm256_unpacklo_epi64(b, d));
    store(24, _mm256_unpackhi_epi64(b, d));
  }
};

#else

inline uint32_t bits(mask16 m) {
  uint32_t all = 0;
  for (int i = 0; i < 16; ++i) all |= uint32_t(m.v[i] != 0) << i;
  return all;
}
inline f32x16 complement_24(const uint32_t* words) {
  return to_f32((i32x16)(~(u32x16)load_i32(words) >> 8));
}

class UnitSums {
 public:
  // Every lane in 0 … 1.
  void add(f32x16 a) {
    for (int i = 0; i < 16; ++i) total_ += int64_t((double(a[i] * kUnits) + 0x1.8p52) - 0x1.8p52);
  }
  int64_t total() const { return total_; }

 private:
  int64_t total_ = 0;
};

#endif

#if defined(__AVX2__)

// Philox of the quads first … first + 15, at `position`.
inline void philox_block(uint32_t first, uint32_t position, uint64_t seed, uint32_t* words) {
  using L = PhiloxLanes;
  // Lane 4 g + k works on quad g + k * kLanes / 4: then transposing within groups of four lanes
  // leaves the ids in their order.
  uint32_t order[L::kLanes];
  for (int lane = 0; lane < L::kLanes; ++lane) {
    order[lane] = uint32_t(lane / 4 + lane % 4 * (L::kLanes / 4));
  }
  for (uint32_t quad = 0; quad < 16; quad += L::kLanes) {
    uint32_t counters[L::kLanes];
    for (int lane = 0; lane < L::kLanes; ++lane) counters[lane] = first + quad + order[lane];
    L::Word c[4] = {L::load(counters), L::splat(position), L::splat(0), L::splat(0)};
    uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < kPhiloxRounds; ++round) {
      L::Word high0, low0, high1, low1;
      L::multiply(c[0], kPhiloxMultipliers[0], high0, low0);
      L::multiply(c[2], kPhiloxMultipliers[1], high1, low1);
      c[0] = L::mix(high1, c[1], key[0]);
      c[2] = L::mix(high0, c[3], key[1]);
      c[1] = low1;
      c[3] = low0;
      key[0] += kPhiloxKeySteps[0];
      key[1] += kPhiloxKeySteps[1];
    }
    L::store_transposed(words + 4 * quad, c);
  }
}

#else

inline void philox_block(uint32_t first, uint32_t position, uint64_t seed, uint32_t* words) {
  for (uint32_t quad = 0; quad < 16; ++quad) philox(first + quad, position, seed, words + 4 * quad);
}

#endif

}  // namespace onward
