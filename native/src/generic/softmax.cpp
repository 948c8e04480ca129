// softmax, log_softmax and cumulative sums along one dimension of a strided tensor.
#include <cmath>

#include "../program.h"
#include "../simd_math.h"
#include "rows.h"

namespace onward::generic {
namespace {

constexpr int64_t kGrain = 1 << 13;

bool make_rows(int64_t outer_ndim, const int64_t* outer_shape, int64_t count, const int64_t* x_stride,
               const int64_t* out_stride, Rows* rows) {
  const Operand x{rows->x.data, rows->x.code, x_stride}, out{rows->out.data, rows->out.code, out_stride};
  return make_walk(kAnyOrder, outer_ndim, outer_shape, {rows->x, rows->out}, &rows->outer) &&
         make_walk(kRowMajor, 1, &count, {x, out}, &rows->inner);
}

// Calls body(x, first, elements) for each block of a row. Memory past the elements may not be read.
template <class C, class Body>
inline void for_row(Reader& reader, int64_t count, Body&& body) {
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = count - at < kBlock ? count - at : kBlock;
    body(reader.read<C>(at, n), at, n);
  }
}

// e^(x - shift), padded with 0. Element i of a row is added to lane i % 64 of the sum, as in norm.h.
inline f32x16 shifted_exp(const float* x, int64_t n, f32x16 shift) {
  const f32x16 e = exp(sub(load_first(x, n), shift));
  if (n >= 16) return e;
  float lanes[16] = {};
  store_first(lanes, e, n);
  return load(lanes);
}

float largest(Reader& reader, int64_t count) {
  f32x16 best = splat(-INFINITY);
  for_row<float>(reader, count, [&](const float* x, int64_t, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) best = max(load(x + i), best);
    for (; i < n; ++i) best = max(splat(x[i]), best);
  });
  return max_lanes(best);
}

// Shifts the largest element to 0. The maximum ignores NaN, but the sum becomes NaN.
void softmax_row(Reader& reader, Writer& writer, int64_t count, bool log, float) {
  const float top = largest(reader, count);
  const f32x16 shift = splat(top);
  f32x16 lanes[4] = {zero_f32(), zero_f32(), zero_f32(), zero_f32()};
  for_row<float>(reader, count, [&](const float* x, int64_t, int64_t n) {
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
      for (int j = 0; j < 4; ++j) lanes[j] = add(lanes[j], exp(sub(load(x + i + j * 16), shift)));
    }
    for (int j = 0; i < n; i += 16, ++j) lanes[j] = add(lanes[j], shifted_exp(x + i, n - i, shift));
  });
  const float sum = sum_lanes(add(add(lanes[0], lanes[1]), add(lanes[2], lanes[3])));
  const f32x16 scale = splat(sum), log_sum = splat(float(std::log(double(sum))));
  for_row<float>(reader, count, [&](const float* x, int64_t at, int64_t n) {
    alignas(64) float result[kBlock];
    for (int64_t i = 0; i < n; i += 16) {
      const f32x16 shifted = sub(load_first(x + i, n - i), shift);
      store(result + i, log ? sub(shifted, log_sum) : div(exp(shifted), scale));
    }
    writer.write(at, n, result);
  });
}

void softmax_row(Reader& reader, Writer& writer, int64_t count, bool log, double) {
  double top = -INFINITY, sum = 0;
  for_row<double>(reader, count, [&](const double* x, int64_t, int64_t n) {
    for (int64_t i = 0; i < n; ++i) top = x[i] > top ? x[i] : top;
  });
  for_row<double>(reader, count, [&](const double* x, int64_t, int64_t n) {
    for (int64_t i = 0; i < n; ++i) sum += std::exp(x[i] - top);
  });
  const double log_sum = std::log(sum);
  for_row<double>(reader, count, [&](const double* x, int64_t at, int64_t n) {
    double result[kBlock];
    for (int64_t i = 0; i < n; ++i) result[i] = log ? x[i] - top - log_sum : std::exp(x[i] - top) / sum;
    writer.write(at, n, result);
  });
}

template <class C>
void cumsum_row(Reader& reader, Writer& writer, int64_t count) {
  C sum = 0;
  for_row<C>(reader, count, [&](const C* x, int64_t at, int64_t n) {
    C result[kBlock];
    for (int64_t i = 0; i < n; ++i) {
      if constexpr (std::is_integral_v<C>) sum = C(uint64_t(sum) + uint64_t(x[i]));
      else sum += x[i];
      result[i] = sum;
    }
    writer.write(at, n, result);
  });
}

}  // namespace
}  // namespace onward::generic

// out = softmax of x along the dimension of `count` elements, or its logarithm. Computed in float32, for f64 in
// double. A row whose elements are all -inf becomes NaN. out may be x, with the same strides.
ONWARD_API int32_t onward_softmax(int32_t log, int64_t outer_ndim, const int64_t* outer_shape,
                                  int64_t count, const void* x, int32_t x_dtype,
                                  const int64_t* x_outer_strides, int64_t x_stride, void* out,
                                  int32_t out_dtype, const int64_t* out_outer_strides,
                                  int64_t out_stride) {
  using namespace onward;
  using namespace onward::generic;
  Rows rows{{}, {}, {x, x_dtype, x_outer_strides}, {out, out_dtype, out_outer_strides}};
  if (!make_rows(outer_ndim, outer_shape, count, &x_stride, &out_stride, &rows)) return kBadArgument;
  if (!is_float(out_dtype)) return kBadArgument;
  const int32_t compute = x_dtype == kF64 || out_dtype == kF64 ? int32_t(kF64) : int32_t(kF32);
  rows.for_all(kGrain, [&](int64_t row) {
    Reader reader(rows.inner, 0, rows.at(0, row), compute);
    Writer writer(rows.inner, 1, rows.at(1, row), compute);
    if (compute == kF64) softmax_row(reader, writer, count, log != 0, double{});
    else softmax_row(reader, writer, count, log != 0, float{});
  });
  return kOk;
}
ONWARD_INSTRUCTION(onward_softmax);

// out[i] = x[0] + … + x[i] along the dimension of `count` elements. Floats are added in double, integers in
// int64. out may be x, with the same strides.
ONWARD_API int32_t onward_cumsum(int64_t outer_ndim, const int64_t* outer_shape, int64_t count,
                                 const void* x, int32_t x_dtype, const int64_t* x_outer_strides,
                                 int64_t x_stride, void* out, int32_t out_dtype,
                                 const int64_t* out_outer_strides, int64_t out_stride) {
  using namespace onward;
  using namespace onward::generic;
  Rows rows{{}, {}, {x, x_dtype, x_outer_strides}, {out, out_dtype, out_outer_strides}};
  if (!make_rows(outer_ndim, outer_shape, count, &x_stride, &out_stride, &rows)) return kBadArgument;
  const int32_t compute = is_float(x_dtype) ? int32_t(kF64) : int32_t(kI64);
  rows.for_all(kGrain, [&](int64_t row) {
    Reader reader(rows.inner, 0, rows.at(0, row), compute);
    Writer writer(rows.inner, 1, rows.at(1, row), compute);
    if (compute == kF64) cumsum_row<double>(reader, writer, count);
    else cumsum_row<int64_t>(reader, writer, count);
  });
  return kOk;
}
ONWARD_INSTRUCTION(onward_cumsum);
