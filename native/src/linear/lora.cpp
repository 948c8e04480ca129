// Low-rank updates of a product, another for each row: LoRA (Hu et al., arXiv 2106.09685), with the scales of
// DoRA (Liu et al., arXiv 2402.09353).
#include <cstring>

#include "program.h"
#include "scratch.h"
#include "simd_math.h"
#include "team.h"

// One matrix of a call (LoraArguments in Python).
struct OnwardLora {
  int64_t outputs, rank, y_stride, a_stride, b_stride, out_stride;
  const void *y, *a, *b;
  const float* factors;        // of the rows of a and b, which are int8 then; null: they are of x's dtype
  const float *scale, *shift;  // both or none
  const int32_t* ranks;
  void* out;
};

namespace onward {
namespace {

constexpr int64_t kBytesPerChunk = 1 << 14;
constexpr int64_t kRanksTogether = 4;  // dot products that share one pass over x
constexpr int64_t kRowsTogether = 4;   // neighbouring rows of one slot that share one pass over a and b
constexpr int64_t kFewRows = 32;       // so few are cut singly, for the threads to share
constexpr int64_t kBlocks = 8;         // runs of 16 outputs of a row that are summed together
// Runs of 16 numbers in a cache line: to ask for a line with each run of it would cost as much as its sum.
template <class W>
constexpr int64_t kRunsOfLine = 64 / (16 * int64_t(sizeof(W)));

struct Call {
  const OnwardLora* parts;
  int64_t count, rows, tokens, inputs;
  const void* x;
  int64_t x_stride;
  const int32_t* slots;
  int64_t together = rows > kFewRows ? kRowsTogether : 1;
  int64_t groups = ceil_div(rows, together);  // of rows

  int64_t slot(int64_t row) const { return slots[row / tokens]; }
  int64_t last_row(int64_t group) const { return rows < (group + 1) * together ? rows : (group + 1) * together; }
  // The end of the rows from `row` on, `last` at most, that have its slot.
  int64_t run_end(int64_t row, int64_t last) const {
    int64_t end = row + 1;
    while (end < last && slot(end) == slot(row)) ++end;
    return end;
  }
};

// 16 numbers of a or b; zeros after the first n.
template <class W>
f32x16 weights(const W* p, int64_t n) {
  return load_first(p, n);
}
template <>
f32x16 weights(const int8_t* p, int64_t n) {
  if (n >= 16) return to_f32(load_bytes(p));
  int8_t padded[16] = {};
  std::memcpy(padded, p, size_t(n));
  return to_f32(load_bytes(padded));
}

// t[r, j] = factors[j] * sum over k of a[j, k] * x[r, k] for `ranks` neighbouring rows of a and `rows` of x. A dot
// product's order does not depend on how many are computed together. next: rows of a that will be read afterwards.
template <class T, class W, int64_t rows, int64_t ranks>
void dots(const T* x, int64_t x_stride, const W* a, const W* next, const float* factors, int64_t inputs, float* t,
          int64_t t_stride) {
  f32x16 sums[rows][ranks];
  for (auto& of_row : sums) {
    for (auto& sum : of_row) sum = zero_f32();
  }
  for (int64_t k = 0; k < inputs; k += 16) {
    const int64_t n = inputs - k;
    f32x16 v[rows];
    for (int64_t r = 0; r < rows; ++r) v[r] = load_first(x + r * x_stride + k, n);
    for (int64_t j = 0; j < ranks; ++j) {
      if (k / 16 % kRunsOfLine<W> == 0) prefetch(next + j * inputs + k);
      const f32x16 w = weights(a + j * inputs + k, n);
      for (int64_t r = 0; r < rows; ++r) sums[r][j] = fma(w, v[r], sums[r][j]);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < ranks; ++j) {
      const float sum = sum_lanes(sums[r][j]);
      t[r * t_stride + j] = factors == nullptr ? sum : sum * factors[j];
    }
  }
}

template <class T, class W, int64_t rows>
void dots_of(int64_t ranks, const T* x, int64_t x_stride, const W* a, const W* next, const float* factors,
             int64_t inputs, float* t, int64_t t_stride) {
  switch (ranks) {
    case 1: return dots<T, W, rows, 1>(x, x_stride, a, next, factors, inputs, t, t_stride);
    case 2: return dots<T, W, rows, 2>(x, x_stride, a, next, factors, inputs, t, t_stride);
    case 3: return dots<T, W, rows, 3>(x, x_stride, a, next, factors, inputs, t, t_stride);
    default: return dots<T, W, rows, kRanksTogether>(x, x_stride, a, next, factors, inputs, t, t_stride);
  }
}

// The products of rows first … last - 1 with the rows of a from j on.
template <class T, class W>
void inner(const Call& c, const OnwardLora& o, int64_t first, int64_t last, int64_t j, float* t) {
  for (int64_t row = first, end; row < last; row = end) {
    end = c.run_end(row, last);
    const int64_t s = c.slot(row), ranks = o.ranks[s] - j;
    if (ranks <= 0) continue;
    const T* x = static_cast<const T*>(c.x) + row * c.x_stride;
    const W* a = static_cast<const W*>(o.a) + s * o.a_stride + j * c.inputs;
    const float* factors = o.factors == nullptr ? nullptr : o.factors + s * o.rank + j;
    const W* next = a + kRanksTogether * c.inputs;
    if (ranks <= kRanksTogether && end < c.rows) next = static_cast<const W*>(o.a) + c.slot(end) * o.a_stride;
    float* to = t + row * o.rank + j;
    if (end - row == kRowsTogether) {
      dots_of<T, W, kRowsTogether>(ranks, x, c.x_stride, a, next, factors, c.inputs, to, o.rank);
      continue;
    }
    for (int64_t r = 0; r < end - row; ++r) {
      dots_of<T, W, 1>(ranks, x + r * c.x_stride, c.x_stride, a, next, factors, c.inputs, to + r * o.rank, o.rank);
    }
  }
}

// out = y * scale + shift + sum over j of t[j] * b[j] for `rows` neighbouring rows of slot s and the n outputs from i
// on, 16 * blocks at most. The sum over j comes first.
template <class T, class W, int64_t rows, int64_t blocks>
void add_products(const OnwardLora& o, const float* t, int64_t row, int64_t s, int64_t i, int64_t n) {
  const W* b = static_cast<const W*>(o.b) + s * o.b_stride + i;
  f32x16 sums[rows][blocks];
  for (auto& of_row : sums) {
    for (auto& sum : of_row) sum = zero_f32();
  }
  for (int64_t j = 0; j < o.ranks[s]; ++j) {
    for (int64_t c = 0; c < blocks; ++c) {
      // What the next outputs but one will read.
      if (c % kRunsOfLine<W> == 0) prefetch(b + j * o.outputs + 16 * (2 * blocks + c));
      const f32x16 w = weights(b + j * o.outputs + 16 * c, n - 16 * c);
      for (int64_t r = 0; r < rows; ++r) sums[r][c] = fma(splat(t[(row + r) * o.rank + j]), w, sums[r][c]);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const T* y = static_cast<const T*>(o.y) + (row + r) * o.y_stride + i;
    T* out = static_cast<T*>(o.out) + (row + r) * o.out_stride + i;
    for (int64_t c = 0; c < blocks; ++c) {
      const int64_t left = n - 16 * c, at = s * o.outputs + i + 16 * c;
      f32x16 base = load_first(y + 16 * c, left);
      if (o.scale != nullptr) base = fma(base, load_first(o.scale + at, left), load_first(o.shift + at, left));
      store_first(out + 16 * c, add(base, sums[r][c]), left);
    }
  }
}

template <class T, class W, int64_t rows, int64_t blocks>
void add_between(const OnwardLora& o, const float* t, int64_t row, int64_t s, int64_t first, int64_t last) {
  int64_t i = first;
  for (; last - i >= 16 * blocks; i += 16 * blocks) add_products<T, W, rows, blocks>(o, t, row, s, i, 16 * blocks);
  for (; i < last; i += 16) add_products<T, W, rows, 1>(o, t, row, s, i, last - i);
}

// The outputs first … last - 1 of the rows from `row` to `end`.
template <class T, class W>
void outer(const Call& c, const OnwardLora& o, int64_t row, int64_t end, int64_t first, int64_t last, const float* t) {
  for (int64_t next; row < end; row = next) {
    next = c.run_end(row, end);
    const int64_t s = c.slot(row);
    if (o.ranks[s] == 0) {  // the rows' own bits, the sign of a zero too
      for (int64_t r = row; r < next; ++r) {
        const T* y = static_cast<const T*>(o.y) + r * o.y_stride + first;
        T* out = static_cast<T*>(o.out) + r * o.out_stride + first;
        if (out != y) std::memmove(out, y, size_t(last - first) * sizeof(T));
      }
    } else if (next - row == kRowsTogether) {
      add_between<T, W, kRowsTogether, 2>(o, t, row, s, first, last);
    } else {
      for (int64_t r = row; r < next; ++r) add_between<T, W, 1, kBlocks>(o, t, r, s, first, last);
    }
  }
}

// Calls body(part, its first number in t, its item) for items first … last - 1 of those that `count_of` parts have.
template <class Count, class Body>
void each_item(const Call& c, int64_t first, int64_t last, Count&& count_of, Body&& body) {
  int64_t before = 0, at = 0;
  for (int64_t p = 0; p < c.count && before < last; ++p) {
    const int64_t items = count_of(c.parts[p]);
    const int64_t begin = first > before ? first - before : 0;
    for (int64_t item = begin; item < items && before + item < last; ++item) body(c.parts[p], at, item);
    before += items;
    at += c.rows * c.parts[p].rank;
  }
}

template <class T, class W>
void run(const Call& c, float* t) {
  const auto rank_groups = [](const OnwardLora& o) { return ceil_div(o.rank, kRanksTogether); };
  const auto width = [](const OnwardLora& o) {  // of outputs
    return ceil_div(kBytesPerChunk, (o.rank + 1) * int64_t(sizeof(W)) * 16 * kBlocks) * 16 * kBlocks;
  };
  const auto inner_items = [&](const OnwardLora& o) { return c.groups * rank_groups(o); };
  const auto outer_items = [&](const OnwardLora& o) { return c.groups * ceil_div(o.outputs, width(o)); };
  int64_t inner_count = 0, outer_count = 0;
  for (int64_t p = 0; p < c.count; ++p) {
    inner_count += inner_items(c.parts[p]);
    outer_count += outer_items(c.parts[p]);
  }
  const int64_t dot_bytes = kRanksTogether * c.inputs * int64_t(sizeof(W));
  parallel_for(inner_count, ceil_div(kBytesPerChunk, dot_bytes + 1), [&](int64_t begin, int64_t end) {
    each_item(c, begin, end, inner_items, [&](const OnwardLora& o, int64_t at, int64_t item) {
      const int64_t group = item / rank_groups(o), j = item % rank_groups(o) * kRanksTogether;
      inner<T, W>(c, o, group * c.together, c.last_row(group), j, t + at);
    });
  });
  parallel_for(outer_count, 1, [&](int64_t begin, int64_t end) {
    each_item(c, begin, end, outer_items, [&](const OnwardLora& o, int64_t at, int64_t item) {
      const int64_t pieces = ceil_div(o.outputs, width(o));
      const int64_t group = item / pieces, first = item % pieces * width(o);
      const int64_t last = o.outputs - first < width(o) ? o.outputs : first + width(o);
      outer<T, W>(c, o, group * c.together, c.last_row(group), first, last, t + at);
    });
  });
}

// Whether every slot and rank is there.
bool are_there(const Call& c, int64_t slots) {
  for (int64_t r = 0; r < c.rows / c.tokens; ++r) {
    const int64_t s = c.slots[r];
    if (s < 0 || s >= slots) return false;
    for (int64_t p = 0; p < c.count; ++p) {
      if (c.parts[p].ranks[s] < 0 || c.parts[p].ranks[s] > c.parts[p].rank) return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace onward

// For each of `count` matrices: out[r] = y[r] * scale[s] + shift[s] + (x[r] a[s]^T) b[s] with s = slots[r / tokens],
// over the first ranks[s] rows of a[s] and b[s]; y[r] where there are none. x [rows, inputs], y and out
// [rows, outputs], a [num_slots, rank, inputs] and b [num_slots, rank, outputs] are of one dtype; or a and b are
// int8 in all matrices, and factors [num_slots, rank] are the products of the scales of their rows. scale and shift
// are float [num_slots, outputs]. Rows, and the slots of a and b, are `…_stride` elements apart; out may be y with
// its stride. Nothing is written if a slot is not in 0 … num_slots - 1, or its rank not in 0 … rank.
ONWARD_API int32_t onward_lora(const OnwardLora* parts, int64_t count, int64_t rows, int64_t tokens,
                               int64_t inputs, int64_t num_slots, int32_t dtype, const void* x,
                               int64_t x_stride, const int32_t* slots) {
  using namespace onward;
  if (count < 1 || rows < 0 || tokens <= 0 || rows % tokens || inputs < 0) return kBadArgument;
  int64_t numbers = 1;
  for (int64_t p = 0; p < count; ++p) {
    if (parts[p].rank <= 0 || parts[p].outputs < 0) return kBadArgument;
    if ((parts[p].scale == nullptr) != (parts[p].shift == nullptr)) return kBadArgument;
    if ((parts[p].factors == nullptr) != (parts[0].factors == nullptr)) return kBadArgument;
    numbers += rows * parts[p].rank;
  }
  const Call call{parts, count, rows, tokens, inputs, x, x_stride, slots};
  if (!are_there(call, num_slots)) return kBadArgument;
  auto* t = static_cast<float*>(scratch(kScratchActivations, numbers * int64_t(sizeof(float))));
  if (t == nullptr) return kOutOfMemory;
  const bool known = with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parts[0].factors == nullptr ? run<T, T>(call, t) : run<T, int8_t>(call, t);
  });
  return known ? kOk : kBadArgument;
}
ONWARD_INSTRUCTION(onward_lora);
