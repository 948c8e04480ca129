// Advanced indexing: x[rows, positions], gather, index_select, and assignment.
#include <algorithm>

#include "../program.h"
#include "walk.h"

namespace onward::generic {
namespace {

constexpr int64_t kBytesPerChunk = 1 << 16;
constexpr int64_t kElementsPerChunk = 1 << 13;  // of selected columns, about 1 ns each
constexpr int64_t kMaxIndices = 8;

struct Index {
  const void* data;
  int32_t code;
  int64_t stride, size;    // of the dimension of x that it indexes
  const int64_t* strides;  // of the index, over the dimensions of the result

  int64_t at(int64_t offset) const {
    return code == kI32 ? static_cast<const int32_t*>(data)[offset]
                        : static_cast<const int64_t*>(data)[offset];
  }
};

struct Problem {
  int64_t ndim;
  const int64_t* shape;
  unsigned char *out, *x;
  const int64_t *out_strides, *x_strides;
  int64_t element_bytes, num_indices;
  Index indices[kMaxIndices];
  int64_t run = 1;  // consecutive elements that are contiguous in x and out and have the same index values
  int64_t outer = 0;  // dimensions before those of a run
  int64_t runs = 1;
};

// Whether every value of an index is within its dimension. Each value is checked once, even if it is broadcast.
bool inside(const Index& index, int64_t ndim, const int64_t* shape) {
  int64_t at[kMaxDims] = {}, offset = 0;
  for (;;) {
    const int64_t value = index.at(offset);
    if (value < -index.size || value >= index.size) return false;
    int64_t d = ndim - 1;
    for (; d >= 0; --d) {
      if (index.strides[d] == 0) continue;
      offset += index.strides[d];
      if (++at[d] < shape[d]) break;
      offset -= index.strides[d] * shape[d];
      at[d] = 0;
    }
    if (d < 0) return true;
  }
}

// Joins the last dimensions, along which no index varies, into runs.
void find_runs(Problem* p) {
  p->outer = p->ndim;
  while (p->outer > 0) {
    const int64_t d = p->outer - 1;
    bool joins = p->shape[d] == 1 || (p->out_strides[d] == p->run && p->x_strides[d] == p->run);
    for (int64_t i = 0; joins && i < p->num_indices; ++i) {
      joins = p->shape[d] == 1 || p->indices[i].strides[d] == 0;
    }
    if (!joins) break;
    p->run *= p->shape[d];
    --p->outer;
  }
  for (int64_t d = 0; d < p->outer; ++d) p->runs *= p->shape[d];
}

struct Place {
  int64_t out, x;
};

Place place_of(const Problem& p, int64_t run) {
  Place place{0, 0};
  int64_t offsets[kMaxIndices] = {};
  for (int64_t d = p.outer - 1; d >= 0; --d) {
    const int64_t at = run % p.shape[d];
    run /= p.shape[d];
    place.out += at * p.out_strides[d];
    place.x += at * p.x_strides[d];
    for (int64_t i = 0; i < p.num_indices; ++i) offsets[i] += at * p.indices[i].strides[d];
  }
  for (int64_t i = 0; i < p.num_indices; ++i) {
    const Index& index = p.indices[i];
    const int64_t value = index.at(offsets[i]);
    place.x += (value < 0 ? value + index.size : value) * index.stride;
  }
  return place;
}

// Copies one or more elements. With a constant size, the compiler turns memcpy into a move.
inline void copy(const unsigned char* from, int64_t bytes, unsigned char* to) {
  if (bytes == 4) std::memcpy(to, from, 4);
  else if (bytes == 2) std::memcpy(to, from, 2);
  else if (bytes == 8) std::memcpy(to, from, 8);
  else std::memcpy(to, from, size_t(bytes));
}

void move_runs(const Problem& p, int64_t begin, int64_t end, bool put) {
  const int64_t bytes = p.run * p.element_bytes;
  for (int64_t run = begin; run < end; ++run) {
    const Place place = place_of(p, run);
    unsigned char *out = p.out + place.out * p.element_bytes, *x = p.x + place.x * p.element_bytes;
    if (put) copy(out, bytes, x);
    else copy(x, bytes, out);
  }
}

// Whether this is index_select along the last dimension: rows of the result are contiguous, and one index, the
// same for all rows, selects their elements from a row of x.
bool selects_columns(const Problem& p) {
  const int64_t last = p.outer - 1;
  if (p.num_indices != 1 || p.run != 1 || last < 0 || p.out_strides[last] != 1 || p.x_strides[last] != 0) return false;
  for (int64_t d = 0; d < last; ++d) {
    if (p.indices[0].strides[d] != 0) return false;
  }
  return p.indices[0].strides[last] == 1 && (p.element_bytes == 2 || p.element_bytes == 4);
}

// move_runs for selects_columns: one division per row instead of one per element and dimension.
template <class Element, class Number>
void select_columns(const Problem& p, int64_t begin, int64_t end) {
  const Index& index = p.indices[0];
  const auto* numbers = static_cast<const Number*>(index.data);
  const int64_t last = p.outer - 1, width = p.shape[last];
  while (begin < end) {
    const int64_t column = begin % width, count = std::min(width - column, end - begin);
    int64_t row = begin / width, from = 0, to = column;
    for (int64_t d = last - 1; d >= 0; --d) {
      from += row % p.shape[d] * p.x_strides[d];
      to += row % p.shape[d] * p.out_strides[d];
      row /= p.shape[d];
    }
    const auto* x = reinterpret_cast<const Element*>(p.x) + from;
    auto* out = reinterpret_cast<Element*>(p.out) + to;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t value = numbers[column + i];
      out[i] = x[(value < 0 ? value + index.size : value) * index.stride];
    }
    begin += count;
  }
}

using Move = void (*)(const Problem&, int64_t, int64_t);

Move column_move(const Problem& p) {
  const bool wide = p.indices[0].code != kI32;
  if (p.element_bytes == 2) return wide ? select_columns<uint16_t, int64_t> : select_columns<uint16_t, int32_t>;
  return wide ? select_columns<uint32_t, int64_t> : select_columns<uint32_t, int32_t>;
}

}  // namespace
}  // namespace onward::generic

// For each element of a result of `shape`: out = x[offset], where offset is the sum of the element's coordinates
// times x_strides (0 for indexed dimensions) and of each index value times its stride. With `put`, x[offset] = out,
// in order, so that the last of several values for one element stays.
// index_words: for each index its address, code (I32 or I64), the stride and the size of the dimension of x that it
// indexes, and its ndim strides. Values are in -size … size - 1; if a value is out of range, nothing is written.
ONWARD_API int32_t onward_index(int64_t ndim, const int64_t* shape, void* out, const int64_t* out_strides,
                                void* x, int64_t element_bytes, const int64_t* x_strides,
                                int64_t num_indices, const int64_t* index_words, int32_t put) {
  using namespace onward;
  using namespace onward::generic;
  if (ndim < 0 || ndim > kMaxDims || num_indices < 0 || num_indices > kMaxIndices || element_bytes < 1) {
    return kBadArgument;
  }
  Problem p{ndim, shape, static_cast<unsigned char*>(out), static_cast<unsigned char*>(x),
            out_strides, x_strides, element_bytes, num_indices, {}};
  bool empty = false;
  for (int64_t d = 0; d < ndim; ++d) {
    if (shape[d] < 0) return kBadArgument;
    empty = empty || shape[d] == 0;
  }
  if (empty) return kOk;
  for (int64_t i = 0; i < num_indices; ++i) {
    const int64_t* words = index_words + i * (4 + ndim);
    Index& index = p.indices[i];
    index = {from_word<const void*>(words[0]), int32_t(words[1]), words[2], words[3], words + 4};
    if ((index.code != kI32 && index.code != kI64) || !inside(index, ndim, shape)) return kBadArgument;
  }
  find_runs(&p);
  if (put) {
    move_runs(p, 0, p.runs, true);
  } else if (selects_columns(p)) {
    const Move move = column_move(p);
    parallel_for(p.runs, kElementsPerChunk, [&](int64_t begin, int64_t end) { move(p, begin, end); });
  } else {
    parallel_for(p.runs, ceil_div(kBytesPerChunk, p.run * element_bytes + 32),
                 [&](int64_t begin, int64_t end) { move_runs(p, begin, end, false); });
  }
  return kOk;
}
ONWARD_INSTRUCTION(onward_index);
