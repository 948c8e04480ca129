// Normalisation over the last axis of many rows.
#include "norm.h"

#include "program.h"
#include "team.h"

namespace onward {
namespace {

constexpr int64_t kElementsPerChunk = 1 << 13;

// sum[i] += residual[i], rounded to the row's type: the norm sees what later layers will read.
template <class T>
void add_row(T* sum, const T* residual, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t n = count - i;
    store_first(sum + i, add(load_first(sum + i, n), load_first(residual + i, n)), n);
  }
}

// body(row) for every row, in the type that dtype names.
template <class Body>
int32_t over_rows(int64_t rows, int64_t columns, int32_t dtype, Body&& body) {
  if (rows < 0 || columns < 0) return kBadArgument;
  const bool known = with_dtype(dtype, [&](auto* tag) {
    parallel_for(rows, ceil_div(kElementsPerChunk, columns + 1), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) body(tag, row);
    });
  });
  return known ? kOk : kBadArgument;
}

}  // namespace
}  // namespace onward

// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * (weight + weight_offset). x, weight (or null), residual
// and out are of one dtype; rows are `…_stride` elements apart; out may be x. With `after_cast` the
// quotient is rounded to the dtype before the weight multiplies it. With a residual (else null), x is
// first replaced by x + residual.
ONWARD_API int32_t onward_rms_norm(int64_t rows, int64_t columns, int32_t dtype, void* x,
                                   int64_t x_stride, const void* residual, int64_t residual_stride,
                                   const void* weight, float weight_offset, int32_t after_cast,
                                   float eps, void* out, int64_t out_stride) {
  using namespace onward;
  const RmsWeight how{weight, weight_offset, after_cast != 0};
  return over_rows(rows, columns, dtype, [&](auto* tag, int64_t row) {
    using T = std::remove_pointer_t<decltype(tag)>;
    T* from = static_cast<T*>(x) + row * x_stride;
    if (residual != nullptr) {
      add_row(from, static_cast<const T*>(residual) + row * residual_stride, columns);
    }
    rms_norm_row(from, columns, eps, how, static_cast<T*>(out) + row * out_stride);
  });
}
ONWARD_INSTRUCTION(onward_rms_norm);

// out[r] = (x[r] - mean) / sqrt(variance + eps) * weight + bias, the variance that of the whole row
// (divided by its length). weight and bias may be null; out may be x.
ONWARD_API int32_t onward_layer_norm(int64_t rows, int64_t columns, int32_t dtype, const void* x,
                                     int64_t x_stride, const void* weight, const void* bias,
                                     float eps, void* out, int64_t out_stride) {
  using namespace onward;
  return over_rows(rows, columns, dtype, [&](auto* tag, int64_t row) {
    using T = std::remove_pointer_t<decltype(tag)>;
    layer_norm_row(static_cast<const T*>(x) + row * x_stride, columns, eps,
                   static_cast<const T*>(weight), static_cast<const T*>(bias),
                   static_cast<T*>(out) + row * out_stride);
  });
}
ONWARD_INSTRUCTION(onward_layer_norm);
