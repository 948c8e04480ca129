// AVX2 with AVX-VNNI (Alder Lake and later): 16 registers of 256 bits, and one instruction for dot products of
// integers, so that every sum is AVX2's (docs/decisions/0025).
#pragma once
#include "x86_256.h"

// ONWARD_EVEX: in the encoding of AVX-512 VNNI, so that its processors can run the same code (tests).
#ifdef ONWARD_EVEX
#define ONWARD_VNNI(instruction) instruction " %2, %1, %0"
#else
#define ONWARD_VNNI(instruction) "%{vex%} " instruction " %2, %1, %0"
#endif

namespace onward {

// acc[i] += the dot product of 4 unsigned bytes of w with 4 signed bytes of x, exact modulo 2^32. Assembly, for the
// reason that x86_512.h has.
inline i32x16 dot_i8(i32x16 acc, i32x16 w, i32x16 x) {
  asm(ONWARD_VNNI("vpdpbusd") : "+x"(acc.lo) : "x"(w.lo), "x"(x.lo));
  asm(ONWARD_VNNI("vpdpbusd") : "+x"(acc.hi) : "x"(w.hi), "x"(x.hi));
  return acc;
}

inline i32x16 dot_i8(i32x16 acc, i32x16 w, const int32_t* x) { return dot_i8(acc, w, splat(*x)); }
constexpr bool kDotsBytes = true;

// acc[i] += w[2i] * x[2i] + w[2i+1] * x[2i+1] over pairs of 16-bit integers, exact modulo 2^32.
inline i32x16 dot_i16(i32x16 acc, i32x16 w, i32x16 x) {
  asm(ONWARD_VNNI("vpdpwssd") : "+x"(acc.lo) : "x"(w.lo), "x"(x.lo));
  asm(ONWARD_VNNI("vpdpwssd") : "+x"(acc.hi) : "x"(w.hi), "x"(x.hi));
  return acc;
}

struct ByteWords { static constexpr bool kUsed = false; };

}  // namespace onward

#undef ONWARD_VNNI
