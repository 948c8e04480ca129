// All element types that a tensor of a user's model may have, and their conversions.
#pragma once
#include "../api.h"

namespace onward::generic {

// Codes of element types, beyond those of DType.
enum Element : int32_t { kI32 = 3, kI64 = 4, kBool = 5, kF64 = 6, kElements = 7 };

struct Bool { uint8_t value; };  // 0 or 1

inline bool known(int32_t code) { return code >= 0 && code < kElements; }
inline bool is_float(int32_t code) { return code <= kF16 || code == kF64; }
inline int64_t element_bytes(int32_t code) {
  constexpr int64_t kBytes[kElements] = {4, 2, 2, 4, 8, 1, 8};
  return kBytes[code];
}

// Converts `count` contiguous elements. Floats are rounded to nearest even; doubles are rounded to float
// first. A float is truncated to an integer (NaN and floats out of range become the lowest integer), and
// compared with 0 to become a bool. Integers wrap. The arrays do not overlap.
using Convert = void (*)(const void* from, int64_t count, void* to);
Convert converter(int32_t from, int32_t to);

}  // namespace onward::generic
