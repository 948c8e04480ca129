// How packed weights lie in memory. The README of native/ draws it; pack.cpp writes it.
#pragma once
#include "api.h"

namespace onward::linear {

enum Format : int32_t {
  kPackedF32, kPackedBf16, kPackedF16, kPackedInt8, kPackedInt4,
  // Those of grouped.h.
  kPackedQ8_0, kPackedQ4_1, kPackedQ5_0, kPackedQ5_1, kPackedQ4K, kPackedQ5K, kPackedQ6K, kPackedQ2K,
  kPackedQ3K, kPackedIq4Nl, kPackedIq4Xs, kPackedMxfp4, kPackedUint4, kPackedUint4_128, kPackedUint8_128,
  kPackedNvfp4, kPackedFp8, kPackedNf4, kFormats
};

constexpr int64_t kBlockRows = 16;    // rows of the weight, neighbours in every 64-byte line
constexpr int64_t kGroup = 32;        // int4: inputs that share a scale
constexpr int64_t kInt4Pair = 576;    // bytes of two groups: 2 x 16 scales of 2, 2 x 4 lines of 64
constexpr int64_t kInt8Header = 64;   // 16 float scales before the lines of a block
constexpr int64_t kMaxInputs = 65536; // int8: the int32 sums of a longer row could overflow

// A format whose inputs share scales in groups. ops/quantized_layout.py has the same list, and says
// more.
struct Grouped {
  int bits, group, levels, offset;
  bool minimum, is_signed, exponent;
  const int8_t* table;
  bool zeros = false, divided = false, floats = false;

  // Inputs that are packed together: 16 rows' scales stand in front of their codes.
  constexpr int64_t unit() const {
    if (floats) return group;
    return levels == 2 ? 256 : exponent || zeros ? 128 : 64;
  }
  constexpr int64_t header_bytes() const {
    if (floats) return 64;
    if (levels == 2) return 64 + 256 / group * 16 * (minimum ? 2 : 1);
    if (zeros) return round_up(unit() / group * 48, 64);
    return unit() / group * (exponent ? 16 : 32) * (minimum ? 2 : 1);
  }
  constexpr int64_t codes_bytes() const { return 64 * bits; }  // of 32 inputs
  constexpr int64_t unit_bytes() const { return header_bytes() + unit() / 32 * codes_bytes(); }
  constexpr int halves() const { return group < 32 ? 32 / group : 1; }
};

constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
alignas(64) constexpr float kNf4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

constexpr Grouped grouped_of(int32_t format) {
  switch (format) {
    case kPackedQ8_0: return {8, 32, 1, 128, false, false, false, nullptr};
    case kPackedQ4_1: return {4, 32, 1, 0, true, false, false, nullptr};
    case kPackedQ5_0: return {5, 32, 1, 16, false, false, false, nullptr};
    case kPackedQ5_1: return {5, 32, 1, 0, true, false, false, nullptr};
    case kPackedQ4K: return {4, 32, 2, 0, true, false, false, nullptr};
    case kPackedQ5K: return {5, 32, 2, 0, true, false, false, nullptr};
    case kPackedQ6K: return {6, 16, 2, 32, false, true, false, nullptr};
    case kPackedQ2K: return {2, 16, 2, 0, true, false, false, nullptr};
    case kPackedQ3K: return {3, 16, 2, 4, false, true, false, nullptr};
    case kPackedIq4Nl: return {4, 32, 1, 128, false, false, false, kIq4};
    case kPackedIq4Xs: return {4, 32, 2, 128, false, true, false, kIq4};
    case kPackedMxfp4: return {4, 32, 1, 128, false, false, true, kE2m1};
    case kPackedUint4: return {4, 32, 1, 0, true, false, false, nullptr, true};
    case kPackedUint4_128: return {4, 128, 1, 0, true, false, false, nullptr, true};
    case kPackedUint8_128: return {8, 128, 1, 0, true, false, false, nullptr, true};
    case kPackedNvfp4: return {4, 16, 2, 128, false, false, false, kE2m1, false, true};
    case kPackedFp8: return {8, 128, 1, 0, false, false, false, nullptr, false, false, true};
    case kPackedNf4: return {4, 64, 1, 0, false, false, false, nullptr, false, false, true};
    default: return {4, 32, 1, 8, false, false, false, nullptr};  // int4
  }
}
inline bool is_grouped(int32_t format) { return format > kPackedInt4; }

inline bool known(int32_t format) { return format >= 0 && format < kFormats; }

inline int64_t block_bytes(Format format, int64_t inputs) {
  switch (format) {
    case kPackedF32: return inputs * 64;
    case kPackedBf16:
    case kPackedF16: return ceil_div(inputs, 2) * 64;
    case kPackedInt8: return kInt8Header + ceil_div(inputs, 4) * 64;
    default: {
      const Grouped g = grouped_of(format);
      return ceil_div(inputs, g.unit()) * g.unit_bytes();
    }
  }
}

inline int64_t blocks_of(int64_t rows) { return ceil_div(rows, kBlockRows); }

}  // namespace onward::linear
