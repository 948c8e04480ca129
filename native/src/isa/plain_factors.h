// The products with powers of two of simd.h, for sets to which one is a product like others. Included where f32x16,
// mul and splat are known.
#pragma once

namespace onward {

using LaneMask = int;
struct Factors { f32x16 v; };
inline Factors factors_of(f32x16 a) { return {a}; }
inline f32x16 times_power(const Factors& a, const float* power) { return mul(a.v, splat(*power)); }
inline LaneMask broken_lanes(f32x16) { return 0; }
inline f32x16 with_nan(f32x16 a, LaneMask) { return a; }

}  // namespace onward
