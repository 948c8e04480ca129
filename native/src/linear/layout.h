// How packed weights lie in memory. The README of native/ draws it; pack.cpp writes it.
#pragma once
#include "api.h"

namespace onward::linear {

enum Format : int32_t { kPackedF32, kPackedBf16, kPackedF16, kPackedInt8, kPackedInt4, kFormats };

constexpr int64_t kBlockRows = 16;    // rows of the weight, neighbours in every 64-byte line
constexpr int64_t kGroup = 32;        // int4: inputs that share a scale
constexpr int64_t kInt4Pair = 576;    // bytes of two groups: 2 x 16 scales of 2, 2 x 4 lines of 64
constexpr int64_t kInt8Header = 64;   // 16 float scales before the lines of a block
constexpr int64_t kMaxInputs = 65536; // int8: the int32 sums of a longer row could overflow

inline bool known(int32_t format) { return format >= 0 && format < kFormats; }

inline int64_t block_bytes(Format format, int64_t inputs) {
  switch (format) {
    case kPackedF32: return inputs * 64;
    case kPackedBf16:
    case kPackedF16: return ceil_div(inputs, 2) * 64;
    case kPackedInt8: return kInt8Header + ceil_div(inputs, 4) * 64;
    default: return ceil_div(inputs, 2 * kGroup) * kInt4Pair;
  }
}

inline int64_t blocks_of(int64_t rows) { return ceil_div(rows, kBlockRows); }

}  // namespace onward::linear
