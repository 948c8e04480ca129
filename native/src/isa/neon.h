// 64-bit ARM: NEON with the dot products of ARMv8.2, and with those of mixed signs (i8mm) where the compiler may use
// them. 32 registers of 128 bits, so a vector takes four.
//
// Every sum has the order that it has with AVX2, whose bits these are (docs/decisions/0025), but for the sign and the
// payload of NaN.
#pragma once
#include <arm_neon.h>

#include <cstring>

#include "api.h"

namespace onward {

struct f32x16 { float32x4_t a, b, c, d; };
struct i32x16 { int32x4_t a, b, c, d; };

namespace neon {
// f of each quarter, of one or more vectors.
template <class To, class F, class V, class... More>
__attribute__((always_inline)) inline To each(F f, V v, More... more) {
  return {f(v.a, more.a...), f(v.b, more.b...), f(v.c, more.c...), f(v.d, more.d...)};
}
inline uint32x4_t bits(float32x4_t a) { return vreinterpretq_u32_f32(a); }
inline uint32x4_t bits(int32x4_t a) { return vreinterpretq_u32_s32(a); }
inline float32x4_t floats(uint32x4_t a) { return vreinterpretq_f32_u32(a); }
inline int32x4_t words(uint32x4_t a) { return vreinterpretq_s32_u32(a); }
inline int8x16_t bytes(int32x4_t a) { return vreinterpretq_s8_s32(a); }
inline float32x4_t widen_bf16(uint16x4_t half) { return floats(vshll_n_u16(half, 16)); }
// Round to nearest even by adding half of the last bit that stays; NaN keeps its sign and becomes quiet.
inline uint16x4_t narrow_bf16(float32x4_t a) {
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits(a), 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits(a), vdupq_n_u32(0x7fff)), odd);
  const uint32x4_t quiet = vorrq_u32(bits(a), vdupq_n_u32(0x00400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet), 16);
}
inline float32x4_t widen_f16(uint16x4_t half) { return vcvt_f32_f16(vreinterpret_f16_u16(half)); }
// As the x86 instructions: where either is NaN, b.
inline float32x4_t min(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline float32x4_t max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
}  // namespace neon

inline f32x16 splat(float a) {
  const float32x4_t v = vdupq_n_f32(a);
  return {v, v, v, v};
}
inline i32x16 splat(int32_t a) {
  const int32x4_t v = vdupq_n_s32(a);
  return {v, v, v, v};
}
inline f32x16 zero_f32() { return splat(0.0f); }
inline i32x16 zero_i32() { return splat(0); }

inline f32x16 load(const float* p) {
  return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
inline f32x16 load(const Bf16* p) {
  const auto quarter = [p](int i) { return neon::widen_bf16(vld1_u16(&p[i].bits)); };
  return {quarter(0), quarter(4), quarter(8), quarter(12)};
}
inline f32x16 load(const F16* p) {
  const auto quarter = [p](int i) { return neon::widen_f16(vld1_u16(&p[i].bits)); };
  return {quarter(0), quarter(4), quarter(8), quarter(12)};
}
inline i32x16 load_i32(const void* p) {
  const auto quarter = [p](int i) {
    return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p) + 16 * i));
  };
  return {quarter(0), quarter(1), quarter(2), quarter(3)};
}

inline void store(float* p, f32x16 a) {
  vst1q_f32(p, a.a);
  vst1q_f32(p + 4, a.b);
  vst1q_f32(p + 8, a.c);
  vst1q_f32(p + 12, a.d);
}
inline void store(Bf16* p, f32x16 a) {
  vst1q_u16(&p->bits, vcombine_u16(neon::narrow_bf16(a.a), neon::narrow_bf16(a.b)));
  vst1q_u16(&p[8].bits, vcombine_u16(neon::narrow_bf16(a.c), neon::narrow_bf16(a.d)));
}
inline void store(F16* p, f32x16 a) {
  const auto half = [](float32x4_t v) { return vreinterpret_u16_f16(vcvt_f16_f32(v)); };
  vst1q_u16(&p->bits, vcombine_u16(half(a.a), half(a.b)));
  vst1q_u16(&p[8].bits, vcombine_u16(half(a.c), half(a.d)));
}

inline f32x16 add(f32x16 a, f32x16 b) {
  return neon::each<f32x16>([](auto x, auto y) { return vaddq_f32(x, y); }, a, b);
}
inline f32x16 sub(f32x16 a, f32x16 b) {
  return neon::each<f32x16>([](auto x, auto y) { return vsubq_f32(x, y); }, a, b);
}
inline f32x16 mul(f32x16 a, f32x16 b) {
  return neon::each<f32x16>([](auto x, auto y) { return vmulq_f32(x, y); }, a, b);
}
inline f32x16 div(f32x16 a, f32x16 b) {
  return neon::each<f32x16>([](auto x, auto y) { return vdivq_f32(x, y); }, a, b);
}
inline f32x16 min(f32x16 a, f32x16 b) {
  return neon::each<f32x16>([](auto x, auto y) { return neon::min(x, y); }, a, b);
}
inline f32x16 max(f32x16 a, f32x16 b) {
  return neon::each<f32x16>([](auto x, auto y) { return neon::max(x, y); }, a, b);
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return neon::each<f32x16>([](auto x, auto y, auto z) { return vfmaq_f32(z, x, y); }, a, b, c);
}
inline f32x16 abs(f32x16 a) {
  return neon::each<f32x16>([](auto x) { return vabsq_f32(x); }, a);
}
inline f32x16 sqrt(f32x16 a) {
  return neon::each<f32x16>([](auto x) { return vsqrtq_f32(x); }, a);
}
inline f32x16 to_f32(i32x16 a) {
  return neon::each<f32x16>([](auto x) { return vcvtq_f32_s32(x); }, a);
}

namespace neon {
// Lanes 8 … 15 over 0 … 7, and further halves: each step folds the upper half onto the lower.
template <class Op>
inline float fold(f32x16 v, Op op) {
  const float32x4_t four = op(op(v.a, v.c), op(v.b, v.d));
  const float32x4_t two = op(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(op(two, vextq_f32(two, two, 1)), 0);
}
}  // namespace neon

inline float sum_lanes(f32x16 a) {
  return neon::fold(a, [](auto x, auto y) { return vaddq_f32(x, y); });
}
inline float max_lanes(f32x16 a) {
  return neon::fold(a, [](auto x, auto y) { return neon::max(x, y); });
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }

// To the nearest integer, ties to even; what does not fit is undefined.
inline i32x16 to_i32(f32x16 a) {
  return neon::each<i32x16>([](auto x) { return vcvtnq_s32_f32(x); }, a);
}
inline i32x16 add(i32x16 a, i32x16 b) {
  return neon::each<i32x16>([](auto x, auto y) { return vaddq_s32(x, y); }, a, b);
}
inline int32_t sum_lanes(i32x16 a) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(a.a, a.b), vaddq_s32(a.c, a.d)));
}

// acc[i] += w[2i+1] * x[2i+1], then += w[2i] * x[2i], over bf16 pairs: the order of vdpbf16ps. (bfdot of ARM rounds
// otherwise.)
inline f32x16 dot_bf16(f32x16 acc, i32x16 w, i32x16 x) {
  const auto step = [](float32x4_t sum, int32x4_t wp, int32x4_t xp) {
    const uint32x4_t high = vdupq_n_u32(0xffff0000);
    sum = vfmaq_f32(sum, neon::floats(vandq_u32(neon::bits(wp), high)),
                    neon::floats(vandq_u32(neon::bits(xp), high)));
    return vfmaq_f32(sum, neon::floats(vshlq_n_u32(neon::bits(wp), 16)),
                     neon::floats(vshlq_n_u32(neon::bits(xp), 16)));
  };
  return neon::each<f32x16>(step, acc, w, x);
}
constexpr bool kDotsBf16 = false;

// acc[i] += the dot product of 4 unsigned bytes of w with 4 signed bytes of x, exact modulo 2^32.
inline i32x16 dot_i8(i32x16 acc, i32x16 w, i32x16 x) {
  const auto step = [](int32x4_t sum, int32x4_t wp, int32x4_t xp) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(sum, vreinterpretq_u8_s32(wp), neon::bytes(xp));
#else
    // sdot takes signed bytes: w - 128, and what that leaves out, which is the same for all w.
    const int8x16_t signed_w = neon::bytes(neon::words(veorq_u32(neon::bits(wp), vdupq_n_u32(0x80808080))));
    const int32x4_t sums = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), neon::bytes(xp));
    return vaddq_s32(vdotq_s32(sum, signed_w, neon::bytes(xp)), vshlq_n_s32(sums, 7));
#endif
  };
  return neon::each<i32x16>(step, acc, w, x);
}
inline i32x16 dot_i8(i32x16 acc, i32x16 w, const int32_t* x) { return dot_i8(acc, w, splat(*x)); }
constexpr bool kDotsBytes = true;
struct ByteWords { static constexpr bool kUsed = false; };

// acc[i] += w[2i] * x[2i] + w[2i+1] * x[2i+1] over pairs of 16-bit integers, exact modulo 2^32.
inline i32x16 dot_i16(i32x16 acc, i32x16 w, i32x16 x) {
  const auto step = [](int32x4_t sum, int32x4_t wp, int32x4_t xp) {
    const int16x8_t ws = vreinterpretq_s16_s32(wp), xs = vreinterpretq_s16_s32(xp);
    const int32x4_t low = vmull_s16(vget_low_s16(ws), vget_low_s16(xs));
    return vaddq_s32(sum, vpaddq_s32(low, vmull_high_s16(ws, xs)));
  };
  return neon::each<i32x16>(step, acc, w, x);
}

// 32 bytes as pairs of 16-bit integers, all of them or the first n.
inline i32x16 widen_i8(const int8_t* p) {
  const auto eight = [p](int i) { return vreinterpretq_s32_s16(vmovl_s8(vld1_s8(p + i))); };
  return {eight(0), eight(8), eight(16), eight(24)};
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
  const auto low = [](int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_s16(vzip1q_s16(vreinterpretq_s16_s32(x), vreinterpretq_s16_s32(y)));
  };
  const auto high = [](int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_s16(vzip2q_s16(vreinterpretq_s16_s32(x), vreinterpretq_s16_s32(y)));
  };
  pairs[0] = {low(a.a, b.a), high(a.a, b.a), low(a.b, b.b), high(a.b, b.b)};
  pairs[1] = {low(a.c, b.c), high(a.c, b.c), low(a.d, b.d), high(a.d, b.d)};
}
// The low 16 bits of every lane, which hold all of it.
inline void store_low_words(int16_t* p, i32x16 a) {
  vst1q_s16(p, vcombine_s16(vmovn_s32(a.a), vmovn_s32(a.b)));
  vst1q_s16(p + 8, vcombine_s16(vmovn_s32(a.c), vmovn_s32(a.d)));
}
// The low byte of every lane.
inline void store_low_bytes(int8_t* p, i32x16 a) {
  const int16x8_t low = vcombine_s16(vmovn_s32(a.a), vmovn_s32(a.b));
  const int16x8_t high = vcombine_s16(vmovn_s32(a.c), vmovn_s32(a.d));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

template <int kBits>
inline i32x16 shift_left(i32x16 a) {
  return neon::each<i32x16>([](auto x) { return vshlq_n_s32(x, kBits); }, a);
}
template <int kBits>
inline i32x16 shift_right(i32x16 a) {
  if constexpr (kBits == 0) {  // the instruction has no 0
    return a;
  } else {
    return neon::each<i32x16>([](auto x) { return neon::words(vshrq_n_u32(neon::bits(x), kBits)); }, a);
  }
}
inline i32x16 bit_and(i32x16 a, int32_t b) {
  const int32x4_t mask = vdupq_n_s32(b);
  return neon::each<i32x16>([mask](auto x) { return vandq_s32(x, mask); }, a);
}
inline i32x16 bit_or(i32x16 a, i32x16 b) {
  return neon::each<i32x16>([](auto x, auto y) { return vorrq_s32(x, y); }, a, b);
}
inline f32x16 as_f32(i32x16 a) {
  return neon::each<f32x16>([](auto x) { return vreinterpretq_f32_s32(x); }, a);
}
inline i32x16 load_bytes(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
  return {neon::words(vmovl_u16(vget_low_u16(low))), neon::words(vmovl_high_u16(low)),
          neon::words(vmovl_u16(vget_low_u16(high))), neon::words(vmovl_high_u16(high))};
}
inline i32x16 load_bytes(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
  return {vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
}
// Of every byte, 0 … 15, the byte of a table.
inline i32x16 look_up(i32x16 a, const uint8_t* table) {
  const uint8x16_t of = vld1q_u8(table);
  return neon::each<i32x16>(
      [of](auto x) { return vreinterpretq_s32_u8(vqtbl1q_u8(of, vreinterpretq_u8_s32(x))); }, a);
}
// Of every lane's lowest 4 bits the float of a table.
inline f32x16 look_up(i32x16 a, const float* table) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(table);
  const uint8x16x4_t of = {{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
  const auto quarter = [&of](int32x4_t x) {
    // Byte j of the float at place i is byte 4 i + j of the table.
    const uint32x4_t places = vandq_u32(neon::bits(x), vdupq_n_u32(15));
    const uint32x4_t at = vmlaq_u32(vdupq_n_u32(0x03020100), places, vdupq_n_u32(0x04040404));
    return vreinterpretq_f32_u8(vqtbl4q_u8(of, vreinterpretq_u8_u32(at)));
  };
  return neon::each<f32x16>(quarter, a);
}
// 16 numbers in E4M3, divided by 256: as float16 their exponents are 8 less. NaN is no number's.
inline f32x16 e4m3_256th(const uint8_t* p) {
  const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
  const auto halves = [](int16x8_t wide) {
    return vandq_u16(vreinterpretq_u16_s16(vshlq_n_s16(wide, 7)), vdupq_n_u16(0xbf80));
  };
  const uint16x8_t low = halves(vmovl_s8(vget_low_s8(bytes))), high = halves(vmovl_high_s8(bytes));
  return {neon::widen_f16(vget_low_u16(low)), neon::widen_f16(vget_high_u16(low)),
          neon::widen_f16(vget_low_u16(high)), neon::widen_f16(vget_high_u16(high))};
}

// The low and the high 4 bits of every byte, as bytes.
inline i32x16 low_nibbles(i32x16 a) { return bit_and(a, 0x0f0f0f0f); }
inline i32x16 high_nibbles(i32x16 a) {
  return neon::each<i32x16>(
      [](auto x) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(x), 4)); }, a);
}
// 16 times the high 4 bits of every byte, and a lane divided by 16.
inline i32x16 high_nibbles_16(i32x16 a) { return bit_and(a, int32_t(0xf0f0f0f0)); }
inline i32x16 sixteenth(i32x16 a) {
  return neon::each<i32x16>([](auto x) { return vshrq_n_s32(x, 4); }, a);
}

// Comparisons and masks.
struct mask16 { uint32x4_t a, b, c, d; };
inline mask16 less(f32x16 a, f32x16 b) {
  return neon::each<mask16>([](auto x, auto y) { return vcltq_f32(x, y); }, a, b);
}
inline mask16 is_nan(f32x16 a) {
  return neon::each<mask16>([](auto x) { return vmvnq_u32(vceqq_f32(x, x)); }, a);
}
inline mask16 either(mask16 a, mask16 b) {
  return neon::each<mask16>([](auto x, auto y) { return vorrq_u32(x, y); }, a, b);
}
inline bool any(mask16 m) {
  return vmaxvq_u32(vorrq_u32(vorrq_u32(m.a, m.b), vorrq_u32(m.c, m.d))) != 0;
}
namespace neon {
// The bits that stand for the lanes.
inline mask16 lane_bits() {
  alignas(16) static constexpr uint32_t kBits[16] = {1,      2,      4,      8,       0x10,    0x20,    0x40,    0x80,
                                                     0x100,  0x200,  0x400,  0x800,   0x1000,  0x2000,  0x4000,  0x8000};
  return {vld1q_u32(kBits), vld1q_u32(kBits + 4), vld1q_u32(kBits + 8), vld1q_u32(kBits + 12)};
}
}  // namespace neon
inline mask16 lanes_of(uint32_t bits) {
  return neon::each<mask16>([bits](auto lane) { return vtstq_u32(vdupq_n_u32(bits), lane); }, neon::lane_bits());
}
inline f32x16 select(mask16 m, f32x16 a, f32x16 b) {
  return neon::each<f32x16>([](auto which, auto x, auto y) { return vbslq_f32(which, x, y); }, m, a, b);
}
inline f32x16 round(f32x16 a) {
  return neon::each<f32x16>([](auto x) { return vrndnq_f32(x); }, a);
}
// In two factors, because 2^n alone may be no float.
inline f32x16 times_power_of_two(f32x16 a, f32x16 n) {
  const auto scale = [](float32x4_t value, float32x4_t power) {
    const int32x4_t whole = vcvtnq_s32_f32(power), half = vshrq_n_s32(whole, 1);
    const auto factor = [](int32x4_t exponent) {
      return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(exponent, vdupq_n_s32(127)), 23));
    };
    return vmulq_f32(vmulq_f32(value, factor(half)), factor(vsubq_s32(whole, half)));
  };
  return neon::each<f32x16>(scale, a, n);
}
inline float highest(f32x16 a) { return max_lanes(a); }

// The sums of the lanes of several vectors, see simd.h.
__attribute__((always_inline)) inline void sum_lanes_of(const f32x16 (&v)[4], float* sums) {
  const auto four = [&v](int i) { return vaddq_f32(vaddq_f32(v[i].a, v[i].c), vaddq_f32(v[i].b, v[i].d)); };
  // Lanes i and i + 2 of two vectors.
  const auto halves = [](float32x4_t x, float32x4_t y) {
    return vaddq_f32(vcombine_f32(vget_low_f32(x), vget_low_f32(y)), vcombine_f32(vget_high_f32(x), vget_high_f32(y)));
  };
  vst1q_f32(sums, vpaddq_f32(halves(four(0), four(1)), halves(four(2), four(3))));
}
__attribute__((always_inline)) inline void sum_lanes_of(const i32x16 (&v)[4], float* sums) {
  const auto four = [&v](int i) { return vaddq_s32(vaddq_s32(v[i].a, v[i].c), vaddq_s32(v[i].b, v[i].d)); };
  vst1q_f32(sums, vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(four(0), four(1)), vpaddq_s32(four(2), four(3)))));
}

namespace neon {
// A square of 4.
__attribute__((always_inline)) inline void transpose(float32x4_t& a, float32x4_t& b, float32x4_t& c, float32x4_t& d) {
  const float32x4_t ab = vtrn1q_f32(a, b), ab_odd = vtrn2q_f32(a, b);
  const float32x4_t cd = vtrn1q_f32(c, d), cd_odd = vtrn2q_f32(c, d);
  a = vcombine_f32(vget_low_f32(ab), vget_low_f32(cd));
  b = vcombine_f32(vget_low_f32(ab_odd), vget_low_f32(cd_odd));
  c = vcombine_f32(vget_high_f32(ab), vget_high_f32(cd));
  d = vcombine_f32(vget_high_f32(ab_odd), vget_high_f32(cd_odd));
}
}  // namespace neon

inline void transpose(f32x16 (&v)[16]) {
  float32x4_t squares[4][4][4];  // rows of squares, squares, rows of a square
  for (int i = 0; i < 16; ++i) {
    squares[i / 4][0][i % 4] = v[i].a;
    squares[i / 4][1][i % 4] = v[i].b;
    squares[i / 4][2][i % 4] = v[i].c;
    squares[i / 4][3][i % 4] = v[i].d;
  }
  for (auto& row : squares) {
    for (auto& square : row) neon::transpose(square[0], square[1], square[2], square[3]);
  }
  for (int i = 0; i < 16; ++i) {
    v[i] = {squares[0][i / 4][i % 4], squares[1][i / 4][i % 4], squares[2][i / 4][i % 4], squares[3][i / 4][i % 4]};
  }
}

// Of sampling, see simd.h.
inline uint32_t bits(mask16 m) {
  const mask16 set = neon::each<mask16>([](auto x, auto y) { return vandq_u32(x, y); }, m, neon::lane_bits());
  return vaddvq_u32(vorrq_u32(vorrq_u32(set.a, set.b), vorrq_u32(set.c, set.d)));
}
inline f32x16 complement_24(const uint32_t* words) {
  const auto quarter = [words](int i) { return vcvtq_f32_u32(vshrq_n_u32(vmvnq_u32(vld1q_u32(words + i)), 8)); };
  return {quarter(0), quarter(4), quarter(8), quarter(12)};
}

class UnitSums {
 public:
  // Every lane in 0 … 1.
  void add(f32x16 a) {
    add_quad(a.a);
    add_quad(a.b);
    add_quad(a.c);
    add_quad(a.d);
  }
  int64_t total() const { return vaddvq_s64(sums_); }

 private:
  void add_quad(float32x4_t a) {
    const float32x4_t units = vmulq_f32(a, vdupq_n_f32(kUnits));
    sums_ = vaddq_s64(sums_, vcvtnq_s64_f64(vcvt_f64_f32(vget_low_f32(units))));
    sums_ = vaddq_s64(sums_, vcvtnq_s64_f64(vcvt_high_f64_f32(units)));
  }
  int64x2_t sums_ = vdupq_n_s64(0);
};

struct PhiloxLanes {
  static constexpr int kLanes = 4;
  using Word = uint32x4_t;
  static Word load(const uint32_t* p) { return vld1q_u32(p); }
  static Word splat(uint32_t a) { return vdupq_n_u32(a); }
  static Word mix(Word a, Word b, uint32_t key) { return veorq_u32(veorq_u32(a, b), splat(key)); }
  static void multiply(Word a, uint32_t by, Word& high, Word& low) {
    const uint32x4_t first = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(a), by));
    const uint32x4_t second = vreinterpretq_u32_u64(vmull_high_n_u32(a, by));
    low = vuzp1q_u32(first, second);
    high = vuzp2q_u32(first, second);
  }
  static void store_transposed(uint32_t* to, const Word (&w)[4]) {
    const uint32x4x4_t columns = {{w[0], w[1], w[2], w[3]}};
    vst4q_u32(to, columns);
  }
};

// The shapes of tiles, for 8 vectors in the registers.
namespace shapes {
namespace linear {
constexpr int kStreamRows = 4, kTileRows = 4;
constexpr int kBlocks[kStreamRows + 1] = {0, 2, 2, 1, 1};
constexpr int kInt4TileRows = 4, kInt4Blocks = 1, kGroupedStreamRows = 4;
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
