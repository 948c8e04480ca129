// Vectors of 16 in one register of 512 bits: AVX-512 F, BW, VL, DQ and VNNI. The sets with these registers
// include it, and add how they multiply and store bf16.
#pragma once
#include <immintrin.h>

#include "api.h"

namespace onward {

struct f32x16 { __m512 v; };
struct i32x16 { __m512i v; };

inline f32x16 zero_f32() { return {_mm512_setzero_ps()}; }
inline i32x16 zero_i32() { return {_mm512_setzero_si512()}; }
inline f32x16 splat(float a) { return {_mm512_set1_ps(a)}; }
inline i32x16 splat(int32_t a) { return {_mm512_set1_epi32(a)}; }

inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline f32x16 load(const Bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline f32x16 load(const F16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline i32x16 load_i32(const void* p) { return {_mm512_loadu_si512(p)}; }

inline void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
inline void store(F16* p, f32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline f32x16 abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
inline f32x16 sqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
inline f32x16 to_f32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }

namespace avx512 {
// Lanes 8 … 15 over 0 … 7, and further halves: each step folds the upper half onto the lower.
template <class Op128>
inline float fold(__m256 eight, Op128 op) {
  const __m128 four = op(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = op(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(op(two, _mm_movehdup_ps(two)));
}
inline __m256 low_half(__m512 v) { return _mm512_castps512_ps256(v); }
inline __m256 high_half(__m512 v) { return _mm512_extractf32x8_ps(v, 1); }
}  // namespace avx512

inline float sum_lanes(f32x16 a) {
  return avx512::fold(_mm256_add_ps(avx512::low_half(a.v), avx512::high_half(a.v)),
                      [](__m128 x, __m128 y) { return _mm_add_ps(x, y); });
}
inline float max_lanes(f32x16 a) {
  return avx512::fold(_mm256_max_ps(avx512::low_half(a.v), avx512::high_half(a.v)),
                      [](__m128 x, __m128 y) { return _mm_max_ps(x, y); });
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// To the nearest integer, ties to even; what does not fit is undefined.
inline i32x16 to_i32(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
// The low byte of every lane.
inline void store_low_bytes(int8_t* p, i32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
inline int32_t sum_lanes(i32x16 a) { return _mm512_reduce_add_epi32(a.v); }
inline i32x16 add(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }

// acc[i] += the dot product of 4 unsigned bytes of w with 4 signed bytes of x, exact modulo 2^32.
// Assembly, because GCC 12 copies the accumulator before and after the intrinsic, which costs a
// micro-kernel a third of its speed.
inline i32x16 dot_i8(i32x16 acc, i32x16 w, i32x16 x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(x.v));
  return acc;
}

constexpr bool kDotsBytes = true;
// The same with one word of x for all lanes, read as an operand of the instruction.
inline i32x16 dot_i8(i32x16 acc, i32x16 w, const int32_t* x) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(w.v), "m"(*x));
  return acc;
}

// acc[i] += w[2i] * x[2i] + w[2i+1] * x[2i+1] over pairs of 16-bit integers, exact modulo 2^32.
inline i32x16 dot_i16(i32x16 acc, i32x16 w, i32x16 x) {
  asm("vpdpwssd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(x.v));
  return acc;
}

struct ByteWords { static constexpr bool kUsed = false; };

// 32 bytes as pairs of 16-bit integers, all of them or the first n.
inline i32x16 widen_i8(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline i32x16 widen_first_i8(const int8_t* p, int64_t n) {
  const auto real = n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1;
  return {_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(real, p))};
}
// The first n of 32 words of 16 bits; the others are 0.
inline i32x16 load_first_words(const void* p, int64_t n) {
  const auto real = n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1;
  return {_mm512_maskz_loadu_epi16(real, p)};
}
// The words a[0], b[0], a[1], b[1], … of 16 bits.
inline void pair_words(i32x16 a, i32x16 b, i32x16 (&pairs)[2]) {
  alignas(64) static constexpr int16_t kPairs[32] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5,
                                                     37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42,
                                                     11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kPairs);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  pairs[0] = {_mm512_permutex2var_epi16(a.v, low, b.v)};
  pairs[1] = {_mm512_permutex2var_epi16(a.v, high, b.v)};
}
// The low 16 bits of every lane.
inline void store_low_words(int16_t* p, i32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}

template <int kBits>
inline i32x16 shift_left(i32x16 a) { return {_mm512_slli_epi32(a.v, kBits)}; }
template <int kBits>
inline i32x16 shift_right(i32x16 a) { return {_mm512_srli_epi32(a.v, kBits)}; }
inline i32x16 bit_and(i32x16 a, int32_t b) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(b))}; }
inline i32x16 bit_or(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
inline f32x16 as_f32(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
inline i32x16 load_bytes(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline i32x16 load_bytes(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// Of every byte, 0 … 15, the byte of a table.
inline i32x16 look_up(i32x16 a, const uint8_t* table) {
  const __m128i lane = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(lane), a.v)};
}

// Of every lane's lowest 4 bits the float of a table.
inline f32x16 look_up(i32x16 a, const float* table) {
  return {_mm512_permutexvar_ps(a.v, _mm512_loadu_ps(table))};
}
// 16 numbers in E4M3, divided by 256: as float16 their exponents are 8 less. NaN is no number's.
inline f32x16 e4m3_256th(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xbf80)));
  return {_mm512_cvtph_ps(half)};
}

// The low and the high 4 bits of every byte, as bytes.
inline i32x16 low_nibbles(i32x16 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline i32x16 high_nibbles(i32x16 a) {
  return {_mm512_and_si512(_mm512_srli_epi32(a.v, 4), _mm512_set1_epi8(15))};
}
// 16 times the high 4 bits of every byte, and a lane divided by 16: cheaper than high_nibbles where
// the sums of low and high halves are kept apart.
inline i32x16 high_nibbles_16(i32x16 a) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi8(char(0xf0)))};
}
inline i32x16 sixteenth(i32x16 a) { return {_mm512_srai_epi32(a.v, 4)}; }

// Comparisons and masks.
struct mask16 { __mmask16 v; };
inline mask16 less(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline mask16 is_nan(f32x16 a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
inline mask16 either(mask16 a, mask16 b) { return {__mmask16(a.v | b.v)}; }
inline bool any(mask16 m) { return m.v != 0; }
inline mask16 lanes_of(uint32_t bits) { return {__mmask16(bits)}; }
inline f32x16 select(mask16 m, f32x16 a, f32x16 b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
inline f32x16 round(f32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline f32x16 times_power_of_two(f32x16 a, f32x16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline float highest(f32x16 a) { return _mm512_reduce_max_ps(a.v); }

// The sums of the lanes of several vectors, see simd.h.
// The sums in lanes of their own. add: of two vectors.
template <class V, class Add>
__attribute__((always_inline)) inline __m512 folded_lanes(const V (&v)[16], Add add) {
  const auto bits = [](auto a) { return (__m512)a.v; };
  // The vectors of a step hold half as many lanes of twice as many sums.
  __m512 quarters[4], pairs[2];
  for (int i = 0; i < 4; ++i) {
    const auto halves = [&](__m512 a, __m512 b) {
      return add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    };
    const __m512 a = halves(bits(v[i]), bits(v[4 + i])), b = halves(bits(v[8 + i]), bits(v[12 + i]));
    quarters[i] = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  for (int i = 0; i < 2; ++i) {
    const __m512d a = _mm512_castps_pd(quarters[2 * i]), b = _mm512_castps_pd(quarters[2 * i + 1]);
    pairs[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  return add(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88), _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd));
}

__attribute__((always_inline)) inline void sum_lanes_of(const f32x16 (&v)[16], float* sums) {
  store(sums, f32x16{folded_lanes(v, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); })});
}

// Four at once: the halves of two vectors make one vector, and so on.
inline void sum_lanes_of(const f32x16 (&v)[4], float* sums) {
  const auto fold = [](__m512 a, __m512 b, auto lower, auto upper) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, decltype(lower)::value),
                         _mm512_shuffle_f32x4(a, b, decltype(upper)::value));
  };
  using Low = std::integral_constant<int, 0x44>;
  using High = std::integral_constant<int, 0xee>;
  using Even = std::integral_constant<int, 0x88>;
  using Odd = std::integral_constant<int, 0xdd>;
  const __m512 first = fold(v[0].v, v[1].v, Low{}, High{}), second = fold(v[2].v, v[3].v, Low{}, High{});
  const __m512 four = fold(first, second, Even{}, Odd{});
  const __m512 two = _mm512_add_ps(four, _mm512_permute_ps(four, 0x4e));
  const __m512 one = _mm512_add_ps(two, _mm512_permute_ps(two, 0xb1));
  _mm_storeu_ps(sums, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, one)));
}

__attribute__((always_inline)) inline void sum_lanes_of(const i32x16 (&v)[16], float* sums) {
  const auto add = [](__m512 a, __m512 b) { return (__m512)_mm512_add_epi32((__m512i)a, (__m512i)b); };
  store(sums, to_f32(i32x16{(__m512i)folded_lanes(v, add)}));
}

__attribute__((always_inline)) inline void transpose(f32x16 (&v)[16]) {
  __m512 pairs[16], fours[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(v[i].v, v[i + 1].v);
    pairs[i + 1] = _mm512_unpackhi_ps(v[i].v, v[i + 1].v);
  }
  // fours[4 a + c]: column c of every quarter, rows 4 a … 4 a + 3.
  for (int i = 0; i < 16; i += 4) {
    for (int half = 0; half < 2; ++half) {
      const __m512d a = _mm512_castps_pd(pairs[i + half]), b = _mm512_castps_pd(pairs[i + half + 2]);
      fours[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      fours[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 a = _mm512_shuffle_f32x4(fours[c], fours[4 + c], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(fours[8 + c], fours[12 + c], 0x88);
    const __m512 d = _mm512_shuffle_f32x4(fours[c], fours[4 + c], 0xdd);
    const __m512 e = _mm512_shuffle_f32x4(fours[8 + c], fours[12 + c], 0xdd);
    v[c] = {_mm512_shuffle_f32x4(a, b, 0x88)};
    v[8 + c] = {_mm512_shuffle_f32x4(a, b, 0xdd)};
    v[4 + c] = {_mm512_shuffle_f32x4(d, e, 0x88)};
    v[12 + c] = {_mm512_shuffle_f32x4(d, e, 0xdd)};
  }
}

// Of sampling, see simd.h.
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

// The shapes of tiles, for 32 registers.
namespace shapes {
namespace linear {
constexpr int kStreamRows = 16, kTileRows = 8;
constexpr int kBlocks[kStreamRows + 1] = {0, 4, 4, 4, 4, 4, 4, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1};
constexpr int kInt4TileRows = 6, kInt4Blocks = 2, kGroupedStreamRows = 8;
// Each group of float32 weights takes a pass over the activations, which come from the third level cache. Groups of half
// a second level cache (1 MB) need fewer passes: 1.1 times as fast as with 192 KB (benchmarks/LOG.md).
constexpr int64_t kResidentFloatBytes = 512 << 10;
}  // namespace linear
namespace attention {
constexpr int kSumsAtOnce = 16;
constexpr int kTileRows = 6;
constexpr int kScoreRows = 3, kScoreGroups = 2;
constexpr int tile_vectors(int rows) { return rows <= 3 ? 8 : 4; }
constexpr int kIntegerVectors = 2;
}  // namespace attention
namespace dots {
constexpr int kTileRows = 6, kTileColumns = 4;
}
namespace rows {
constexpr int kTileRows = 6, kTileVectors = 4;
}
namespace state {
constexpr int kWide = 8;
}
}  // namespace shapes

}  // namespace onward
