// Vectors of 16 in two registers of 256 bits: AVX2, FMA and F16C. The sets with these registers include it, and
// add their dot products of integers.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "api.h"

namespace onward {

struct f32x16 { __m256 lo, hi; };
struct i32x16 { __m256i lo, hi; };

inline f32x16 zero_f32() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline i32x16 zero_i32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline f32x16 splat(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
inline i32x16 splat(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }

namespace avx2 {
inline __m256 widen_bf16(__m128i half) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
// Round to nearest even by adding half of the last kept bit; NaN keeps its sign and becomes quiet.
inline __m256i narrow_bf16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256 is_nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  return _mm256_srli_epi32(
      _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan)), 16);
}
inline __m128i load_half(const void* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline void store_half(void* p, __m128i a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), a);
}
}  // namespace avx2

inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline f32x16 load(const Bf16* p) {
  return {avx2::widen_bf16(avx2::load_half(p)), avx2::widen_bf16(avx2::load_half(p + 8))};
}
inline f32x16 load(const F16* p) {
  return {_mm256_cvtph_ps(avx2::load_half(p)), _mm256_cvtph_ps(avx2::load_half(p + 8))};
}
inline i32x16 load_i32(const void* p) {
  const auto* v = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}

inline void store(float* p, f32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store(Bf16* p, f32x16 a) {
  // packus works within 128-bit halves: the permutation puts the quarters back in order.
  const __m256i packed = _mm256_packus_epi32(avx2::narrow_bf16(a.lo), avx2::narrow_bf16(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store(F16* p, f32x16 a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  avx2::store_half(p, _mm256_cvtps_ph(a.lo, kNearest));
  avx2::store_half(p + 8, _mm256_cvtps_ph(a.hi, kNearest));
}

inline f32x16 add(f32x16 a, f32x16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline f32x16 sub(f32x16 a, f32x16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline f32x16 mul(f32x16 a, f32x16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline f32x16 div(f32x16 a, f32x16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline f32x16 min(f32x16 a, f32x16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline f32x16 max(f32x16 a, f32x16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline f32x16 abs(f32x16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline f32x16 sqrt(f32x16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
inline f32x16 to_f32(i32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

namespace avx2 {
// Lanes 8 … 15 over 0 … 7, and further halves: each step folds the upper half onto the lower.
template <class Op128>
inline float fold(__m256 eight, Op128 op) {
  const __m128 four = op(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = op(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(op(two, _mm_movehdup_ps(two)));
}
}  // namespace avx2

inline float sum_lanes(f32x16 a) {
  return avx2::fold(_mm256_add_ps(a.lo, a.hi), [](__m128 x, __m128 y) { return _mm_add_ps(x, y); });
}
inline float max_lanes(f32x16 a) {
  return avx2::fold(_mm256_max_ps(a.lo, a.hi), [](__m128 x, __m128 y) { return _mm_max_ps(x, y); });
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// To the nearest integer, ties to even; what does not fit is undefined.
inline i32x16 to_i32(f32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
// The low byte of every lane.
inline void store_low_bytes(int8_t* p, i32x16 a) {
  const __m256i low = _mm256_set1_epi32(0xff);
  const __m256i words =
      _mm256_packus_epi32(_mm256_and_si256(a.lo, low), _mm256_and_si256(a.hi, low));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  avx2::store_half(p, _mm_packus_epi16(_mm256_castsi256_si128(ordered),
                                       _mm256_extracti128_si256(ordered, 1)));
}
inline i32x16 add(i32x16 a, i32x16 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline int32_t sum_lanes(i32x16 a) {
  const __m256i eight = _mm256_add_epi32(a.lo, a.hi);
  __m128i four =
      _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return _mm_cvtsi128_si32(four);
}

constexpr bool kDotsBf16 = false;
// acc[i] += w[2i+1] * x[2i+1], then += w[2i] * x[2i], over bf16 pairs: the order of vdpbf16ps.
inline f32x16 dot_bf16(f32x16 acc, i32x16 w, i32x16 x) {
  const __m256i high = _mm256_set1_epi32(int32_t(0xffff0000));
  const auto step = [high](__m256 a, __m256i wp, __m256i xp) {
    a = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(wp, high)),
                        _mm256_castsi256_ps(_mm256_and_si256(xp, high)), a);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(wp, 16)),
                           _mm256_castsi256_ps(_mm256_slli_epi32(xp, 16)), a);
  };
  return {step(acc.lo, w.lo, x.lo), step(acc.hi, w.hi, x.hi)};
}

// 32 bytes as pairs of 16-bit integers, all of them or the first n.
inline i32x16 widen_i8(const int8_t* p) {
  return {_mm256_cvtepi8_epi16(avx2::load_half(p)), _mm256_cvtepi8_epi16(avx2::load_half(p + 16))};
}
inline i32x16 widen_first_i8(const int8_t* p, int64_t n) {
  int8_t padded[32] = {};
  std::memcpy(padded, p, size_t(n < 32 ? n : 32));
  return widen_i8(padded);
}
// The first n of 32 words of 16 bits; the others are 0.
inline i32x16 load_first_words(const void* p, int64_t n) {
  int16_t padded[32] = {};
  std::memcpy(padded, p, size_t(n < 32 ? n : 32) * sizeof(int16_t));
  return load_i32(padded);
}
// The words a[0], b[0], a[1], b[1], … of 16 bits.
inline void pair_words(i32x16 a, i32x16 b, i32x16 (&pairs)[2]) {
  const auto sixteen = [](__m256i x, __m256i y) -> i32x16 {
    const __m256i low = _mm256_unpacklo_epi16(x, y), high = _mm256_unpackhi_epi16(x, y);
    return {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
  };
  pairs[0] = sixteen(a.lo, b.lo);
  pairs[1] = sixteen(a.hi, b.hi);
}
// The low 16 bits of every lane, which hold all of it.
inline void store_low_words(int16_t* p, i32x16 a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}

template <int kBits>
inline i32x16 shift_left(i32x16 a) {
  return {_mm256_slli_epi32(a.lo, kBits), _mm256_slli_epi32(a.hi, kBits)};
}
template <int kBits>
inline i32x16 shift_right(i32x16 a) {
  return {_mm256_srli_epi32(a.lo, kBits), _mm256_srli_epi32(a.hi, kBits)};
}
inline i32x16 bit_and(i32x16 a, int32_t b) {
  const __m256i mask = _mm256_set1_epi32(b);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
inline i32x16 bit_or(i32x16 a, i32x16 b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
inline f32x16 as_f32(i32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline i32x16 load_bytes(const uint8_t* p) {
  const __m128i bytes = avx2::load_half(p);
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
inline i32x16 load_bytes(const int8_t* p) {
  const __m128i bytes = avx2::load_half(p);
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
// Of every byte, 0 … 15, the byte of a table.
inline i32x16 look_up(i32x16 a, const uint8_t* table) {
  const __m256i both = _mm256_broadcastsi128_si256(avx2::load_half(table));
  return {_mm256_shuffle_epi8(both, a.lo), _mm256_shuffle_epi8(both, a.hi)};
}

// Of every lane's lowest 4 bits the float of a table.
inline f32x16 look_up(i32x16 a, const float* table) {
  const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
  const auto of = [&](__m256i at) {
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(at, 28));  // the sign chooses
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, at), _mm256_permutevar8x32_ps(high, at), upper);
  };
  return {of(a.lo), of(a.hi)};
}
// 16 numbers in E4M3, divided by 256: as float16 their exponents are 8 less. NaN is no number's.
inline f32x16 e4m3_256th(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(avx2::load_half(p));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xbf80)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}

// The low and the high 4 bits of every byte, as bytes.
inline i32x16 low_nibbles(i32x16 a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
inline i32x16 high_nibbles(i32x16 a) {
  return low_nibbles({_mm256_srli_epi32(a.lo, 4), _mm256_srli_epi32(a.hi, 4)});
}
// 16 times the high 4 bits of every byte, and a lane divided by 16.
inline i32x16 high_nibbles_16(i32x16 a) {
  const __m256i mask = _mm256_set1_epi8(char(0xf0));
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
inline i32x16 sixteenth(i32x16 a) {
  return {_mm256_srai_epi32(a.lo, 4), _mm256_srai_epi32(a.hi, 4)};
}

// Comparisons and masks.
struct mask16 { __m256 lo, hi; };
inline mask16 less(f32x16 a, f32x16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
inline mask16 is_nan(f32x16 a) {
  return {_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)};
}
inline mask16 either(mask16 a, mask16 b) {
  return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)};
}
inline bool any(mask16 m) { return _mm256_movemask_ps(_mm256_or_ps(m.lo, m.hi)) != 0; }
inline mask16 lanes_of(uint32_t bits) {
  const auto eight = [](uint32_t of) {
    const __m256i powers = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i found = _mm256_and_si256(_mm256_set1_epi32(int32_t(of)), powers);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(found, powers));
  };
  return {eight(bits), eight(bits >> 8)};
}
inline f32x16 select(mask16 m, f32x16 a, f32x16 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}
inline f32x16 round(f32x16 a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kNearest), _mm256_round_ps(a.hi, kNearest)};
}
// In two factors, because 2^n alone may be no float.
inline f32x16 times_power_of_two(f32x16 a, f32x16 n) {
  const auto scale = [](__m256 value, __m256 power) {
    const __m256i whole = _mm256_cvtps_epi32(power);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    const auto factor = [](__m256i exponent) {
      return _mm256_castsi256_ps(
          _mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
    };
    return _mm256_mul_ps(_mm256_mul_ps(value, factor(half)),
                         factor(_mm256_sub_epi32(whole, half)));
  };
  return {scale(a.lo, n.lo), scale(a.hi, n.hi)};
}
inline float highest(f32x16 a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// The sums of the lanes of several vectors, see simd.h.
// four: the lanes i, i + 4, i + 8, i + 12 of each vector together.
template <class Add>
__attribute__((always_inline)) inline __m128 folded_lanes(const __m128 (&four)[4], Add add) {
  const __m128 a = add(_mm_movelh_ps(four[0], four[1]), _mm_movehl_ps(four[1], four[0]));
  const __m128 b = add(_mm_movelh_ps(four[2], four[3]), _mm_movehl_ps(four[3], four[2]));
  return add(_mm_shuffle_ps(a, b, 0x88), _mm_shuffle_ps(a, b, 0xdd));
}

__attribute__((always_inline)) inline void sum_lanes_of(const f32x16 (&v)[4], float* sums) {
  __m128 four[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 eight = _mm256_add_ps(v[i].lo, v[i].hi);
    four[i] = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  }
  _mm_storeu_ps(sums, folded_lanes(four, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); }));
}

__attribute__((always_inline)) inline void sum_lanes_of(const i32x16 (&v)[4], float* sums) {
  __m128 four[4];
  for (int i = 0; i < 4; ++i) {
    const __m256i eight = _mm256_add_epi32(v[i].lo, v[i].hi);
    four[i] = (__m128)_mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  }
  const auto add = [](__m128 a, __m128 b) { return (__m128)_mm_add_epi32((__m128i)a, (__m128i)b); };
  _mm_storeu_ps(sums, _mm_cvtepi32_ps((__m128i)folded_lanes(four, add)));
}

namespace avx2 {
// A square of 8.
__attribute__((always_inline)) inline void transpose(__m256 (&v)[8]) {
  __m256 pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int half = 0; half < 2; ++half) {
      fours[i + 2 * half] = _mm256_shuffle_ps(pairs[i + half], pairs[i + half + 2], 0x44);
      fours[i + 2 * half + 1] = _mm256_shuffle_ps(pairs[i + half], pairs[i + half + 2], 0xee);
    }
  }
  for (int c = 0; c < 4; ++c) {
    v[c] = _mm256_permute2f128_ps(fours[c], fours[4 + c], 0x20);
    v[4 + c] = _mm256_permute2f128_ps(fours[c], fours[4 + c], 0x31);
  }
}
}  // namespace avx2

inline void transpose(f32x16 (&v)[16]) {
  for (int part = 0; part < 3; ++part) {
    // The squares on the diagonal, then the other two, which change places.
    __m256 a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = part == 0 ? v[i].lo : part == 1 ? v[8 + i].hi : v[i].hi;
    avx2::transpose(a);
    if (part == 2) {
      for (int i = 0; i < 8; ++i) b[i] = v[8 + i].lo;
      avx2::transpose(b);
    }
    for (int i = 0; i < 8; ++i) {
      if (part == 0) v[i].lo = a[i];
      if (part == 1) v[8 + i].hi = a[i];
      if (part == 2) v[8 + i].lo = a[i], v[i].hi = b[i];
    }
  }
}

// Of sampling, see simd.h.
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

// The shapes of tiles, for 16 registers.
namespace shapes {
namespace linear {
// 5 rows of one block have 10 sums: two multiplications a cycle, each waiting 4 or 5 cycles for its sum.
constexpr int kStreamRows = 5, kTileRows = 5;
constexpr int kBlocks[kStreamRows + 1] = {0, 4, 2, 1, 1, 1};
constexpr int kInt4TileRows = 5, kInt4Blocks = 1, kGroupedStreamRows = 5;
constexpr int64_t kResidentFloatBytes = 192 << 10;
}  // namespace linear
namespace attention {
constexpr int kSumsAtOnce = 4;
constexpr int kTileRows = 6;
constexpr int kScoreRows = 3, kScoreGroups = 1;
constexpr int tile_vectors(int rows) { return rows <= 2 ? 2 : 1; }
constexpr int kIntegerVectors = 1;
}  // namespace attention
namespace dots {
constexpr int kTileRows = 2, kTileColumns = 2;
}
namespace rows {
constexpr int kTileRows = 6, kTileVectors = 1;
}
namespace state {
constexpr int kWide = 2;
}
}  // namespace shapes

}  // namespace onward
