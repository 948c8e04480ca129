// The definition of an attention call, and the terms that this folder uses.
//
// Definition. Query t of row b and head h sees a range of key positions, its `Span`. Over that range,
// with the scores s_j = q . k_j * scale + mask_j and the weights w_j = e^(s_j - max s),
//   out = sum_j w_j v_j / (sum_j w_j + e^(sink_h - max s)).
// With a softcap c the score before its mask is c tanh(q . k_j * scale / c).
//
// Exactness. The bits of an output depend only on its query, span, keys and values. Keys are visited in
// blocks of 64 that begin at multiples of 64, in order of position, with a running maximum (online
// softmax). Eight blocks make a segment. Every segment starts with an empty state, and segments are
// merged in order, so that several threads can share one long row. Blocks and segments in which a query
// sees nothing are skipped. Positions of a block that are computed but lie outside the span have a
// weight of 0, which leaves every sum unchanged.
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

// A tensor whose last axis, the features, is contiguous; strides in elements.
struct Tensor {
  const void* data;
  int64_t batch_stride, head_stride, position_stride;
  int64_t dim;  // features
  int64_t width;  // elements of a row, including its scale if it has one

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

// The block table. Entry m of a row is the number of the memory block with its positions kBlock m, …,
// kBlock m + kBlock - 1. Blocks of memory are the blocks in which keys are visited.
struct Table {
  const int32_t* blocks;  // null: no table, a row's positions are consecutive
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
  Table table;             // of keys and values, whose batch_stride is then the stride between blocks
  const int32_t* offsets;  // [batch]: causal, query t of row b at position offsets[b] + t; null: not causal
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

// The online softmax over the part of a segment or span that has been visited.
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
