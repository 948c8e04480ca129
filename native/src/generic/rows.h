// Rows of operations along some dimensions (inner), for every index of the other dimensions (outer).
#pragma once
#include "walk.h"

namespace onward::generic {

struct Rows {
  Walk outer, inner;
  Operand x, out;

  int64_t rows() const { return outer.count; }
  int64_t count() const { return inner.count; }

  // The beginning of a row of an operand (0: x, 1: out).
  Operand at(int64_t operand, int64_t row) const {
    Operand o = operand == 0 ? x : out;
    outer.for_pieces(operand, row, row + 1, [&](int64_t offset, int64_t) {
      o.data = static_cast<const unsigned char*>(o.data) + offset * element_bytes(o.code);
    });
    return o;
  }

  // Calls body(row) for all rows, in parallel if there is enough work.
  template <class Body>
  void for_all(int64_t elements_per_chunk, Body&& body) const {
    parallel_for(rows(), ceil_div(elements_per_chunk, count() + 1), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) body(row);
    });
  }
};

// Calls body with a value of the type that `compute` (F32, F64 or I64) names.
template <class Body>
inline void with_compute(int32_t compute, Body&& body) {
  switch (compute) {
    case kF32: return body(float{});
    case kF64: return body(double{});
    default: return body(int64_t{});
  }
}

template <class C>
inline void store_value(C value, int32_t compute, const Operand& to) {
  converter(compute, to.code)(&value, 1, const_cast<void*>(to.data));
}

}  // namespace onward::generic
