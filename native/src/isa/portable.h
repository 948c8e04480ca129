// Plain C++ with the vector extension of GCC and Clang, for every processor.
#pragma once
#include <cmath>
#include <cstring>

#include "api.h"

// Sixteen branchy conversions: a call costs little beside them, and unrolled kernels inline them a hundred times, which
// made the compiler's longest files.
#define ONWARD_CALLED __attribute__((noinline))

namespace onward {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

inline f32x16 zero_f32() { return f32x16{}; }
inline i32x16 zero_i32() { return i32x16{}; }
inline f32x16 splat(float a) { return a - f32x16{}; }
inline i32x16 splat(int32_t a) { return a - i32x16{}; }

namespace portable {
inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float widen(F16 half) {
  const uint32_t sign = uint32_t(half.bits & 0x8000) << 16;
  const uint32_t magnitude = half.bits & 0x7fff;
  // Infinity and NaN move to the top exponent, with NaN made quiet as the hardware does; the rest is
  // a float whose exponent is 112 too small, and the product also makes subnormals right.
  if (magnitude > 0x7c00) return float_of(sign | 0x7fc00000 | magnitude << 13);
  if (magnitude == 0x7c00) return float_of(sign | 0x7f800000);
  return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
}

inline uint16_t narrow_f16(float value) {
  const uint32_t bits = bits_of(value);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds to 65536 or beyond
  if (magnitude < 0x38800000) {
    // A subnormal half counts in units of 2^-24: adding 0.5 leaves exactly those units, rounded to
    // nearest even, in the last bits of the float.
    return uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return uint16_t(sign | ((rounded - 0x38000000) >> 13));
}

inline uint16_t narrow_bf16(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
}  // namespace portable

inline f32x16 load(const float* p) {
  f32x16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline f32x16 load(const Bf16* p) {
  f32x16 v;
  for (int i = 0; i < 16; ++i) v[i] = portable::float_of(uint32_t(p[i].bits) << 16);
  return v;
}
ONWARD_CALLED inline f32x16 load(const F16* p) {
  f32x16 v;
  for (int i = 0; i < 16; ++i) v[i] = portable::widen(p[i]);
  return v;
}
inline i32x16 load_i32(const void* p) {
  i32x16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, f32x16 a) { std::memcpy(p, &a, sizeof a); }
inline void store(Bf16* p, f32x16 a) {
  for (int i = 0; i < 16; ++i) p[i].bits = portable::narrow_bf16(a[i]);
}
ONWARD_CALLED inline void store(F16* p, f32x16 a) {
  for (int i = 0; i < 16; ++i) p[i].bits = portable::narrow_f16(a[i]);
}

inline f32x16 add(f32x16 a, f32x16 b) { return a + b; }
inline f32x16 sub(f32x16 a, f32x16 b) { return a - b; }
inline f32x16 mul(f32x16 a, f32x16 b) { return a * b; }
inline f32x16 div(f32x16 a, f32x16 b) { return a / b; }
// As the x86 instructions: where either is NaN, b.
inline f32x16 min(f32x16 a, f32x16 b) { return a < b ? a : b; }
inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return a * b + c; }
inline f32x16 abs(f32x16 a) { return (f32x16)((i32x16)a & 0x7fffffff); }
inline f32x16 sqrt(f32x16 a) {
  for (int i = 0; i < 16; ++i) a[i] = std::sqrt(a[i]);
  return a;
}
inline f32x16 to_f32(i32x16 a) { return __builtin_convertvector(a, f32x16); }

inline float sum_lanes(f32x16 a) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a[i] += a[i + width];
  }
  return a[0];
}
inline float max_lanes(f32x16 a) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a[i] = a[i] > a[i + width] ? a[i] : a[i + width];
  }
  return a[0];
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }

// To the nearest integer, ties to even; what is not within 2^22 of 0 is undefined. Adding 1.5 * 2^23
// leaves the integer in the last bits of the float.
inline i32x16 to_i32(f32x16 a) {
  return (i32x16)(a + 0x1.8p23f) - (i32x16)splat(0x1.8p23f);
}
// The low byte of every lane.
inline void store_low_bytes(int8_t* p, i32x16 a) {
  for (int i = 0; i < 16; ++i) p[i] = int8_t(a[i]);
}
inline i32x16 add(i32x16 a, i32x16 b) { return a + b; }
inline int32_t sum_lanes(i32x16 a) {
  uint32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += uint32_t(a[i]);
  return int32_t(sum);
}

constexpr bool kDotsBf16 = false;
// acc[i] += w[2i+1] * x[2i+1], then += w[2i] * x[2i], over bf16 pairs.
inline f32x16 dot_bf16(f32x16 acc, i32x16 w, i32x16 x) {
  const i32x16 high = splat(int32_t(0xffff0000));
  acc = (f32x16)(w & high) * (f32x16)(x & high) + acc;
  return (f32x16)((u32x16)w << 16) * (f32x16)((u32x16)x << 16) + acc;
}

// acc[i] += the dot product of 4 unsigned bytes of w with 4 signed bytes of x, exact modulo 2^32.
inline i32x16 dot_i8(i32x16 acc, i32x16 w, i32x16 x) {
  u32x16 sum = (u32x16)acc;
  for (int byte = 0; byte < 4; ++byte) {
    const u32x16 unsigned_w = (u32x16)w >> (8 * byte) & 0xff;
    const i32x16 signed_x = (i32x16)((u32x16)x << (24 - 8 * byte)) >> 24;
    sum += unsigned_w * (u32x16)signed_x;
  }
  return (i32x16)sum;
}

inline i32x16 dot_i8(i32x16 acc, i32x16 w, const int32_t* x) { return dot_i8(acc, w, splat(*x)); }

constexpr bool kDotsBytes = false;
struct ByteWords { static constexpr bool kUsed = false; };

// acc[i] += w[2i] * x[2i] + w[2i+1] * x[2i+1] over pairs of 16-bit integers, exact modulo 2^32.
inline i32x16 dot_i16(i32x16 acc, i32x16 w, i32x16 x) {
  const auto low = [](i32x16 a) { return (i32x16)((u32x16)a << 16) >> 16; };
  return (i32x16)((u32x16)acc + (u32x16)(low(w) * low(x)) + (u32x16)((w >> 16) * (x >> 16)));
}

// 32 bytes as pairs of 16-bit integers, all of them or the first n.
inline i32x16 widen_first_i8(const int8_t* p, int64_t n) {
  int16_t words[32] = {};
  for (int64_t i = 0; i < 32 && i < n; ++i) words[i] = p[i];
  i32x16 v;
  std::memcpy(&v, words, sizeof v);
  return v;
}
inline i32x16 widen_i8(const int8_t* p) { return widen_first_i8(p, 32); }
// The first n of 32 words of 16 bits; the others are 0.
inline i32x16 load_first_words(const void* p, int64_t n) {
  i32x16 v = {};
  std::memcpy(&v, p, size_t(n < 32 ? n : 32) * sizeof(int16_t));
  return v;
}
// The words a[0], b[0], a[1], b[1], … of 16 bits.
inline void pair_words(i32x16 a, i32x16 b, i32x16 (&pairs)[2]) {
  int16_t from[2][32], to[64];
  std::memcpy(from[0], &a, sizeof a);
  std::memcpy(from[1], &b, sizeof b);
  for (int i = 0; i < 64; ++i) to[i] = from[i % 2][i / 2];
  std::memcpy(pairs, to, sizeof to);
}
// The low 16 bits of every lane, which hold all of it.
inline void store_low_words(int16_t* p, i32x16 a) {
  for (int i = 0; i < 16; ++i) p[i] = int16_t(a[i]);
}

template <int kBits>
inline i32x16 shift_left(i32x16 a) { return (i32x16)((u32x16)a << kBits); }
template <int kBits>
inline i32x16 shift_right(i32x16 a) { return (i32x16)((u32x16)a >> kBits); }
inline i32x16 bit_and(i32x16 a, int32_t b) { return a & b; }
inline i32x16 bit_or(i32x16 a, i32x16 b) { return a | b; }
inline f32x16 as_f32(i32x16 a) { return (f32x16)a; }
template <class Byte>
inline i32x16 load_bytes(const Byte* p) {
  i32x16 v;
  for (int i = 0; i < 16; ++i) v[i] = p[i];
  return v;
}
// Of every byte, 0 … 15, the byte of a table.
ONWARD_CALLED inline i32x16 look_up(i32x16 a, const uint8_t* table) {
  uint8_t bytes[64];
  std::memcpy(bytes, &a, 64);
  for (uint8_t& byte : bytes) byte = table[byte & 15];
  std::memcpy(&a, bytes, 64);
  return a;
}

// Of every lane's lowest 4 bits the float of a table.
ONWARD_CALLED inline f32x16 look_up(i32x16 a, const float* table) {
  f32x16 v;
  for (int i = 0; i < 16; ++i) v[i] = table[a[i] & 15];
  return v;
}
// 16 numbers in E4M3, divided by 256: as float16 their exponents are 8 less. NaN is no number's.
ONWARD_CALLED inline f32x16 e4m3_256th(const uint8_t* p) {
  f32x16 v;
  for (int i = 0; i < 16; ++i) v[i] = portable::widen({uint16_t((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7)});
  return v;
}

// The low and the high 4 bits of every byte, as bytes.
inline i32x16 low_nibbles(i32x16 a) { return a & 0x0f0f0f0f; }
inline i32x16 high_nibbles(i32x16 a) { return (i32x16)((u32x16)a >> 4) & 0x0f0f0f0f; }
// 16 times the high 4 bits of every byte, and a lane divided by 16.
inline i32x16 high_nibbles_16(i32x16 a) { return a & int32_t(0xf0f0f0f0); }
inline i32x16 sixteenth(i32x16 a) { return a >> 4; }

// Comparisons and masks.
struct mask16 { i32x16 v; };
inline mask16 less(f32x16 a, f32x16 b) { return {(i32x16)(a < b)}; }
inline mask16 is_nan(f32x16 a) { return {(i32x16)(a != a)}; }
inline mask16 either(mask16 a, mask16 b) { return {a.v | b.v}; }
inline bool any(mask16 m) {
  int32_t all = 0;
  for (int i = 0; i < 16; ++i) all |= m.v[i];
  return all != 0;
}
inline mask16 lanes_of(uint32_t bits) {
  i32x16 lanes;
  for (int i = 0; i < 16; ++i) lanes[i] = bits >> i & 1 ? -1 : 0;
  return {lanes};
}
inline f32x16 select(mask16 m, f32x16 a, f32x16 b) { return m.v ? a : b; }
// Adding 1.5 * 2^23 leaves no bits for a fraction.
inline f32x16 round(f32x16 a) { return (a + 0x1.8p23f) - 0x1.8p23f; }
// In two factors, because 2^n alone may be no float.
inline f32x16 times_power_of_two(f32x16 a, f32x16 n) {
  const i32x16 whole = to_i32(n), half = whole >> 1;
  return a * (f32x16)((half + 127) << 23) * (f32x16)((whole - half + 127) << 23);
}
inline float highest(f32x16 a) { return max_lanes(a); }

inline void transpose(f32x16 (&v)[16]) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < i; ++j) {
      const float lane = v[i][j];
      v[i][j] = v[j][i];
      v[j][i] = lane;
    }
  }
}

// Of sampling, see simd.h.
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

struct PhiloxLanes {
  static constexpr int kLanes = 0;  // one quad after the other
};

// The shapes of tiles, for 16 registers of 4 floats at worst.
namespace shapes {
namespace linear {
constexpr int kStreamRows = 4, kTileRows = 4;
constexpr int kBlocks[kStreamRows + 1] = {0, 1, 1, 1, 1};
constexpr int kInt4TileRows = 4, kInt4Blocks = 1, kGroupedStreamRows = 4;
constexpr int64_t kResidentFloatBytes = 192 << 10;
}  // namespace linear
namespace attention {
constexpr int kSumsAtOnce = 2;
constexpr int kTileRows = 2;
constexpr int kScoreRows = 2, kScoreGroups = 1;
constexpr int tile_vectors(int) { return 1; }
constexpr int kIntegerVectors = 1;
}  // namespace attention
namespace dots {
constexpr int kTileRows = 1, kTileColumns = 2;
}
namespace rows {
constexpr int kTileRows = 2, kTileVectors = 1;
}
namespace state {
constexpr int kWide = 2;
}
}  // namespace shapes

}  // namespace onward
