// Reductions over some dimensions of a strided tensor.
//
// A float32 sum has the order of norm.h: element i (in row-major order of the inner dimensions) is added to lane
// i % 64, and a fixed tree adds the lanes. So its bits depend only on the values in a row, not on their strides
// or type, other rows or threads.
#include <limits>

#include "../program.h"
#include "../simd_math.h"
#include "rows.h"

namespace onward::generic {
namespace {

enum Reduce : int32_t { kSum, kMean, kMax, kMin, kArgmax, kAny, kAll, kReductions };

constexpr int64_t kGrain = 1 << 14;

// Combine two values, either single values or lanes. A NaN in either operand wins.
struct Add {
  static f32x16 apply(f32x16 a, f32x16 b) { return add(a, b); }
  template <class C>
  static C apply(C a, C b) {
    if constexpr (std::is_integral_v<C>) return C(uint64_t(a) + uint64_t(b));
    else return a + b;
  }
};
struct Largest {
  static f32x16 apply(f32x16 a, f32x16 b) { return select(is_nan(a), a, max(a, b)); }
  template <class C>
  static C apply(C a, C b) { return a > b || a != a ? a : b; }
};
struct Smallest {
  static f32x16 apply(f32x16 a, f32x16 b) { return select(is_nan(a), a, min(a, b)); }
  template <class C>
  static C apply(C a, C b) { return a < b || a != a ? a : b; }
};

template <class F>
float fold(Reader& reader, int64_t count, float neutral) {
  f32x16 lanes[4] = {splat(neutral), splat(neutral), splat(neutral), splat(neutral)};
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = count - at < kBlock ? count - at : kBlock;
    const float* x = reader.read<float>(at, n);
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
      for (int j = 0; j < 4; ++j) lanes[j] = F::apply(lanes[j], load(x + i + j * 16));
    }
    if (i < n) {  // only at the end of the row: blocks are whole numbers of 64
      float rest[64];
      for (int64_t j = 0; j < 64; ++j) rest[j] = i + j < n ? x[i + j] : neutral;
      for (int j = 0; j < 4; ++j) lanes[j] = F::apply(lanes[j], load(rest + j * 16));
    }
  }
  float value[16];
  store(value, F::apply(F::apply(lanes[0], lanes[1]), F::apply(lanes[2], lanes[3])));
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) value[i] = F::apply(value[i], value[i + width]);
  }
  return value[0];
}

// Doubles and integers are reduced sequentially.
template <class F, class C>
C fold(Reader& reader, int64_t count, C value) {
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = count - at < kBlock ? count - at : kBlock;
    const C* x = reader.read<C>(at, n);
    for (int64_t i = 0; i < n; ++i) value = F::apply(value, x[i]);
  }
  return value;
}

template <class C>
C lowest() {
  return std::numeric_limits<C>::has_infinity ? -std::numeric_limits<C>::infinity()
                                              : std::numeric_limits<C>::lowest();
}
template <class C>
C highest() {
  return std::numeric_limits<C>::has_infinity ? std::numeric_limits<C>::infinity()
                                              : std::numeric_limits<C>::max();
}

template <class C>
C reduced(int32_t op, Reader& reader, int64_t count) {
  switch (op) {
    case kSum: return fold<Add>(reader, count, C(0));
    case kMean: return fold<Add>(reader, count, C(0)) / C(count);  // C is never an integer
    case kMax: return fold<Largest>(reader, count, lowest<C>());
    default: return fold<Smallest>(reader, count, highest<C>());
  }
}

// The index of the first NaN or, if there is none, of the first of the largest elements.
template <class C>
int64_t place_of_largest(Reader& reader, int64_t count) {
  C best{};
  int64_t place = -1;
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = count - at < kBlock ? count - at : kBlock;
    const C* x = reader.read<C>(at, n);
    for (int64_t i = 0; i < n; ++i) {
      if (place < 0 || x[i] > best || x[i] != x[i]) {
        best = x[i];
        place = at + i;
        if (best != best) return place;
      }
    }
  }
  return place;
}

// Whether (element != 0) == wanted for any element.
bool found(Reader& reader, int64_t count, bool wanted) {
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = count - at < kBlock ? count - at : kBlock;
    const uint8_t* x = reader.read<uint8_t>(at, n);
    for (int64_t i = 0; i < n; ++i) {
      if ((x[i] != 0) == wanted) return true;
    }
  }
  return false;
}

void reduce_row(const Rows& rows, int64_t row, int32_t op, int32_t compute) {
  const Operand out = rows.at(1, row);
  if (op == kAny || op == kAll) {
    Reader reader(rows.inner, 0, rows.at(0, row), kBool);
    const bool any = found(reader, rows.count(), op == kAny);
    return store_value(int64_t(any == (op == kAny)), kI64, out);
  }
  Reader reader(rows.inner, 0, rows.at(0, row), compute);
  with_compute(compute, [&](auto zero) {
    using C = decltype(zero);
    if (op == kArgmax) store_value(place_of_largest<C>(reader, rows.count()), kI64, out);
    else store_value(reduced<C>(op, reader, rows.count()), compute, out);
  });
}

}  // namespace
}  // namespace onward::generic

// out[outer] = op over inner of x[outer, inner]. Floats are computed in float32 (in double if x or out is f64),
// integers in int64, and the mean of integers in double. Max, min and argmax need at least one element.
ONWARD_API int32_t onward_reduce(int32_t op, int64_t outer_ndim, const int64_t* outer_shape,
                                 int64_t inner_ndim, const int64_t* inner_shape, const void* x,
                                 int32_t x_dtype, const int64_t* x_outer_strides,
                                 const int64_t* x_inner_strides, void* out, int32_t out_dtype,
                                 const int64_t* out_strides) {
  using namespace onward;
  using namespace onward::generic;
  Rows rows{{}, {}, {x, x_dtype, x_outer_strides}, {out, out_dtype, out_strides}};
  if (op < 0 || op >= kReductions ||
      !make_walk(kAnyOrder, outer_ndim, outer_shape, {rows.x, rows.out}, &rows.outer) ||
      !make_walk(kRowMajor, inner_ndim, inner_shape, {{x, x_dtype, x_inner_strides}}, &rows.inner)) {
    return kBadArgument;
  }
  const bool extreme = op == kMax || op == kMin || op == kArgmax;
  if (extreme && rows.count() == 0 && rows.rows() > 0) return kBadArgument;
  int32_t compute = is_float(x_dtype) ? int32_t(kF32) : int32_t(kI64);
  if (x_dtype == kF64 || (out_dtype == kF64 && compute == kF32) || (op == kMean && compute == kI64)) {
    compute = kF64;
  }
  rows.for_all(kGrain, [&](int64_t row) { reduce_row(rows, row, op, compute); });
  return kOk;
}
ONWARD_INSTRUCTION(onward_reduce);
