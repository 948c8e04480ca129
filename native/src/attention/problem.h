// What an attention call is about, and the vocabulary of this folder.
//
// Definition. Query t of row b and head h sees a range of key positions, its `Span`. Over that range,
// with the scores s_j = q . k_j * scale + mask_j and the weights w_j = e^(s_j - max s),
//   out = sum_j w_j v_j / (sum_j w_j + e^(sink_h - max s)).
// With a softcap c the score before its mask is c tanh(q . k_j * scale / c).
//
// Exactness. The bits of an output depend on its own query, span, keys and values alone. Keys are
// visited in blocks of 64 at absolute multiples of 64, in order of position, with a running maximum
// (online softmax). Eight blocks make a segment: segments start afresh and are merged in order, so
// that several threads may share one long row. A block or segment in which a query sees nothing does
// not count at all. Places of a block that are computed though they are outside the span have a weight
// of 0, which leaves every sum as it was.
#pragma once
#include <cstdint>

#include "../api.h"

namespace onward::attention {

constexpr int64_t kBlock = 64;                // key positions
constexpr int64_t kSegmentBlocks = 8;
constexpr int64_t kSegment = kSegmentBlocks * kBlock;

struct Span {  // first, …, last - 1
  int64_t first, last;
  bool empty() const { return first >= last; }
};

inline Span overlap(Span a, Span b) {
  return {a.first > b.first ? a.first : b.first, a.last < b.last ? a.last : b.last};
}

// A tensor of which the last axis, the features, is contiguous; strides in elements.
struct Tensor {
  const void* data;
  int64_t batch_stride, head_stride, position_stride;
  int64_t dim;  // features: those of queries and keys, or those of values and outputs
  int64_t width;  // elements of a row, with a scale if it has one

  template <class T>
  const T* at(int64_t batch, int64_t head, int64_t position) const {
    return static_cast<const T*>(data) + batch * batch_stride + head * head_stride +
           position * position_stride;
  }
};

struct Mask {  // float [batch, heads, queries, positions]; a stride of 0 repeats
  const float* data;
  int64_t batch_stride, head_stride, query_stride, position_stride;

  const float* at(int64_t batch, int64_t head, int64_t query) const {
    if (data == nullptr) return nullptr;
    return data + batch * batch_stride + head * head_stride + query * query_stride;
  }
};

// Where the keys and values of a row lie in blocks of memory, each of kBlock positions: entry m of a row is
// the block of its positions kBlock m, …, kBlock m + kBlock - 1. A block of keys that is visited lies in one.
struct Table {
  const int32_t* blocks;  // null: none, a row's positions lie one after the other
  int64_t row_stride;

  int32_t at(int64_t row, int64_t position) const {
    return blocks[row * row_stride + position / kBlock];
  }
};

struct Problem {
  int32_t dtype;  // of q and out
  int32_t rows;   // the format of keys and values
  int64_t batch, heads, kv_heads, queries, positions;
  Tensor q, keys, values, out;
  Table table;             // of keys and values: their batch_stride is then from block to block
  const int32_t* offsets;  // [batch]: causal, query t of row b at position offsets[b] + t; null: not
  int64_t window;          // positions a causal query sees, itself included; 0: all
  float scale;
  float softcap;       // 0: none
  Mask mask;           // data null: none
  const float* sinks;  // [heads], or null

  int64_t group() const { return heads / kv_heads; }

  // The key or value of a position.
  template <class T>
  const T* cached(const Tensor& tensor, int64_t row, int64_t kv_head, int64_t position) const {
    if (table.blocks == nullptr) return tensor.at<T>(row, kv_head, position);
    return tensor.at<T>(table.at(row, position), kv_head, position % kBlock);
  }

  Span span(int64_t row, int64_t query) const {
    if (offsets == nullptr) return {0, positions};
    const int64_t end = offsets[row] + query + 1;
    return {window > 0 && end > window ? end - window : 0, end};
  }
};

// What a query has seen so far of a segment or of its span.
struct State {
  float* max;   // [rows]; -inf before the first key
  float* sum;   // [rows, 16]: the sum of weights, in 16 lanes
  float* out;   // [rows, padded dim]: the weighted sum of values
  int64_t dim;  // of values, padded

  static int64_t floats(int64_t rows, int64_t dim) { return round_up(rows, 16) + rows * (16 + dim); }
  static State in(float* memory, int64_t rows, int64_t dim) {
    float* sum = memory + round_up(rows, 16);
    return {memory, sum, sum + rows * 16, dim};
  }
  State from_row(int64_t row) const { return {max + row, sum + row * 16, out + row * dim, dim}; }
};

Status attend(const Problem& problem);

}  // namespace onward::attention
