// Shared by all kernel files: the export macro, element types, status codes.
#pragma once
#include <cstdint>
#include <type_traits>

#define ONWARD_API extern "C" __attribute__((visibility("default")))

namespace onward {

// Codes of element types in the C interface.
enum DType : int32_t { kF32 = 0, kBf16 = 1, kF16 = 2 };

// The result of a kernel. Python checks the arguments, because its error messages can name them. These
// codes are the last line of defense.
enum Status : int32_t { kOk = 0, kBadArgument = 1, kOutOfMemory = 2 };

// Storage types: distinct from each other and from integers, so that overloads can tell them apart.
struct Bf16 { uint16_t bits; };
struct F16 { uint16_t bits; };

// Calls body with a null pointer of the element type that `dtype` names; false for an unknown code.
// Use: with_dtype(code, [&](auto* tag) { using T = std::remove_pointer_t<decltype(tag)>; … })
template <class Body>
inline bool with_dtype(int32_t dtype, Body&& body) {
  switch (dtype) {
    case kF32: body(static_cast<float*>(nullptr)); return true;
    case kBf16: body(static_cast<Bf16*>(nullptr)); return true;
    case kF16: body(static_cast<F16*>(nullptr)); return true;
    default: return false;
  }
}

inline int64_t element_size(int32_t dtype) { return dtype == kF32 ? 4 : 2; }

inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace onward
