// One call of onward_matmul: out = alpha * a @ b + beta * bias over a batch.
#pragma once
#include "../../simd.h"
#include "../../team.h"

namespace onward::generic {

constexpr int64_t kMaxBatchDims = 8;

// [batch, rows, columns]; strides in elements.
struct Matrix {
  const void* data;
  const int64_t* batch_strides;
  int64_t row_stride, column_stride;
};

struct Matmul {
  int64_t batch_ndim;
  const int64_t* batch_shape;
  int64_t m, n, k;
  Matrix a, b, bias, out;  // b: rows k, columns n; bias.data may be null
  float alpha, beta;

  int64_t batches() const {
    int64_t count = 1;
    for (int64_t d = 0; d < batch_ndim; ++d) count *= batch_shape[d];
    return count;
  }
  int64_t batch_offset(const Matrix& matrix, int64_t batch) const {
    int64_t offset = 0;
    for (int64_t d = batch_ndim - 1; d >= 0; --d) {
      offset += batch % batch_shape[d] * matrix.batch_strides[d];
      batch /= batch_shape[d];
    }
    return offset;
  }
};

// A unit of work: rows m_begin … m_end - 1, columns n_begin … n_end - 1 of one matrix of the batch.
struct Piece {
  int64_t batch, m_begin, m_end, n_begin, n_end;
};

constexpr int64_t kRowsPerPart = 64;        // for a large m
constexpr int64_t kPieceWork = 1 << 16;     // products that justify a separate chunk
constexpr int64_t kColumnUnit = 16;

// Divides the outputs into pieces of up to kRowsPerPart rows and `columns` columns (a multiple of kColumnUnit)
// and runs body(piece) for each.
template <class Body>
void for_pieces(const Matmul& p, int64_t columns, Body&& body) {
  const int64_t parts = ceil_div(p.m, kRowsPerPart), units = ceil_div(p.n, kColumnUnit);
  // The same number of groups for every thread, unless there is too little work.
  int64_t groups = ceil_div(p.n, columns);
  if (p.m * p.n * p.k > kPieceWork) groups = round_up(groups, num_threads());
  if (groups > units) groups = units;
  const int64_t work = p.m * p.n * p.k / (parts * groups) + 1;
  parallel_for(p.batches() * groups * parts, ceil_div(kPieceWork, work), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t part = i % parts, group = i / parts % groups;
      const auto column = [&](int64_t g) {
        const int64_t first = units * g / groups * kColumnUnit;
        return first < p.n ? first : p.n;
      };
      body(Piece{i / parts / groups, p.m * part / parts, p.m * (part + 1) / parts, column(group),
                 column(group + 1)});
    }
  });
}

// Up to 16 elements with any stride.
template <class T>
inline f32x16 load_strided(const T* p, int64_t stride, int64_t n) {
  if (stride == 1) return load_first(p, n);
  T lanes[16] = {};
  for (int64_t i = 0; i < n && i < 16; ++i) lanes[i] = p[i * stride];
  return load(lanes);
}

// out[row, column …] = alpha * sums + beta * bias, rounded once. sums may be read up to a multiple of 16.
template <class T>
inline void finish(const Matmul& p, int64_t batch, int64_t row, int64_t column, int64_t count,
                   const float* sums) {
  T* out = const_cast<T*>(static_cast<const T*>(p.out.data)) + p.batch_offset(p.out, batch) +
           row * p.out.row_stride + column * p.out.column_stride;
  const T* bias = static_cast<const T*>(p.bias.data);
  if (bias != nullptr) bias += p.batch_offset(p.bias, batch) + row * p.bias.row_stride + column * p.bias.column_stride;
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t n = count - i;
    f32x16 value = load(sums + i);
    if (p.alpha != 1.0f) value = mul(value, splat(p.alpha));
    if (bias != nullptr) {
      f32x16 term = load_strided(bias + i * p.bias.column_stride, p.bias.column_stride, n);
      if (p.beta != 1.0f) term = mul(term, splat(p.beta));
      value = add(value, term);
    }
    if (p.out.column_stride == 1) {
      store_first(out + i, value, n);
    } else {
      T lanes[16];
      store(lanes, value);
      for (int64_t j = 0; j < n && j < 16; ++j) out[(i + j) * p.out.column_stride] = lanes[j];
    }
  }
}

// For b with contiguous k (weights [N, K]): dot products. k is contiguous in a, too.
int32_t multiply_by_dots(const Matmul& p, int32_t dtype);
// For b with contiguous n (weights [K, N]): sums of rows of b. a has any strides.
int32_t multiply_by_rows(const Matmul& p, int32_t dtype);

}  // namespace onward::generic
