// Matrix products of plain strided tensors. The algorithm depends on the contiguous dimension of b, and nothing
// else changes the bits.
#include "../../program.h"
#include "../../scratch.h"
#include "problem.h"

namespace onward::generic {
namespace {

// A contiguous copy of a matrix of each batch, [batches, rows, columns].
template <class T>
void copy_matrices(const Matmul& p, const Matrix& from, int64_t rows, int64_t columns, T* to) {
  parallel_for(p.batches() * rows, ceil_div(1 << 14, columns + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T* row = static_cast<const T*>(from.data) + p.batch_offset(from, i / rows) + i % rows * from.row_stride;
      for (int64_t c = 0; c < columns; ++c) to[i * columns + c] = row[c * from.column_stride];
    }
  });
}

// Replaces an operand by a contiguous copy.
int32_t make_contiguous(Matmul* p, Matrix* matrix, int64_t rows, int64_t columns, int32_t dtype,
                        int64_t* batch_strides) {
  const int64_t elements = p->batches() * rows * columns;
  void* copy = scratch(kScratchActivations, elements * element_size(dtype) + 1);
  if (copy == nullptr) return kOutOfMemory;
  with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    copy_matrices(*p, *matrix, rows, columns, static_cast<T*>(copy));
  });
  int64_t stride = rows * columns;
  for (int64_t d = p->batch_ndim - 1; d >= 0; --d) {
    batch_strides[d] = stride;
    stride *= p->batch_shape[d];
  }
  *matrix = {copy, batch_strides, columns, 1};
  return kOk;
}

}  // namespace
}  // namespace onward::generic

// out[…, m, n] = alpha * (sum over k of a[…, m, k] * b[…, k, n]) + beta * bias[m, n], all of one dtype (F32, BF16,
// F16). The sum is in float32, and the result is rounded once. bias may be null; it is the same for the whole
// batch. Strides are in elements; 0 broadcasts. out may not overlap a or b.
// The order of the sum depends on b_k_stride alone: 1 means dot products (dots.cpp), else rows of b (rows.cpp).
ONWARD_API int32_t onward_matmul(int64_t batch_ndim, const int64_t* batch_shape, int64_t m, int64_t n,
                                 int64_t k, const void* a, const int64_t* a_batch_strides,
                                 int64_t a_m_stride, int64_t a_k_stride, const void* b,
                                 const int64_t* b_batch_strides, int64_t b_k_stride,
                                 int64_t b_n_stride, const void* bias, int64_t bias_m_stride,
                                 int64_t bias_n_stride, void* out, const int64_t* out_batch_strides,
                                 int64_t out_m_stride, int64_t out_n_stride, int32_t dtype,
                                 double alpha, double beta) {
  using namespace onward;
  using namespace onward::generic;
  if (batch_ndim < 0 || batch_ndim > kMaxBatchDims || m < 0 || n < 0 || k < 0) return kBadArgument;
  if (dtype < kF32 || dtype > kF16) return kBadArgument;
  static constexpr int64_t kNoStrides[kMaxBatchDims] = {};
  Matmul p{batch_ndim, batch_shape, m, n, k,
           {a, a_batch_strides, a_m_stride, a_k_stride},
           {b, b_batch_strides, b_k_stride, b_n_stride},
           {bias, kNoStrides, bias_m_stride, bias_n_stride},
           {out, out_batch_strides, out_m_stride, out_n_stride},
           float(alpha), float(beta)};
  for (int64_t d = 0; d < batch_ndim; ++d) {
    if (batch_shape[d] < 0) return kBadArgument;
  }
  if (m == 0 || n == 0 || p.batches() == 0) return kOk;
  int64_t batch_strides[kMaxBatchDims];
  if (b_k_stride == 1) {
    if (a_k_stride != 1 && k > 1) {
      const int32_t status = make_contiguous(&p, &p.a, m, k, dtype, batch_strides);
      if (status != kOk) return status;
    }
    return multiply_by_dots(p, dtype);
  }
  if (b_n_stride != 1 && n > 1) {
    const int32_t status = make_contiguous(&p, &p.b, k, n, dtype, batch_strides);
    if (status != kOk) return status;
  }
  return multiply_by_rows(p, dtype);
}
ONWARD_INSTRUCTION(onward_matmul);
