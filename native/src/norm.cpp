// Normalization over the last axis of many rows.
#include "norm.h"

#include "program.h"
#include "team.h"

namespace onward {
namespace {

constexpr int64_t kElementsPerChunk = 1 << 13;

// The residual that is added to each row before it is normalized, and the destination of the sum.
struct Residual {
  const void* data;  // null: nothing is added
  int64_t stride;
  void* sum;
  int64_t sum_stride;
};

// The row to normalize: x, or its sum with the residual. The sum is rounded to the row's type, because later
// layers read the rounded sum.
template <class T>
const T* summed(const T* x, const Residual& residual, int64_t row, int64_t count) {
  if (residual.data == nullptr) return x;
  const T* more = static_cast<const T*>(residual.data) + row * residual.stride;
  T* sum = static_cast<T*>(residual.sum) + row * residual.sum_stride;
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t n = count - i;
    store_first(sum + i, add(load_first(x + i, n), load_first(more + i, n)), n);
  }
  return sum;
}

// Calls body(tag, row) for every row; the tag has the type that dtype names.
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

// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * (weight + weight_offset). With a residual (else null), x + residual
// is stored in sum and takes the place of x. x, weight (or null), residual, sum and out have one dtype; rows are
// `…_stride` elements apart; out and sum may each be x. With `after_cast` the quotient is rounded to the dtype
// before it is multiplied by the weight.
ONWARD_API int32_t onward_rms_norm(int64_t rows, int64_t columns, int32_t dtype, const void* x,
                                   int64_t x_stride, const void* residual, int64_t residual_stride,
                                   void* sum, int64_t sum_stride, const void* weight,
                                   float weight_offset, int32_t after_cast, float eps, void* out,
                                   int64_t out_stride) {
  using namespace onward;
  const RmsWeight how{weight, weight_offset, after_cast != 0};
  const Residual added{residual, residual_stride, sum, sum_stride};
  return over_rows(rows, columns, dtype, [&](auto* tag, int64_t row) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const T* from = summed(static_cast<const T*>(x) + row * x_stride, added, row, columns);
    rms_norm_row(from, columns, eps, how, static_cast<T*>(out) + row * out_stride);
  });
}
ONWARD_INSTRUCTION(onward_rms_norm);

// out[r] = (x[r] - mean) / sqrt(variance + eps) * weight + bias. The variance is the biased one (divided by the
// length of the row). weight and bias may be null; residual and sum as above; out may be x.
ONWARD_API int32_t onward_layer_norm(int64_t rows, int64_t columns, int32_t dtype, const void* x,
                                     int64_t x_stride, const void* residual,
                                     int64_t residual_stride, void* sum, int64_t sum_stride,
                                     const void* weight, const void* bias, float eps, void* out,
                                     int64_t out_stride) {
  using namespace onward;
  const Residual added{residual, residual_stride, sum, sum_stride};
  return over_rows(rows, columns, dtype, [&](auto* tag, int64_t row) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const T* from = summed(static_cast<const T*>(x) + row * x_stride, added, row, columns);
    layer_norm_row(from, columns, eps, static_cast<const T*>(weight), static_cast<const T*>(bias),
                   static_cast<T*>(out) + row * out_stride);
  });
}
ONWARD_INSTRUCTION(onward_layer_norm);
