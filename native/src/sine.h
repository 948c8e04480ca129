// The sine and cosine of an angle in double, with arithmetic only, so that loops over it are vectorized.
#pragma once

namespace onward {

struct Turn {
  double sin, cos;
};

// The error is below 10^-11 for angles up to 2^31. Selections are products with 0, 1 or -1.
inline __attribute__((always_inline)) Turn sine_and_cosine(double angle) {
  constexpr double kRounder = 0x1.8p52;  // adding it leaves no bits for a fraction
  const auto nearest = [](double a) { return (a + kRounder) - kRounder; };
  const double quarters = nearest(angle * 0x1.45f306dc9c883p-1);  // quarter turns: angle * 2 / pi
  // The last two bits of the number of quarters: k / 2 - 1/4 rounds to floor(k / 2).
  const double halves = nearest(quarters * 0.5 - 0.25);
  const double odd = quarters - 2 * halves, half = halves - 2 * nearest(halves * 0.5 - 0.25);
  // pi / 2 in parts. The first two have 22 bits, so their products with up to 31 bits of quarters are exact.
  double r = angle - quarters * 0x1.921fbp+0;
  r = r - quarters * 0x1.5110bp-22;
  r = r - quarters * 0x1.18469898cc517p-44;
  const double square = r * r;
  double s = -1.0 / 39916800, c = 1.0 / 479001600;
  s = s * square + 1.0 / 362880;
  s = s * square - 1.0 / 5040;
  s = s * square + 1.0 / 120;
  s = s * square - 1.0 / 6;
  s = s * square * r + r;
  c = c * square - 1.0 / 3628800;
  c = c * square + 1.0 / 40320;
  c = c * square - 1.0 / 720;
  c = c * square + 1.0 / 24;
  c = c * square - 0.5;
  c = c * square + 1.0;
  const double even = 1 - odd, sign = 1 - 2 * half;
  return {sign * (even * s + odd * c), sign * (even - odd) * (even * c + odd * s)};
}

}  // namespace onward
