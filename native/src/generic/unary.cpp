// One-operand operations and casts of strided tensors of any types.
#include <cmath>

#include "../program.h"
#include "double_math.h"
#include "../sine.h"
#include "walk.h"

namespace onward::generic {
namespace {

enum Unary : int32_t {
  kCopy, kNeg, kAbs, kExp, kLog, kSqrt, kRsqrt, kReciprocal, kSin, kCos, kTanh, kSigmoid, kSilu, kRelu,
  kGelu, kGeluTanh, kSquare, kErf, kLogicalNot, kBitwiseNot, kFloor, kCeil, kSign, kLog1p = 24,
  kExpm1, kExp2, kIsNan, kIsInf, kUnaries
};

template <class C>
using Block = void (*)(const C* x, int64_t count, C* out);

// A loop that the compiler vectorizes.
template <class C, class F>
inline void each(const C* __restrict x, int64_t count, C* __restrict out, F&& f) {
  for (int64_t i = 0; i < count; ++i) out[i] = f(x[i]);
}

// Float operations that are exact or correctly rounded in float32, and the same operations in double.
template <class C>
Block<C> exact_operation(int32_t op) {
  switch (op) {
    case kNeg: return [](const C* x, int64_t n, C* o) { each(x, n, o, [](C a) { return -a; }); };
    case kAbs: return [](const C* x, int64_t n, C* o) { each(x, n, o, [](C a) { return std::fabs(a); }); };
    case kSqrt: return [](const C* x, int64_t n, C* o) { each(x, n, o, [](C a) { return std::sqrt(a); }); };
    case kReciprocal: return [](const C* x, int64_t n, C* o) { each(x, n, o, [](C a) { return C(1) / a; }); };
    case kRelu: return [](const C* x, int64_t n, C* o) { each(x, n, o, [](C a) { return a < 0 ? C(0) : a; }); };
    case kSquare: return [](const C* x, int64_t n, C* o) { each(x, n, o, [](C a) { return a * a; }); };
    case kLogicalNot: return [](const C* x, int64_t n, C* o) { each(x, n, o, [](C a) { return C(a == 0); }); };
    case kFloor: return [](const C* x, int64_t n, C* o) { each(x, n, o, [](C a) { return std::floor(a); }); };
    case kCeil: return [](const C* x, int64_t n, C* o) { each(x, n, o, [](C a) { return std::ceil(a); }); };
    case kSign:
      return [](const C* x, int64_t n, C* o) { each(x, n, o, [](C a) { return C(a > 0) - C(a < 0); }); };
    case kIsNan: return [](const C* x, int64_t n, C* o) { each(x, n, o, [](C a) { return C(a != a); }); };
    case kIsInf:
      return [](const C* x, int64_t n, C* o) {
        each(x, n, o, [](C a) { return C(std::fabs(a) == C(__builtin_inf())); });
      };
    default: return nullptr;
  }
}

// A function computed in double and rounded to float.
template <double (*F)(double)>
void rounded(const float* x, int64_t count, float* out) {
  each(x, count, out, [](float a) { return float(F(double(a))); });
}

ONWARD_INLINE double rsqrt(double x) { return 1.0 / std::sqrt(x); }
ONWARD_INLINE double silu(double x) { return x * sigmoid(x); }
ONWARD_INLINE double gelu(double x) { return x * normal_cdf(x); }
ONWARD_INLINE double exp2(double x) {
  x = limited(x, 1000.0);
  const double n = nearest(x);
  return power_of_two(n) * exp((x - n) * 0x1.62e42fefa39efp-1);
}

// Beyond 2^31 the argument reduction of sine.h is not accurate, but that of the C library is.
template <bool SINE>
void turn(const float* x, int64_t count, float* out) {
  bool far = false;
  for (int64_t i = 0; i < count; ++i) far |= !(std::fabs(x[i]) <= 0x1p31f);
  if (far) {
    for (int64_t i = 0; i < count; ++i) out[i] = float(SINE ? std::sin(double(x[i])) : std::cos(double(x[i])));
    return;
  }
  each(x, count, out, [](float a) {
    const Turn turned = sine_and_cosine(double(a));
    return float(SINE ? turned.sin : turned.cos);
  });
}

Block<float> float_operation(int32_t op) {
  switch (op) {
    case kExp: return rounded<exp>;
    case kLog: return rounded<log>;
    case kRsqrt: return rounded<rsqrt>;
    case kSin: return turn<true>;
    case kCos: return turn<false>;
    case kTanh: return rounded<tanh>;
    case kSigmoid: return rounded<sigmoid>;
    case kSilu: return rounded<silu>;
    case kGelu: return rounded<gelu>;
    case kGeluTanh: return rounded<gelu_tanh>;
    case kErf: return rounded<erf>;
    case kLog1p: return rounded<log1p>;
    case kExpm1: return rounded<expm1>;
    case kExp2: return rounded<exp2>;
    default: return exact_operation<float>(op);
  }
}

// Doubles use the functions of the C library, whose errors are below one unit in the last place.
#define ONWARD_DOUBLE(expression) \
  [](const double* x, int64_t n, double* o) { each(x, n, o, [](double a) { return expression; }); }

Block<double> double_operation(int32_t op) {
  switch (op) {
    case kExp: return ONWARD_DOUBLE(std::exp(a));
    case kLog: return ONWARD_DOUBLE(std::log(a));
    case kRsqrt: return ONWARD_DOUBLE(1.0 / std::sqrt(a));
    case kSin: return ONWARD_DOUBLE(std::sin(a));
    case kCos: return ONWARD_DOUBLE(std::cos(a));
    case kTanh: return ONWARD_DOUBLE(std::tanh(a));
    case kSigmoid: return ONWARD_DOUBLE(1.0 / (1.0 + std::exp(-a)));
    case kSilu: return ONWARD_DOUBLE(a / (1.0 + std::exp(-a)));
    case kGelu: return ONWARD_DOUBLE(0.5 * a * std::erfc(-a * 0x1.6a09e667f3bcdp-1));
    case kGeluTanh:
      return ONWARD_DOUBLE(a / (1.0 + std::exp(-1.5957691216057308 * (a + 0.044715 * a * a * a))));
    case kErf: return ONWARD_DOUBLE(std::erf(a));
    case kLog1p: return ONWARD_DOUBLE(std::log1p(a));
    case kExpm1: return ONWARD_DOUBLE(std::expm1(a));
    case kExp2: return ONWARD_DOUBLE(std::exp2(a));
    default: return exact_operation<double>(op);
  }
}

#undef ONWARD_DOUBLE

using Int = int64_t;

// Null for operations whose result is a float. Overflow wraps.
Block<Int> integer_operation(int32_t op) {
  switch (op) {
    case kNeg: return [](const Int* x, Int n, Int* o) { each(x, n, o, [](Int a) { return Int(-uint64_t(a)); }); };
    case kAbs:
      return [](const Int* x, Int n, Int* o) {
        each(x, n, o, [](Int a) { return a < 0 ? Int(-uint64_t(a)) : a; });
      };
    case kRelu: return [](const Int* x, Int n, Int* o) { each(x, n, o, [](Int a) { return a < 0 ? 0 : a; }); };
    case kSquare:
      return [](const Int* x, Int n, Int* o) {
        each(x, n, o, [](Int a) { return Int(uint64_t(a) * uint64_t(a)); });
      };
    case kLogicalNot: return [](const Int* x, Int n, Int* o) { each(x, n, o, [](Int a) { return Int(a == 0); }); };
    case kBitwiseNot: return [](const Int* x, Int n, Int* o) { each(x, n, o, [](Int a) { return ~a; }); };
    case kFloor:
    case kCeil: return [](const Int* x, Int n, Int* o) { each(x, n, o, [](Int a) { return a; }); };
    case kSign:
      return [](const Int* x, Int n, Int* o) { each(x, n, o, [](Int a) { return Int(a > 0) - Int(a < 0); }); };
    case kIsNan:
    case kIsInf: return [](const Int* x, Int n, Int* o) { each(x, n, o, [](Int) { return Int(0); }); };
    default: return nullptr;
  }
}

constexpr int64_t kCheapGrain = 1 << 15, kDearGrain = 1 << 12;

template <class C>
void run(const Walk& walk, const Operand& x, const Operand& out, int32_t compute, Block<C> block,
         int64_t grain) {
  parallel_for(walk.count, grain, [&](int64_t begin, int64_t end) {
    Reader reader(walk, 0, x, compute);
    Writer writer(walk, 1, out, compute);
    alignas(64) C result[kBlock];
    walk.for_blocks(begin, end, [&](int64_t at, int64_t count) {
      block(reader.read<C>(at, count), count, result);
      writer.write(at, count, result);
    });
  });
}

// Converts between any two types; elements of equal types are copied bit for bit.
void copy(const Walk& walk, const Operand& x, const Operand& out) {
  parallel_for(walk.count, kCheapGrain, [&](int64_t begin, int64_t end) {
    Reader reader(walk, 0, x, x.code);
    Writer writer(walk, 1, out, x.code);
    walk.for_blocks(begin, end,
                    [&](int64_t at, int64_t count) { writer.write(at, count, reader.read(at, count)); });
  });
}

}  // namespace
}  // namespace onward::generic

// out = op(x). Floats are computed in float32 (f64 in double) and rounded once. Functions of integers other than
// arithmetic are computed as floats. out may be x. No operation uses `parameter`.
ONWARD_API int32_t onward_unary(int32_t op, int64_t ndim, const int64_t* shape, const void* x,
                                int32_t x_dtype, const int64_t* x_strides, void* out,
                                int32_t out_dtype, const int64_t* out_strides, double parameter) {
  using namespace onward;
  using namespace onward::generic;
  (void)parameter;
  const Operand from{x, x_dtype, x_strides}, to{out, out_dtype, out_strides};
  Walk walk;
  if (op < 0 || op >= kUnaries || !make_walk(kAnyOrder, ndim, shape, {from, to}, &walk)) {
    return kBadArgument;
  }
  if (x_dtype == kBool && op == kBitwiseNot) op = kLogicalNot;
  if (op == kCopy) {
    copy(walk, from, to);
    return kOk;
  }
  const Block<int64_t> integer = is_float(x_dtype) ? nullptr : integer_operation(op);
  const bool cheap = integer != nullptr || exact_operation<float>(op) != nullptr;
  const int64_t grain = cheap ? kCheapGrain : kDearGrain;
  if (integer != nullptr) {
    run(walk, from, to, kI64, integer, grain);
  } else if (x_dtype == kF64 || out_dtype == kF64) {
    const Block<double> block = double_operation(op);
    if (block == nullptr) return kBadArgument;
    run(walk, from, to, kF64, block, grain);
  } else {
    const Block<float> block = float_operation(op);
    if (block == nullptr) return kBadArgument;
    run(walk, from, to, kF32, block, grain);
  }
  return kOk;
}
ONWARD_INSTRUCTION(onward_unary);
