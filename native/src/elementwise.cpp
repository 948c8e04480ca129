// Gated activations and the residual sum: one pass over rows, float32 inside, one rounding at the end.
#include "program.h"
#include "simd_math.h"
#include "team.h"

namespace onward {
namespace {

constexpr int64_t kElementsPerChunk = 1 << 14;

struct Swish {
  static f32x16 apply(f32x16 x) { return times_sigmoid(x, x); }
};
struct Gelu {
  static f32x16 apply(f32x16 x) { return mul(x, normal_cdf(x)); }
};
struct GeluTanh {
  static f32x16 apply(f32x16 x) { return gelu_tanh(x); }
};

template <class Activation>
struct Gated {
  static f32x16 apply(f32x16 gate, f32x16 up) { return mul(Activation::apply(gate), up); }
};
struct SigmoidGate {
  static f32x16 apply(f32x16 gate, f32x16 x) { return times_sigmoid(x, gate); }
};
struct Sum {
  static f32x16 apply(f32x16 a, f32x16 b) { return add(a, b); }
};

struct Operands {
  int64_t rows, columns;
  const void *a, *b;
  void* out;
  int64_t a_stride, b_stride, out_stride;
};

// out[r, c] = F(a[r, c], b[r, c]). Chunks are ranges of elements and not of rows, so that one long row is
// divided too. They begin at multiples of 16, but an element's bits don't depend on its lane anyway.
template <class F>
int32_t combine(const Operands& o, int32_t dtype) {
  if (o.rows < 0 || o.columns < 0) return kBadArgument;
  const int64_t pieces = ceil_div(o.columns, kElementsPerChunk);
  const int64_t grain = ceil_div(kElementsPerChunk, o.columns + 1);
  const bool known = with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(o.rows * pieces, grain, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t row = item / pieces, first = item % pieces * kElementsPerChunk;
        const int64_t left = o.columns - first;
        const int64_t count = left < kElementsPerChunk ? left : kElementsPerChunk;
        const T* a = static_cast<const T*>(o.a) + row * o.a_stride + first;
        const T* b = static_cast<const T*>(o.b) + row * o.b_stride + first;
        T* out = static_cast<T*>(o.out) + row * o.out_stride + first;
        for (int64_t c = 0; c < count; c += 16) {
          const int64_t n = count - c;
          store_first(out + c, F::apply(load_first(a + c, n), load_first(b + c, n)), n);
        }
      }
    });
  });
  return known ? kOk : kBadArgument;
}

}  // namespace
}  // namespace onward

// All operands are [rows, columns] of one dtype, with rows `…_stride` elements apart and contiguous columns.
// out may be one of the inputs, with the same stride.

// out = silu(gate) * up.
ONWARD_API int32_t onward_swiglu(int64_t rows, int64_t columns, int32_t dtype, const void* gate,
                                 int64_t gate_stride, const void* up, int64_t up_stride, void* out,
                                 int64_t out_stride) {
  using namespace onward;
  return combine<Gated<Swish>>({rows, columns, gate, up, out, gate_stride, up_stride, out_stride},
                               dtype);
}
ONWARD_INSTRUCTION(onward_swiglu);

// out = gelu(gate) * up. gelu is the tanh form if `approximate` is not 0, else the exact form.
ONWARD_API int32_t onward_geglu(int64_t rows, int64_t columns, int32_t dtype, int32_t approximate,
                                const void* gate, int64_t gate_stride, const void* up,
                                int64_t up_stride, void* out, int64_t out_stride) {
  using namespace onward;
  const Operands o{rows, columns, gate, up, out, gate_stride, up_stride, out_stride};
  return approximate ? combine<Gated<GeluTanh>>(o, dtype) : combine<Gated<Gelu>>(o, dtype);
}
ONWARD_INSTRUCTION(onward_geglu);

// out = sigmoid(gate) * x.
ONWARD_API int32_t onward_sigmoid_gate(int64_t rows, int64_t columns, int32_t dtype,
                                       const void* gate, int64_t gate_stride, const void* x,
                                       int64_t x_stride, void* out, int64_t out_stride) {
  using namespace onward;
  return combine<SigmoidGate>({rows, columns, gate, x, out, gate_stride, x_stride, out_stride},
                              dtype);
}
ONWARD_INSTRUCTION(onward_sigmoid_gate);

// out = a + b.
ONWARD_API int32_t onward_add(int64_t rows, int64_t columns, int32_t dtype, const void* a,
                              int64_t a_stride, const void* b, int64_t b_stride, void* out,
                              int64_t out_stride) {
  using namespace onward;
  return combine<Sum>({rows, columns, a, b, out, a_stride, b_stride, out_stride}, dtype);
}
ONWARD_INSTRUCTION(onward_add);
