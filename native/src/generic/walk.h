// Walks over the elements of strided tensors of one shape, in blocks. Operations see each block as a contiguous
// array of their compute type.
//
// Reader and Writer hide strides and types: a block that is contiguous in memory and has the right type is read
// in place; any other block is gathered and converted into a buffer. So an operation is written once, as a loop
// over arrays, and works for all types and strides at reasonable speed.
#pragma once
#include <cstring>

#include "../team.h"
#include "elements.h"

namespace onward::generic {

constexpr int64_t kMaxDims = 8;
constexpr int64_t kMaxOperands = 4;
constexpr int64_t kBlock = 512;    // elements
constexpr int64_t kLongRow = 64;   // a block never joins rows of this length or more

struct Operand {
  const void* data;
  int32_t code;
  const int64_t* strides;  // in elements; 0 broadcasts
};

// The dimensions that all operands share. Adjacent dimensions are joined if the strides allow it. Elements are
// numbered in row-major order of the resulting dimensions.
struct Walk {
  int64_t ndim = 0, count = 1, operands = 0;
  int64_t shape[kMaxDims];
  int64_t strides[kMaxOperands][kMaxDims];

  int64_t row() const { return shape[ndim - 1]; }

  // Divides elements begin … end - 1 of an operand into pieces within one row, and calls body(offset of the
  // first element, elements) for each.
  template <class Body>
  void for_pieces(int64_t operand, int64_t begin, int64_t end, Body&& body) const {
    const int64_t* step = strides[operand];
    int64_t at[kMaxDims], offset = 0, rest = begin;
    for (int64_t d = ndim - 1; d > 0; --d) {
      at[d] = rest % shape[d];
      rest /= shape[d];
      offset += at[d] * step[d];
    }
    at[0] = rest;
    offset += rest * step[0];
    const int64_t last = ndim - 1;
    for (;;) {
      const int64_t left = shape[last] - at[last];
      const int64_t n = left < end - begin ? left : end - begin;
      body(offset, n);
      begin += n;
      if (begin >= end) return;
      offset -= at[last] * step[last];
      at[last] = 0;
      for (int64_t d = last - 1; d >= 0; --d) {
        offset += step[d];
        if (++at[d] < shape[d]) break;
        offset -= step[d] * shape[d];
        at[d] = 0;
      }
    }
  }

  // Calls body(first, count) for each block of elements begin … end - 1.
  template <class Body>
  void for_blocks(int64_t begin, int64_t end, Body&& body) const {
    const bool apart = ndim > 1 && row() >= kLongRow;
    int64_t left = apart ? row() - begin % row() : end - begin;
    while (begin < end) {
      if (left == 0) left = row();
      int64_t n = end - begin < kBlock ? end - begin : kBlock;
      if (apart && left < n) n = left;
      body(begin, n);
      begin += n;
      left -= n;
    }
  }
};

enum Order { kAnyOrder, kRowMajor };

// Returns false if the arguments are invalid. kAnyOrder allows reordering the dimensions, so that the last
// operand (the output) is visited in memory order.
template <int N>
bool make_walk(Order order, int64_t ndim, const int64_t* shape, const Operand (&operands)[N],
               Walk* walk) {
  static_assert(N <= kMaxOperands);
  if (ndim < 0 || ndim > kMaxDims) return false;
  for (const Operand& o : operands) {
    if (!known(o.code)) return false;
  }
  int64_t kept[kMaxDims], n = 0;
  walk->operands = N;
  for (int64_t d = 0; d < ndim; ++d) {
    if (shape[d] < 0) return false;
    walk->count *= shape[d];
    if (shape[d] != 1) kept[n++] = d;
  }
  const int64_t* out = operands[N - 1].strides;
  if (order == kAnyOrder) {
    for (int64_t i = 1; i < n; ++i) {
      for (int64_t j = i; j > 0 && out[kept[j]] > out[kept[j - 1]]; --j) {
        const int64_t other = kept[j];
        kept[j] = kept[j - 1];
        kept[j - 1] = other;
      }
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t d = kept[i];
    bool joins = walk->ndim > 0;
    for (int o = 0; joins && o < N; ++o) {
      joins = walk->strides[o][walk->ndim - 1] == operands[o].strides[d] * shape[d];
    }
    const int64_t to = joins ? walk->ndim - 1 : walk->ndim++;
    walk->shape[to] = joins ? walk->shape[to] * shape[d] : shape[d];
    for (int o = 0; o < N; ++o) walk->strides[o][to] = operands[o].strides[d];
  }
  if (walk->ndim == 0) {  // one element
    walk->ndim = walk->shape[0] = 1;
    for (int o = 0; o < N; ++o) walk->strides[o][0] = 1;
  }
  return true;
}

// Copies a strided piece to or from contiguous memory.
template <class Word>
inline void gather(const void* from, int64_t stride, int64_t count, void* to) {
  constexpr int64_t kBytes = sizeof(Word);
  const auto* source = static_cast<const unsigned char*>(from);
  auto* target = static_cast<unsigned char*>(to);
  if (stride == 1) {
    std::memcpy(to, from, size_t(count * kBytes));
  } else {
    for (int64_t i = 0; i < count; ++i) std::memcpy(target + i * kBytes, source + i * stride * kBytes, kBytes);
  }
}
template <class Word>
inline void scatter(const void* from, int64_t stride, int64_t count, void* to) {
  constexpr int64_t kBytes = sizeof(Word);
  const auto* source = static_cast<const unsigned char*>(from);
  auto* target = static_cast<unsigned char*>(to);
  if (stride == 1) {
    std::memcpy(to, from, size_t(count * kBytes));
  } else {
    for (int64_t i = 0; i < count; ++i) std::memcpy(target + i * stride * kBytes, source + i * kBytes, kBytes);
  }
}

// Calls body with a null pointer to an unsigned integer of this size.
template <class Body>
inline void with_word(int64_t bytes, Body&& body) {
  switch (bytes) {
    case 1: return body(static_cast<uint8_t*>(nullptr));
    case 2: return body(static_cast<uint16_t*>(nullptr));
    case 4: return body(static_cast<uint32_t*>(nullptr));
    default: return body(static_cast<uint64_t*>(nullptr));
  }
}

// One thread's view of an input: its blocks as contiguous elements of type `as`. A block may not be read past its
// end, and is valid until the next block is read.
class Reader {
 public:
  Reader(const Walk& walk, int64_t operand, const Operand& o, int32_t as)
      : walk_(walk), operand_(operand), data_(static_cast<const unsigned char*>(o.data)),
        bytes_(element_bytes(o.code)), as_bytes_(element_bytes(as)),
        convert_(as == o.code ? nullptr : converter(o.code, as)) {
    constant_ = true;
    for (int64_t d = 0; d < walk.ndim; ++d) constant_ = constant_ && walk.strides[operand][d] == 0;
  }

  const void* read(int64_t begin, int64_t count) {
    if (constant_) return filled();
    const void* source = raw_;
    const int64_t stride = walk_.strides[operand_][walk_.ndim - 1];
    if (walk_.ndim == 1 && stride == 1) {
      source = data_ + begin * bytes_;
    } else {
      int64_t done = 0;
      walk_.for_pieces(operand_, begin, begin + count, [&](int64_t offset, int64_t n) {
        const unsigned char* piece = data_ + offset * bytes_;
        if (n == count && stride == 1) {
          source = piece;
        } else {
          with_word(bytes_, [&](auto* word) {
            gather<std::remove_pointer_t<decltype(word)>>(piece, stride, n, raw_ + done * bytes_);
          });
          done += n;
        }
      });
    }
    if (convert_ == nullptr) return source;
    convert_(source, count, converted_);
    return converted_;
  }

  template <class T>
  const T* read(int64_t begin, int64_t count) {
    return static_cast<const T*>(read(begin, count));
  }

 private:
  const void* filled() {
    if (!full_) {
      full_ = true;
      unsigned char one[8];
      if (convert_ != nullptr) convert_(data_, 1, one);
      else std::memcpy(one, data_, size_t(bytes_));
      with_word(as_bytes_, [&](auto* word) {
        gather<std::remove_pointer_t<decltype(word)>>(one, 0, kBlock, converted_);
      });
    }
    return converted_;
  }

  const Walk& walk_;
  int64_t operand_;
  const unsigned char* data_;
  int64_t bytes_, as_bytes_;
  Convert convert_;
  bool constant_, full_ = false;
  alignas(64) unsigned char raw_[kBlock * 8];
  alignas(64) unsigned char converted_[kBlock * 8];
};

// One thread's view of an output: write() stores a block of contiguous elements of type `as`.
class Writer {
 public:
  Writer(const Walk& walk, int64_t operand, const Operand& o, int32_t as)
      : walk_(walk), operand_(operand),
        data_(static_cast<unsigned char*>(const_cast<void*>(o.data))), bytes_(element_bytes(o.code)),
        convert_(converter(as, o.code)), same_(as == o.code) {}

  void write(int64_t begin, int64_t count, const void* block) {
    const int64_t stride = walk_.strides[operand_][walk_.ndim - 1];
    if (walk_.ndim == 1 && stride == 1) return convert_(block, count, data_ + begin * bytes_);
    const unsigned char* source = static_cast<const unsigned char*>(block);
    int64_t done = 0;
    walk_.for_pieces(operand_, begin, begin + count, [&](int64_t offset, int64_t n) {
      unsigned char* piece = data_ + offset * bytes_;
      if (n == count && stride == 1) return convert_(block, count, piece);
      if (done == 0 && !same_) {
        convert_(block, count, raw_);
        source = raw_;
      }
      with_word(bytes_, [&](auto* word) {
        scatter<std::remove_pointer_t<decltype(word)>>(source + done * bytes_, stride, n, piece);
      });
      done += n;
    });
  }

 private:
  const Walk& walk_;
  int64_t operand_;
  unsigned char* data_;
  int64_t bytes_;
  Convert convert_;
  bool same_;
  alignas(64) unsigned char raw_[kBlock * 8];
};

}  // namespace onward::generic
