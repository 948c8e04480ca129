// Elementary functions in double arithmetic, for results in float32. Their relative errors are below 1e-10,
// so that the result is the nearest float or, once in thousands, its neighbor.
//
// They use only arithmetic and selections, so that the compiler vectorizes loops over them.
#pragma once
#include <cstdint>
#include <cstring>

namespace onward::generic {

// A function that isn't inlined keeps the compiler from vectorizing a loop.
#define ONWARD_INLINE inline __attribute__((always_inline))

constexpr double kRounder = 0x1.8p52;  // adding it leaves no bits for a fraction

ONWARD_INLINE double nearest(double a) { return (a + kRounder) - kRounder; }

ONWARD_INLINE uint64_t bits_of(double a) {
  uint64_t bits;
  std::memcpy(&bits, &a, sizeof bits);
  return bits;
}
ONWARD_INLINE double double_of(uint64_t bits) {
  double a;
  std::memcpy(&a, &bits, sizeof a);
  return a;
}

// condition ? a : b, by bit operations, because compilers may turn ?: into a branch, which can't be vectorized.
ONWARD_INLINE double choose(bool condition, double a, double b) {
  const uint64_t mask = -uint64_t(condition);
  return double_of((bits_of(a) & mask) | (bits_of(b) & ~mask));
}
ONWARD_INLINE double magnitude(double x) { return double_of(bits_of(x) & 0x7fffffffffffffff); }
ONWARD_INLINE double with_sign(double a, double x) { return double_of(bits_of(a) | (bits_of(x) & 0x8000000000000000)); }
// NaN stays NaN.
ONWARD_INLINE double limited(double x, double limit) {
  return choose(magnitude(x) > limit, with_sign(limit, x), x);
}

// 2^n for an integer n in -1022 … 1023: the last bits of the sum are the biased exponent.
ONWARD_INLINE double power_of_two(double n) { return double_of(bits_of(n + (kRounder + 1023)) << 52); }

// e^x - 1 = scale * minus_one + (scale - 1) and e^x = scale * (1 + minus_one), with scale a power of two. x is
// limited to the range beyond which a float result is 0 or infinity. If x is NaN, minus_one is NaN.
struct Exponential {
  double scale, minus_one;
};
ONWARD_INLINE Exponential exponential(double x) {
  x = limited(x, 700.0);
  const double n = nearest(x * 0x1.71547652b82fep+0);
  const double f = (x - n * 0x1.62e42fefap-1) - n * 0x1.cf79abc9e3b3ap-40;
  double sum = 1.0 / 3628800;
  sum = sum * f + 1.0 / 362880;
  sum = sum * f + 1.0 / 40320;
  sum = sum * f + 1.0 / 5040;
  sum = sum * f + 1.0 / 720;
  sum = sum * f + 1.0 / 120;
  sum = sum * f + 1.0 / 24;
  sum = sum * f + 1.0 / 6;
  sum = sum * f + 0.5;
  sum = sum * f + 1.0;
  return {power_of_two(n), sum * f};
}

ONWARD_INLINE double exp(double x) {
  const Exponential e = exponential(x);
  const double result = e.scale + e.scale * e.minus_one;
  return choose(x > 700.0, __builtin_inf(), choose(x < -700.0, 0.0, result));
}
ONWARD_INLINE double expm1(double x) {
  const Exponential e = exponential(x);
  return e.scale * e.minus_one + (e.scale - 1.0);
}
ONWARD_INLINE double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
ONWARD_INLINE double tanh(double x) {
  const double e = expm1(2.0 * limited(x, 20.0));
  return e / (e + 2.0);
}

// The natural logarithm. x = 2^n m with m in sqrt(1/2) … sqrt(2), log m = 2 atanh((m - 1) / (m + 1)).
// Subnormal floats are normal as doubles; subnormal doubles don't occur.
ONWARD_INLINE double log(double x) {
  constexpr uint64_t kOne = 0x3ff0000000000000, kRoot = 0x3fe6a09e667f3bcd;
  const uint64_t bits = bits_of(x);
  const uint64_t exponent = (bits + (kOne - kRoot)) >> 52;  // biased
  const double m = double_of(bits - ((exponent - 1023) << 52));
  const double n = double_of(exponent | 0x4330000000000000) - (0x1p52 + 1023);
  const double s = (m - 1.0) / (m + 1.0), square = s * s;
  double sum = 2.0 / 15;
  sum = sum * square + 2.0 / 13;
  sum = sum * square + 2.0 / 11;
  sum = sum * square + 2.0 / 9;
  sum = sum * square + 2.0 / 7;
  sum = sum * square + 2.0 / 5;
  sum = sum * square + 2.0 / 3;
  sum = sum * square + 2.0;
  double result = n * 0x1.62e42fefa39efp-1 + s * sum;
  result = choose(x < __builtin_inf(), result, x);  // infinity and NaN
  result = choose(x == 0.0, -__builtin_inf(), result);
  return choose(x < 0.0, __builtin_nan(""), result);
}

// Near 0 a series is used, because 1 + x would lose the bits of x.
ONWARD_INLINE double log1p(double x) {
  const double series = x * (1.0 - x * (0.5 - x * (1.0 / 3 - x * 0.25)));
  const double far = log(1.0 + x);
  return choose(magnitude(x) < 1e-3, series, far);
}

// erfc(z) for z >= 0: e^(-z^2) t P(u) with t = 1 / (1 + z / 3), and u = t scaled to -1 … 1. P has degree 14
// and interpolates at the Chebyshev points of 0 <= z <= 15, with a relative error of 5e-12.
ONWARD_INLINE double erfc_positive(double z) {
  z = limited(z, 15.0);
  const double t = 1.0 / (1.0 + z * (1.0 / 3));
  const double u = (t - 1.0 / 6) * 2.4 - 1.0;
  double sum = 1.634266976077943e-09;
  sum = sum * u + 1.6190675504420742e-07;
  sum = sum * u - 1.122543498269068e-07;
  sum = sum * u - 2.2073016451177134e-06;
  sum = sum * u + 1.5045144897316701e-06;
  sum = sum * u + 2.5439914307541012e-05;
  sum = sum * u - 2.1465174524989523e-06;
  sum = sum * u - 0.0003197885270222908;
  sum = sum * u - 0.0005643774893496755;
  sum = sum * u + 0.0031792257759071167;
  sum = sum * u + 0.022643759422405766;
  sum = sum * u + 0.07666027044869406;
  sum = sum * u + 0.17745434398215465;
  sum = sum * u + 0.307868078618465;
  sum = sum * u + 0.41305584587326943;
  return exp(-z * z) * t * sum;
}

// The distribution function of the standard normal distribution.
ONWARD_INLINE double normal_cdf(double x) {
  const double z = magnitude(x);
  const double tail = choose(z > 20.0, 0.0, 0.5 * erfc_positive(z * 0x1.6a09e667f3bcdp-1));
  return choose(x < 0.0, tail, 1.0 - tail);
}

// Below 1, a polynomial in x^2 (degree 8, Chebyshev points, relative error 1e-12); above 1, erfc.
ONWARD_INLINE double erf(double x) {
  const double z = magnitude(x), square = x * x;
  double sum = 1.058938064107502e-06;
  sum = sum * square - 1.3909340021874599e-05;
  sum = sum * square + 0.0001195656256820733;
  sum = sum * square - 0.0008542637997087229;
  sum = sum * square + 0.005223783477189248;
  sum = sum * square - 0.026866133235095593;
  sum = sum * square + 0.11283791308604582;
  sum = sum * square - 0.3761263888963531;
  sum = sum * square + 1.1283791670946768;
  const double far = 1.0 - erfc_positive(z);
  return choose(z < 1.0, x * sum, with_sign(far, x));
}

// The tanh form of gelu: x (1 + tanh(u)) / 2 = x sigmoid(2u).
ONWARD_INLINE double gelu_tanh(double x) {
  const double u = 0.79788456080286535588 * (x + 0.044715 * x * x * x);
  return x * sigmoid(2.0 * u);
}

}  // namespace onward::generic
