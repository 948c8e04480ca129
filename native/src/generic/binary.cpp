// Two-operand operations of strided tensors of any types.
#include <atomic>
#include <cmath>

#include "../program.h"
#include "walk.h"

namespace onward::generic {
namespace {

enum Binary : int32_t {
  kAdd, kSub, kMul, kDiv, kFloorDiv, kRemainder, kMin = 7, kMax, kEq, kNe, kLt, kLe, kGt, kGe, kAnd,
  kOr, kXor, kBinaries
};

// Returns false if an integer was divided by 0.
template <class C>
using Block = bool (*)(const C* a, const C* b, int64_t count, C* out);

template <class C, class F>
inline bool each(const C* __restrict a, const C* __restrict b, int64_t count, C* __restrict out, F&& f) {
  for (int64_t i = 0; i < count; ++i) out[i] = f(a[i], b[i]);
  return true;
}

#define ONWARD_EACH(expression)                                                         \
  [](const C* a, const C* b, int64_t count, C* out) {                                   \
    return each(a, b, count, out, [](C x, C y) { return C(expression); });              \
  }

// The remainder with the sign of the divisor.
template <class C>
inline C remainder(C x, C y) {
  const C rest = std::fmod(x, y);
  return rest != 0 && (y < 0) != (rest < 0) ? rest + y : rest;
}

// floor(x / y), correct also if the quotient is rounded up to an integer.
template <class C>
inline C floor_division(C x, C y) {
  if (y == 0) return x / y;
  const C rest = std::fmod(x, y);
  C quotient = (x - rest) / y;
  if (rest != 0 && (y < 0) != (rest < 0)) quotient -= C(1);
  if (quotient == 0) return std::copysign(C(0), x / y);
  const C floor = std::floor(quotient);
  return quotient - floor > C(0.5) ? floor + C(1) : floor;
}

template <class C>
Block<C> comparison(int32_t op) {
  switch (op) {
    case kEq: return ONWARD_EACH(x == y);
    case kNe: return ONWARD_EACH(x != y);
    case kLt: return ONWARD_EACH(x < y);
    case kLe: return ONWARD_EACH(x <= y);
    case kGt: return ONWARD_EACH(x > y);
    case kGe: return ONWARD_EACH(x >= y);
    default: return nullptr;
  }
}

template <class C>
Block<C> float_operation(int32_t op) {
  switch (op) {
    case kAdd: return ONWARD_EACH(x + y);
    case kSub: return ONWARD_EACH(x - y);
    case kMul: return ONWARD_EACH(x * y);
    case kDiv: return ONWARD_EACH(x / y);
    case kFloorDiv: return ONWARD_EACH(floor_division(x, y));
    case kRemainder: return ONWARD_EACH(remainder(x, y));
    // A NaN in either operand wins.
    case kMin: return ONWARD_EACH(((x < y) | (x != x)) ? x : y);
    case kMax: return ONWARD_EACH(((x > y) | (x != x)) ? x : y);
    default: return comparison<C>(op);
  }
}

using Int = int64_t;

// Rounds towards minus infinity. y is not 0; division by -1 wraps instead of trapping.
inline Int integer_floor_division(Int x, Int y) {
  if (y == -1) return Int(-uint64_t(x));
  const Int quotient = x / y;
  return x % y != 0 && (x < 0) != (y < 0) ? quotient - 1 : quotient;
}
inline Int integer_remainder(Int x, Int y) {
  if (y == -1) return 0;
  const Int rest = x % y;
  return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}

template <Int (*F)(Int, Int)>
bool divided(const Int* a, const Int* b, int64_t count, Int* out) {
  for (int64_t i = 0; i < count; ++i) {
    if (b[i] == 0) return false;
    out[i] = F(a[i], b[i]);
  }
  return true;
}

Block<Int> integer_operation(int32_t op) {
  using C = Int;
  switch (op) {
    case kAdd: return ONWARD_EACH(uint64_t(x) + uint64_t(y));
    case kSub: return ONWARD_EACH(uint64_t(x) - uint64_t(y));
    case kMul: return ONWARD_EACH(uint64_t(x) * uint64_t(y));
    case kFloorDiv: return divided<integer_floor_division>;
    case kRemainder: return divided<integer_remainder>;
    case kMin: return ONWARD_EACH(x < y ? x : y);
    case kMax: return ONWARD_EACH(x > y ? x : y);
    case kAnd: return ONWARD_EACH(x & y);
    case kOr: return ONWARD_EACH(x | y);
    case kXor: return ONWARD_EACH(x ^ y);
    default: return comparison<Int>(op);
  }
}

#undef ONWARD_EACH

constexpr int64_t kCheapGrain = 1 << 15, kDearGrain = 1 << 12;

template <class C>
int32_t run(const Walk& walk, const Operand (&o)[3], int32_t op, int32_t compute, Block<C> block) {
  if (block == nullptr) return kBadArgument;
  const bool dear = op == kFloorDiv || op == kRemainder;
  std::atomic<bool> valid{true};
  parallel_for(walk.count, dear ? kDearGrain : kCheapGrain, [&](int64_t begin, int64_t end) {
    Reader a(walk, 0, o[0], compute), b(walk, 1, o[1], compute);
    Writer writer(walk, 2, o[2], compute);
    alignas(64) C result[kBlock];
    walk.for_blocks(begin, end, [&](int64_t at, int64_t count) {
      const bool good = block(a.read<C>(at, count), b.read<C>(at, count), count, result);
      if (good) writer.write(at, count, result);
      else valid.store(false, std::memory_order_relaxed);
    });
  });
  return valid.load() ? kOk : kBadArgument;
}

}  // namespace
}  // namespace onward::generic

// out = op(a, b). Both are first converted to `compute` (F32, F64 or I64), and the result is rounded once. I64
// has bitwise operations, and all others except true division; integer division by 0 is an error (part of out
// may have been written). out may be a or b, with the same strides.
ONWARD_API int32_t onward_binary(int32_t op, int32_t compute, int64_t ndim, const int64_t* shape,
                                 const void* a, int32_t a_dtype, const int64_t* a_strides,
                                 const void* b, int32_t b_dtype, const int64_t* b_strides, void* out,
                                 int32_t out_dtype, const int64_t* out_strides) {
  using namespace onward;
  using namespace onward::generic;
  const Operand operands[3] = {
      {a, a_dtype, a_strides}, {b, b_dtype, b_strides}, {out, out_dtype, out_strides}};
  Walk walk;
  if (op < 0 || op >= kBinaries || !make_walk(kAnyOrder, ndim, shape, operands, &walk)) {
    return kBadArgument;
  }
  switch (compute) {
    case kF32: return run<float>(walk, operands, op, compute, float_operation<float>(op));
    case kF64: return run<double>(walk, operands, op, compute, float_operation<double>(op));
    case kI64: return run<int64_t>(walk, operands, op, compute, integer_operation(op));
    default: return kBadArgument;
  }
}
ONWARD_INSTRUCTION(onward_binary);
