#include "activations.h"

#include <cstring>
#include <limits>

#include "../simd.h"

namespace onward::linear {
namespace {

// Below this absmax the reciprocal of the scale would overflow: such inputs count as zeros.
constexpr float kSmallest = 1e-36f;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The largest |x| of n values, and 0, or NaN if one of them is no finite number.
struct Range {
  float absmax, poison;
};

template <class T>
Range range_of(const T* x, int64_t n) {
  f32x16 largest = zero_f32(), poison = zero_f32();
  for (int64_t i = 0; i < n; i += 16) {
    const f32x16 v = load_first(x + i, n - i);
    largest = max(abs(v), largest);
    poison = fma(v, zero_f32(), poison);
  }
  return {max_lanes(largest), sum_lanes(poison)};
}

// The factor that takes values of this range to -127 … 127. A range without numbers gets 0: the
// scale alone then makes the output NaN, where it must not be a plausible number.
inline float reciprocal_of(Range range) {
  return range.poison != 0.0f || range.absmax < kSmallest ? 0.0f : 127.0f / range.absmax;
}
inline float scale_of(Range range) {
  return range.absmax < kSmallest ? range.poison : range.absmax / 127.0f + range.poison;
}

// 16 values as int8, rounded to nearest even; those past n are 0. Returns their lane sums.
template <class T>
inline i32x16 quantize(const T* x, int64_t n, f32x16 reciprocal, uint8_t* q) {
  const i32x16 rounded = to_i32(mul(load_first(x, n), reciprocal));
  store_low_bytes(reinterpret_cast<int8_t*>(q), rounded);
  return rounded;
}

void write_header(uint8_t* header, int64_t row, int64_t rows, float scale, int32_t start) {
  std::memcpy(header + row * 4, &start, 4);
  std::memcpy(header + (rows + row) * 4, &scale, 4);
}

// 32 bytes as words, of each four the first, the third, the second and the fourth.
inline void store_words(const uint8_t* bytes, uint8_t* to) {
  int8_t ordered[kStretch / 2];
  for (int64_t i = 0; i < kStretch / 2; ++i) ordered[i] = int8_t(bytes[i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i]);
  store(reinterpret_cast<float*>(to), as_f32(widen_i8(ordered)));
}

template <class T>
void int8_row(const T* x, int64_t inputs, int64_t row, int64_t rows, uint8_t* panel) {
  const Range range = range_of(x, inputs);
  const float reciprocal = reciprocal_of(range);
  uint8_t* to = panel + rows * 8 + row * kStretch;
  i32x16 sum = zero_i32();
  for (int64_t k = 0; k < inputs; k += kStretch, to += rows * kStretch) {
    uint8_t apart[kStretch];
    uint8_t* bytes = kDotsBytes ? to : apart;
    if (reciprocal == 0.0f) std::memset(bytes, 0, kStretch);
    for (int64_t i = 0; i < kStretch && reciprocal != 0.0f; i += 16) {
      const int64_t left = inputs - k - i;
      sum = add(sum, quantize(left > 0 ? x + k + i : x, left, splat(reciprocal), bytes + i));
    }
    if constexpr (!kDotsBytes) {
      store_words(apart, to);
      store_words(apart + kStretch / 2, to += rows * kStretch);
    }
  }
  write_header(panel, row, rows, scale_of(range), -128 * sum_lanes(sum));
}

// A scale times any float16 but 0 shall be a normal float, and the unit of the largest scale (unit_of) a finite one:
// groups with a smaller absmax count as zeros, a row with a larger one as infinite.
constexpr float kSmallestGroup = 0x1p-95f, kLargestGroup = 0x1p110f;

inline uint32_t bits_of(float a) {
  uint32_t bits;
  std::memcpy(&bits, &a, 4);
  return bits;
}
inline float from_bits(uint32_t bits) {
  float a;
  std::memcpy(&a, &bits, 4);
  return a;
}

// The least power of two that takes a positive absmax to 127 or less: with the exponent of absmax / 64,
// or the next where the mantissa is above that of 127.
inline float power_for(float absmax) {
  return from_bits(((bits_of(absmax) + 0x01ffff) & 0x7f800000) - (6 << 23));
}
inline float reciprocal_of_power(float power) { return from_bits((254u << 23) - bits_of(power)); }
// The bits of 1.5 * 2^23 times a power of two: a float whose last place counts by that power. Adding an integer below
// 2^22 to the bits adds so many times the power to the float.
inline uint32_t unit_of(float power) { return bits_of(power) + (23u << 23) + 0x00400000u; }

// Quantizes one group of 32 inputs after the other, and keeps what was seen of the row.
struct GroupRow {
  f32x16 largest = zero_f32(), poison = zero_f32();

  template <class T>
  void quantize(const T* x, int64_t row, int64_t rows, const Grouped& g, uint8_t* group) {
    const f32x16 a = load(x), b = load(x + 16);
    const f32x16 magnitude = max(abs(a), abs(b));
    largest = max(magnitude, largest);
    poison = fma(a, zero_f32(), fma(b, zero_f32(), poison));
    const float absmax = max_lanes(magnitude);
    const bool zeros = !(absmax >= kSmallestGroup);
    const float scale = zeros ? 1.0f : power_for(absmax);
    const f32x16 reciprocal = splat(zeros ? 0.0f : reciprocal_of_power(scale));
    const i32x16 first = to_i32(mul(a, reciprocal)), second = to_i32(mul(b, reciprocal));
    auto* to = reinterpret_cast<int8_t*>(group + rows * (4 * g.halves() + 4) + row * kGroup);
    store_low_bytes(to, first);
    store_low_bytes(to + 16, second);
    if (g.halves() == 1) {
      write_start(group, row, g, scale, sum_lanes(add(first, second)));
    } else {
      write_start(group, row, g, scale, sum_lanes(first));
      write_start(group, rows + row, g, scale, sum_lanes(second));
    }
    const uint32_t unit = unit_of(scale);
    std::memcpy(group + (rows * g.halves() + row) * 4, &unit, 4);
  }

  static void write_start(uint8_t* group, int64_t at, const Grouped& g, float scale, int32_t sum) {
    // Of a row that is not finite the sum may be anything, and the product may not fit.
    const uint32_t start = unit_of(scale) - uint32_t(g.offset) * uint32_t(sum);
    const float minima = -scale * float(sum);  // exact: a sum has 12 bits, and scale is a power of two
    std::memcpy(group + at * 4, g.minimum ? static_cast<const void*>(&minima) : &start, 4);
  }

  // What is added to the row's outputs. (Of a row that is not finite, all else is undefined.)
  float verdict() const {
    return max_lanes(largest) < kLargestGroup && sum_lanes(poison) == 0.0f ? 0.0f : kNan;
  }
};

template <class T>
void grouped_row(const T* x, int64_t inputs, int64_t row, int64_t rows, const Grouped& g,
                 uint8_t* panel) {
  GroupRow groups;
  uint8_t* group = panel + rows * 4;
  const int64_t step = rows * group_row_bytes(g);
  int64_t k = 0;
  for (; k + kGroup <= inputs; k += kGroup, group += step) {
    groups.quantize(x + k, row, rows, g, group);
  }
  for (; k < round_up(inputs, g.unit()); k += kGroup, group += step) {
    T tail[kGroup] = {};
    if (k < inputs) std::memcpy(tail, x + k, size_t(inputs - k) * sizeof(T));
    groups.quantize(tail, row, rows, g, group);
  }
  const float poison = groups.verdict();
  std::memcpy(panel + row * 4, &poison, 4);
}

inline f32x16 rounded_to_bf16(f32x16 a) {
  Bf16 rounded[16];
  store(rounded, a);
  return load(rounded);
}

// Rounded, to float or Bf16, and stored as To. What follows the inputs up to a multiple, or the end of a stretch, is
// zeros.
template <class To, class Rounded = To, class From>
void float_row(const From* x, int64_t inputs, int64_t row, int64_t rows, uint8_t* panel,
               int64_t multiple = 1) {
  constexpr bool kExact = std::is_same_v<To, Rounded> || std::is_same_v<Rounded, From>;
  constexpr int64_t kPerStretch = kStretch / sizeof(To);
  To* to = reinterpret_cast<To*>(panel + row * kStretch);
  for (int64_t k = 0; k < round_up(inputs, multiple); k += kPerStretch, to += rows * kPerStretch) {
    const int64_t n = inputs - k;
    if (std::is_same_v<To, From> && kExact && n >= kPerStretch) {
      std::memcpy(to, x + k, kStretch);
      continue;
    }
    for (int64_t i = 0; i < kPerStretch; i += 16) {
      const f32x16 values = n > i ? load_first(x + k + i, n - i) : zero_f32();
      store(to + i, kExact ? values : rounded_to_bf16(values));
    }
  }
}

using Bf16Words = std::conditional_t<kDotsBf16, Bf16, float>;

}  // namespace

void make_panel(Format format, const Rows& x, int64_t first, int64_t count, int64_t inputs,
                uint8_t* panel) {
  with_dtype(x.dtype, [&](auto* tag) {
    using From = std::remove_pointer_t<decltype(tag)>;
    for (int64_t row = 0; row < count; ++row) {
      const int64_t at = x.at == nullptr ? first + row : x.at[first + row];
      const From* from = static_cast<const From*>(x.data) + at * x.stride;
      switch (format) {
        case kPackedInt8: int8_row(from, inputs, row, count, panel); break;
        case kPackedBf16: float_row<Bf16Words, Bf16>(from, inputs, row, count, panel); break;
        case kPackedF32:
        case kPackedF16: float_row<float>(from, inputs, row, count, panel); break;
        case kPackedFp8:
        case kPackedNf4:
          float_row<float>(from, inputs, row, count, panel, grouped_of(format).unit());
          break;
        default: grouped_row(from, inputs, row, count, grouped_of(format), panel);
      }
    }
  });
}

}  // namespace onward::linear
