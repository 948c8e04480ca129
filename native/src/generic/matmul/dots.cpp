// Products with a b whose k is contiguous: every output is a dot product of two rows in memory.
//
// The order of the sum is the same for every m, tile and thread: 16 lanes, which sum_lanes adds. f32, f16: input
// k is added to lane k % 16 with one fma. bf16: the pair (2i, 2i + 1) is added to lane i % 16 by dot_bf16
// (vdpbf16ps: products are not rounded; on AVX-512 subnormals count as 0).
#include "problem.h"

namespace onward::generic {
namespace {

constexpr int64_t kGroupBytes = 128 << 10;  // bytes of b per chunk
constexpr int64_t kMaxPrefetch = 16 << 10;

// Tiles are ROWS rows of a and COLUMNS rows of b, few enough that the sums stay in registers.
using namespace shapes::dots;

template <class T>
struct Dot {
  static constexpr int64_t kStep = 16;
  using Vector = f32x16;
  static Vector take(const T* p) { return load(p); }
  static f32x16 step(f32x16 sum, Vector b, Vector a) { return fma(b, a, sum); }
};
template <>
struct Dot<Bf16> {
  static constexpr int64_t kStep = 32;
  using Vector = i32x16;
  static Vector take(const Bf16* p) { return load_i32(p); }
  static f32x16 step(f32x16 sum, Vector b, Vector a) { return dot_bf16(sum, b, a); }
};

template <class T>
inline typename Dot<T>::Vector take_first(const T* p, int64_t n) {
  T padded[Dot<T>::kStep] = {};
  std::memcpy(padded, p, size_t(n) * sizeof(T));
  return Dot<T>::take(padded);
}

#define ONWARD_UNROLL _Pragma("GCC unroll 32")

// sums[r * 16 + c] = the dot product of the rows a + r * a_stride and b + c * b_stride.
template <class T, int ROWS, int COLUMNS, bool STREAM>
void tile(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t k, int64_t ahead,
          float* sums) {
  using D = Dot<T>;
  f32x16 sum[ROWS][COLUMNS];
  ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) {
    ONWARD_UNROLL for (int c = 0; c < COLUMNS; ++c) sum[r][c] = zero_f32();
  }
  int64_t i = 0;
  for (; i + D::kStep <= k; i += D::kStep) {
    typename D::Vector w[COLUMNS];
    ONWARD_UNROLL for (int c = 0; c < COLUMNS; ++c) {
      w[c] = D::take(b + c * b_stride + i);
      if (STREAM) prefetch(b + c * b_stride + i + ahead);
    }
    ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) {
      const typename D::Vector x = D::take(a + r * a_stride + i);
      ONWARD_UNROLL for (int c = 0; c < COLUMNS; ++c) sum[r][c] = D::step(sum[r][c], w[c], x);
    }
  }
  if (i < k) {
    typename D::Vector w[COLUMNS];
    ONWARD_UNROLL for (int c = 0; c < COLUMNS; ++c) w[c] = take_first(b + c * b_stride + i, k - i);
    ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) {
      const typename D::Vector x = take_first(a + r * a_stride + i, k - i);
      ONWARD_UNROLL for (int c = 0; c < COLUMNS; ++c) sum[r][c] = D::step(sum[r][c], w[c], x);
    }
  }
  ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) sum_lanes_of(sum[r], sums + r * 16);
}

template <class T, int COLUMNS, int ROWS = kTileRows>
void tile_of(int64_t rows, const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t k,
             int64_t ahead, float* sums) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) {
      return tile_of<T, COLUMNS, ROWS - 1>(rows, a, a_stride, b, b_stride, k, ahead, sums);
    }
  }
  // The first rows of a prefetch the next rows of b.
  if (ahead > 0) tile<T, ROWS, COLUMNS, true>(a, a_stride, b, b_stride, k, ahead, sums);
  else tile<T, ROWS, COLUMNS, false>(a, a_stride, b, b_stride, k, 0, sums);
}

template <class T>
void run_piece(const Matmul& p, const Piece& piece) {
  const T* a = static_cast<const T*>(p.a.data) + p.batch_offset(p.a, piece.batch);
  const T* b = static_cast<const T*>(p.b.data) + p.batch_offset(p.b, piece.batch);
  const int64_t stride = p.b.column_stride;
  // Prefetches are at most kMaxPrefetch ahead.
  constexpr int64_t kMost = kMaxPrefetch / int64_t(sizeof(T));
  const int64_t next = kTileColumns * stride;
  const int64_t ahead = next < kMost ? next : kMost;
  alignas(64) float sums[kRowsPerPart * 16];
  for (int64_t n = piece.n_begin; n < piece.n_end; n += 16) {
    const int64_t columns = piece.n_end - n < 16 ? piece.n_end - n : 16;
    for (int64_t c = 0; c < columns;) {
      const bool whole = columns - c >= kTileColumns;
      for (int64_t m = piece.m_begin; m < piece.m_end;) {
        const int64_t rows = piece.m_end - m < kTileRows ? piece.m_end - m : kTileRows;
        const T *x = a + m * p.a.row_stride, *w = b + (n + c) * stride;
        const int64_t near = m == piece.m_begin ? ahead : 0;
        float* to = sums + (m - piece.m_begin) * 16 + c;
        if (whole) tile_of<T, kTileColumns>(rows, x, p.a.row_stride, w, stride, p.k, near, to);
        else tile_of<T, 1>(rows, x, p.a.row_stride, w, stride, p.k, near, to);
        m += rows;
      }
      c += whole ? kTileColumns : 1;
    }
    for (int64_t m = piece.m_begin; m < piece.m_end; ++m) {
      finish<T>(p, piece.batch, m, n, columns, sums + (m - piece.m_begin) * 16);
    }
  }
}

}  // namespace

int32_t multiply_by_dots(const Matmul& p, int32_t dtype) {
  const int64_t fit = kGroupBytes / (element_size(dtype) * (p.k + 1));
  const int64_t columns = fit < kColumnUnit ? kColumnUnit : fit / kColumnUnit * kColumnUnit;
  const bool known = with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for_pieces(p, columns, [&](const Piece& piece) { run_piece<T>(p, piece); });
  });
  return known ? kOk : kBadArgument;
}

}  // namespace onward::generic
