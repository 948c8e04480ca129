// Low-rank updates of a product, another for each row: LoRA (Hu et al., arXiv 2106.09685), with the scales of
// DoRA (Liu et al., arXiv 2402.09353).
#include <cstring>

#include "program.h"
#include "scratch.h"
#include "simd_math.h"
#include "team.h"

namespace onward {
namespace {

constexpr int64_t kBytesPerChunk = 1 << 14;
constexpr int64_t kRanksTogether = 4;  // dot products that share one pass over x

// t[j] = sum over k of a[j, k] * x[k] for `ranks` neighbouring rows of a. A dot product's order does not
// depend on how many are computed together.
template <class T, int64_t ranks>
void dots(const T* x, const T* a, int64_t inputs, float* t) {
  f32x16 sums[ranks];
  for (auto& sum : sums) sum = zero_f32();
  for (int64_t k = 0; k < inputs; k += 16) {
    const int64_t n = inputs - k;
    const f32x16 v = load_first(x + k, n);
    for (int64_t j = 0; j < ranks; ++j) sums[j] = fma(load_first(a + j * inputs + k, n), v, sums[j]);
  }
  for (int64_t j = 0; j < ranks; ++j) t[j] = sum_lanes(sums[j]);
}

// out = y * scale + sum over j of t[j] * b[j] + bias, for outputs first … last - 1.
template <class T>
void add_products(const float* t, const T* b, int64_t rank, int64_t outputs, const float* scale,
                  const T* bias, const T* y, int64_t first, int64_t last, T* out) {
  for (int64_t i = first; i < last; i += 16) {
    const int64_t n = last - i;
    f32x16 sum = zero_f32();
    for (int64_t j = 0; j < rank; ++j) {
      sum = fma(splat(t[j]), load_first(b + j * outputs + i, n), sum);
    }
    f32x16 base = load_first(y + i, n);
    if (scale != nullptr) base = mul(base, load_first(scale + i, n));
    base = add(base, sum);
    if (bias != nullptr) base = add(base, load_first(bias + i, n));
    store_first(out + i, base, n);
  }
}

struct Lora {
  int64_t rows, tokens, inputs, outputs, rank, count;
  const void *x, *y, *a, *b;
  const float* scale;
  const void* bias;
  const int32_t* slots;
  void* out;
  int64_t x_stride, y_stride, out_stride;
};

template <class T>
void run(const Lora& o, float* t) {
  const auto slot = [&](int64_t row) -> int64_t { return o.slots[row / o.tokens]; };
  const int64_t groups = ceil_div(o.rank, kRanksTogether);
  const int64_t dot_bytes = kRanksTogether * o.inputs * int64_t(sizeof(T));
  parallel_for(o.rows * groups, ceil_div(kBytesPerChunk, dot_bytes + 1),
               [&](int64_t begin, int64_t end) {
                 for (int64_t item = begin; item < end; ++item) {
                   const int64_t row = item / groups, j = item % groups * kRanksTogether;
                   if (slot(row) == 0) continue;
                   const T* x = static_cast<const T*>(o.x) + row * o.x_stride;
                   const T* a = static_cast<const T*>(o.a) + (slot(row) * o.rank + j) * o.inputs;
                   float* to = t + row * o.rank + j;
                   switch (o.rank - j) {
                     case 1: dots<T, 1>(x, a, o.inputs, to); break;
                     case 2: dots<T, 2>(x, a, o.inputs, to); break;
                     case 3: dots<T, 3>(x, a, o.inputs, to); break;
                     default: dots<T, kRanksTogether>(x, a, o.inputs, to);
                   }
                 }
               });
  const int64_t width = ceil_div(kBytesPerChunk, (o.rank + 1) * int64_t(sizeof(T)) * 16) * 16;
  const int64_t pieces = ceil_div(o.outputs, width);
  parallel_for(o.rows * pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / pieces, first = item % pieces * width;
      const int64_t last = o.outputs - first < width ? o.outputs : first + width;
      const T* y = static_cast<const T*>(o.y) + row * o.y_stride;
      T* out = static_cast<T*>(o.out) + row * o.out_stride;
      const int64_t s = slot(row);
      const T* bias = static_cast<const T*>(o.bias);
      if (s == 0 && bias == nullptr) {  // the row's own bits, the sign of a zero too
        std::memmove(out + first, y + first, size_t(last - first) * sizeof(T));
        continue;
      }
      const T* b = static_cast<const T*>(o.b) + s * o.rank * o.outputs;
      const float* scale = o.scale == nullptr ? nullptr : o.scale + s * o.outputs;
      add_products(t + row * o.rank, b, s == 0 ? 0 : o.rank, o.outputs, s == 0 ? nullptr : scale, bias, y,
                   first, last, out);
    }
  });
}

}  // namespace
}  // namespace onward

// out[r] = y[r] * scale[s] + (x[r] a[s]^T) b[s] + bias with s = slots[r / tokens]; y[r] + bias where s is 0.
// x [rows, inputs], y and out [rows, outputs], a [count, rank, inputs], b [count, rank, outputs], bias
// [outputs] or null are of one dtype; scale, or null, is float [count, outputs]. Rows are `…_stride` elements
// apart; out may be y with its stride. Nothing is written if a slot is not in 0 … count - 1.
ONWARD_API int32_t onward_lora(int64_t rows, int64_t tokens, int64_t inputs, int64_t outputs, int64_t rank,
                               int64_t count, int32_t dtype, const void* x, int64_t x_stride,
                               const void* y, int64_t y_stride, const void* a, const void* b,
                               const float* scale, const void* bias, const int32_t* slots, void* out,
                               int64_t out_stride) {
  using namespace onward;
  if (rows < 0 || tokens <= 0 || rows % tokens || inputs < 0 || outputs < 0 || rank <= 0) {
    return kBadArgument;
  }
  for (int64_t r = 0; r < rows / tokens; ++r) {
    if (slots[r] < 0 || slots[r] >= count) return kBadArgument;
  }
  auto* t = static_cast<float*>(scratch(kScratchActivations, rows * rank * int64_t(sizeof(float)) + 1));
  if (t == nullptr) return kOutOfMemory;
  const Lora o{rows, tokens, inputs, outputs, rank,  count,    x,        y,         a,
               b,    scale,  bias,   slots,   out,   x_stride, y_stride, out_stride};
  const bool known = with_dtype(dtype, [&](auto* tag) { run<std::remove_pointer_t<decltype(tag)>>(o, t); });
  return known ? kOk : kBadArgument;
}
ONWARD_INSTRUCTION(onward_lora);
