#include "elements.h"

#include <cstring>
#include <limits>

#include "../simd.h"

namespace onward::generic {
namespace {

constexpr int64_t kStage = 256;

template <class T>
constexpr bool kHalf = std::is_same_v<T, Bf16> || std::is_same_v<T, F16>;

template <class To, class From>
inline To value_as(From value) {
  if constexpr (std::is_same_v<From, Bool>) {
    return value_as<To>(int32_t(value.value));
  } else if constexpr (std::is_same_v<To, Bool>) {
    return Bool{uint8_t(value != From(0))};
  } else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
    constexpr From kLimit = From(uint64_t(1) << (8 * sizeof(To) - 1));
    // The comparison is false for NaN.
    const bool fits = value < kLimit && value > -kLimit;
    return fits ? To(value) : std::numeric_limits<To>::min();
  } else {
    return To(value);
  }
}

template <class From, class To>
void convert(const void* from, int64_t count, void* to) {
  const auto* __restrict source = static_cast<const From*>(from);
  auto* __restrict target = static_cast<To*>(to);
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, size_t(count) * sizeof(To));
  } else if constexpr ((kHalf<From> || std::is_same_v<From, float>) &&
                       (kHalf<To> || std::is_same_v<To, float>)) {
    for (int64_t i = 0; i < count; i += 16) {
      store_first(target + i, load_first(source + i, count - i), count - i);
    }
  } else if constexpr (kHalf<From> || kHalf<To>) {
    for (int64_t i = 0; i < count; i += kStage) {
      float stage[kStage];
      const int64_t n = count - i < kStage ? count - i : kStage;
      convert<From, float>(source + i, n, stage);
      convert<float, To>(stage, n, target + i);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) target[i] = value_as<To>(source[i]);
  }
}

template <class From>
constexpr Convert kFrom[kElements] = {
    convert<From, float>,   convert<From, Bf16>, convert<From, F16>,   convert<From, int32_t>,
    convert<From, int64_t>, convert<From, Bool>, convert<From, double>};

}  // namespace

Convert converter(int32_t from, int32_t to) {
  switch (from) {
    case kF32: return kFrom<float>[to];
    case kBf16: return kFrom<Bf16>[to];
    case kF16: return kFrom<F16>[to];
    case kI32: return kFrom<int32_t>[to];
    case kI64: return kFrom<int64_t>[to];
    case kBool: return kFrom<Bool>[to];
    default: return kFrom<double>[to];
  }
}

}  // namespace onward::generic
