// Products with a b whose n is contiguous: sums of rows of b, each times an element of a.
//
// The order of the sum is the same for every m, tile and thread: each output is one float sum over k in order,
// with one fma per term.
#include "problem.h"

namespace onward::generic {
namespace {

constexpr int64_t kStreamRows = 16;      // up to this number of rows of a, b is read once
constexpr int64_t kStreamColumns = 512;  // few enough that their sums stay in the L1 cache
constexpr int64_t kBlockInputs = 128;
constexpr int64_t kBlockColumns = 64;
constexpr int64_t kVectors = kBlockColumns / 16;

// Tiles are ROWS rows of a and VECTORS * 16 columns, few enough that the sums stay in registers.
using namespace shapes::rows;

#define ONWARD_UNROLL _Pragma("GCC unroll 32")

template <class T>
struct Operands {
  const T *a, *b;
  int64_t a_row, a_column, b_row;

  Operands(const Matmul& p, int64_t batch)
      : a(static_cast<const T*>(p.a.data) + p.batch_offset(p.a, batch)),
        b(static_cast<const T*>(p.b.data) + p.batch_offset(p.b, batch)),
        a_row(p.a.row_stride), a_column(p.a.column_stride), b_row(p.b.row_stride) {}

  // Inputs k … k + count - 1 of a row of a as floats; `to` has room for a multiple of 16.
  void take(int64_t row, int64_t k, int64_t count, float* to) const {
    const T* from = a + row * a_row + k * a_column;
    for (int64_t i = 0; i < count; i += 16) {
      store(to + i, load_strided(from + i * a_column, a_column, count - i));
    }
  }
};

// sums[r, 0 … 15] += x[r, 0 … STEPS - 1] @ STEPS rows of b.
template <int STEPS, class T>
inline void stream_vector(const T* b, int64_t b_row, int64_t valid, const float* x, int64_t rows,
                          float* sums) {
  f32x16 w[STEPS];
  ONWARD_UNROLL for (int s = 0; s < STEPS; ++s) {
    w[s] = load_first(b + s * b_row, valid);
    prefetch(b + (s + 2 * STEPS) * b_row);
  }
  for (int64_t r = 0; r < rows; ++r) {
    f32x16 sum = load(sums + r * kStreamColumns);
    ONWARD_UNROLL for (int s = 0; s < STEPS; ++s) sum = fma(w[s], splat(x[r * kBlockInputs + s]), sum);
    store(sums + r * kStreamColumns, sum);
  }
}

// For few rows of a: reads b once, four of its rows at a time.
template <class T>
void stream_piece(const Matmul& p, const Piece& piece) {
  const Operands<T> o(p, piece.batch);
  const int64_t rows = piece.m_end - piece.m_begin;
  alignas(64) float x[kStreamRows * kBlockInputs], sums[kStreamRows * kStreamColumns];
  for (int64_t n = piece.n_begin; n < piece.n_end; n += kStreamColumns) {
    const int64_t columns = piece.n_end - n < kStreamColumns ? piece.n_end - n : kStreamColumns;
    const int64_t padded = round_up(columns, 16);
    for (int64_t r = 0; r < rows; ++r) std::memset(sums + r * kStreamColumns, 0, size_t(padded) * 4);
    for (int64_t first = 0; first < p.k; first += kBlockInputs) {
      const int64_t inputs = p.k - first < kBlockInputs ? p.k - first : kBlockInputs;
      for (int64_t r = 0; r < rows; ++r) o.take(piece.m_begin + r, first, inputs, x + r * kBlockInputs);
      const T* b = o.b + first * o.b_row + n;
      int64_t k = 0;
      for (; k + 4 <= inputs; k += 4, b += 4 * o.b_row) {
        for (int64_t c = 0; c < columns; c += 16) stream_vector<4>(b + c, o.b_row, columns - c, x + k, rows, sums + c);
      }
      for (; k < inputs; ++k, b += o.b_row) {
        for (int64_t c = 0; c < columns; c += 16) stream_vector<1>(b + c, o.b_row, columns - c, x + k, rows, sums + c);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      finish<T>(p, piece.batch, piece.m_begin + r, n, columns, sums + r * kStreamColumns);
    }
  }
}

// sums[r, …] += x[r, 0 … inputs - 1] @ b, b float [inputs, kBlockColumns].
template <int ROWS>
void tile(const float* x, const float* b, int64_t inputs, float* sums) {
  for (int64_t v = 0; v < kVectors; v += kTileVectors) {
    f32x16 sum[ROWS][kTileVectors];
    ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) {
      ONWARD_UNROLL for (int c = 0; c < kTileVectors; ++c) sum[r][c] = load(sums + r * kBlockColumns + (v + c) * 16);
    }
    for (int64_t k = 0; k < inputs; ++k) {
      f32x16 w[kTileVectors];
      ONWARD_UNROLL for (int c = 0; c < kTileVectors; ++c) w[c] = load(b + k * kBlockColumns + (v + c) * 16);
      ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) {
        const f32x16 factor = splat(x[r * kBlockInputs + k]);
        ONWARD_UNROLL for (int c = 0; c < kTileVectors; ++c) sum[r][c] = fma(w[c], factor, sum[r][c]);
      }
    }
    ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) {
      ONWARD_UNROLL for (int c = 0; c < kTileVectors; ++c) store(sums + r * kBlockColumns + (v + c) * 16, sum[r][c]);
    }
  }
}

template <int ROWS = kTileRows>
void tile_of(int64_t rows, const float* x, const float* b, int64_t inputs, float* sums) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return tile_of<ROWS - 1>(rows, x, b, inputs, sums);
  }
  tile<ROWS>(x, b, inputs, sums);
}

// For many rows of a: converts a block of b to floats once for all rows of the piece.
template <class T>
void block_piece(const Matmul& p, const Piece& piece) {
  const Operands<T> o(p, piece.batch);
  const int64_t rows = piece.m_end - piece.m_begin;
  alignas(64) float x[kRowsPerPart * kBlockInputs], b[kBlockInputs * kBlockColumns];
  alignas(64) float sums[kRowsPerPart * kBlockColumns];
  for (int64_t n = piece.n_begin; n < piece.n_end; n += kBlockColumns) {
    const int64_t columns = piece.n_end - n < kBlockColumns ? piece.n_end - n : kBlockColumns;
    std::memset(sums, 0, sizeof sums);
    for (int64_t first = 0; first < p.k; first += kBlockInputs) {
      const int64_t inputs = p.k - first < kBlockInputs ? p.k - first : kBlockInputs;
      for (int64_t r = 0; r < rows; ++r) o.take(piece.m_begin + r, first, inputs, x + r * kBlockInputs);
      for (int64_t k = 0; k < inputs; ++k) {
        const T* from = o.b + (first + k) * o.b_row + n;
        for (int64_t c = 0; c < kBlockColumns; c += 16) {
          store(b + k * kBlockColumns + c, load_first(from + c, columns - c));
        }
      }
      for (int64_t r = 0; r < rows; r += kTileRows) {
        tile_of(rows - r, x + r * kBlockInputs, b, inputs, sums + r * kBlockColumns);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      finish<T>(p, piece.batch, piece.m_begin + r, n, columns, sums + r * kBlockColumns);
    }
  }
}

}  // namespace

int32_t multiply_by_rows(const Matmul& p, int32_t dtype) {
  const bool streaming = p.m <= kStreamRows;
  const bool known = with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for_pieces(p, streaming ? kStreamColumns : 4 * kBlockColumns, [&](const Piece& piece) {
      if (streaming) stream_piece<T>(p, piece);
      else block_piece<T>(p, piece);
    });
  });
  return known ? kOk : kBadArgument;
}

}  // namespace onward::generic
