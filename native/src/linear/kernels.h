// The micro-kernels: ROWS rows of activations times BLOCKS blocks of 16 weight rows.
//
// Exactness: every output has one float accumulator that walks K from the first input to the last, in
// every instance, so an output's bits do not depend on ROWS and BLOCKS. (Integer sums may be taken in
// any order.) The loops below run over small arrays which the compiler must unroll and keep in
// registers: look at the disassembly after touching them.
#pragma once
#include "../simd.h"
#include "activations.h"

namespace onward::linear {

struct Tile {
  const uint8_t* panel;    // of the rows, see activations.h
  const uint8_t* weights;  // the first block
  int64_t block_bytes;     // from one block to the next
  int64_t inputs;
  float* out;  // [ROWS, BLOCKS, 16]
};

#define ONWARD_UNROLL _Pragma("GCC unroll 32")

// One block at a time is the shape of small T, which runs at the pace of memory. It prefetches 8192
// bytes ahead, past the end of the block into the next: the hardware's own prefetching leaves a tenth
// of the bandwidth unused. (2048 is too near for a fast bus; beyond 16384 it falls off.) Several
// blocks at a time come from the second level cache, but for the first tile.
constexpr int64_t prefetch_distance(int blocks) { return blocks == 1 ? 8192 : 2304; }

// What a format does in one step along K: the bytes it takes from a block and from a row of the panel, the inputs that
// is, and its multiplication.
struct F32Format {
  using Sum = f32x16;
  static constexpr int kStepBytes = 64, kPanelBytes = 4, kStepInputs = 1;
  static f32x16 weights(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
  static f32x16 activation(const uint8_t* p) { return splat(*reinterpret_cast<const float*>(p)); }
  static f32x16 step(f32x16 sum, f32x16 w, f32x16 x) { return fma(w, x, sum); }
};

struct F16Format : F32Format {
  static constexpr int kStepBytes = 32;
  static f32x16 weights(const uint8_t* p) { return load(reinterpret_cast<const F16*>(p)); }
};

inline const int32_t* word(const uint8_t* p) { return reinterpret_cast<const int32_t*>(p); }

// Pairs of inputs by one instruction.
struct Bf16PairsFormat {
  using Sum = f32x16;
  static constexpr int kStepBytes = 64, kPanelBytes = 4, kStepInputs = 2;
  static i32x16 weights(const uint8_t* p) { return load_i32(p); }
  static i32x16 activation(const uint8_t* p) { return splat(*word(p)); }
  static f32x16 step(f32x16 sum, i32x16 w, i32x16 x) { return dot_bf16(sum, w, x); }
};

// The same sums where no instruction has pairs: a panel of floats, so that only the weights must be taken apart.
struct Bf16FloatsFormat {
  struct Pair { f32x16 even, odd; };
  using Sum = f32x16;
  static constexpr int kStepBytes = 64, kPanelBytes = 8, kStepInputs = 2;
  static Pair weights(const uint8_t* p) {
    const i32x16 both = load_i32(p);
    return {as_f32(shift_left<16>(both)), as_f32(bit_and(both, int32_t(0xffff0000)))};
  }
  static const float* activation(const uint8_t* p) { return reinterpret_cast<const float*>(p); }
  static f32x16 step(f32x16 sum, const Pair& w, const float* x) {
    return fma(w.even, splat(x[0]), fma(w.odd, splat(x[1]), sum));
  }
};
using Bf16Format = std::conditional_t<kDotsBf16, Bf16PairsFormat, Bf16FloatsFormat>;

struct Int8BytesFormat {
  using Sum = i32x16;
  static constexpr int kStepBytes = 64, kPanelBytes = 4, kStepInputs = 4;
  static i32x16 weights(const uint8_t* p) { return load_i32(p); }
  static i32x16 activation(const uint8_t* p) { return splat(*word(p)); }
  static i32x16 step(i32x16 sum, i32x16 w, i32x16 x) { return dot_i8(sum, w, x); }
};

// The same sums of products of words: of each four inputs the first and third, then the second and fourth.
struct Int8WordsFormat {
  struct Pair { i32x16 even, odd; };
  using Sum = i32x16;
  static constexpr int kStepBytes = 64, kPanelBytes = 8, kStepInputs = 4;
  static Pair weights(const uint8_t* p) {
    const i32x16 four = load_i32(p);
    return {bit_and(four, 0x00ff00ff), bit_and(shift_right<8>(four), 0x00ff00ff)};
  }
  static const int32_t* activation(const uint8_t* p) { return word(p); }
  static i32x16 step(i32x16 sum, const Pair& w, const int32_t* x) {
    return dot_i16(dot_i16(sum, w.even, splat(x[0])), w.odd, splat(x[1]));
  }
};
using Int8Format = std::conditional_t<kDotsBytes, Int8BytesFormat, Int8WordsFormat>;

template <class Sum, int ROWS, int BLOCKS>
using Sums = Sum[ROWS][BLOCKS];

// Body(r, b) for every sum of the tile.
template <int ROWS, int BLOCKS, class Body>
inline void for_sums(Body&& body) {
  ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) {
    ONWARD_UNROLL for (int b = 0; b < BLOCKS; ++b) body(r, b);
  }
}

template <class Format, int ROWS, int BLOCKS>
inline void one_step(const uint8_t* panel, const uint8_t* weights, int64_t block_bytes,
                     Sums<typename Format::Sum, ROWS, BLOCKS>& sum) {
  decltype(Format::weights(weights)) w[BLOCKS];
  ONWARD_UNROLL for (int b = 0; b < BLOCKS; ++b) {
    w[b] = Format::weights(weights + b * block_bytes);
    prefetch(weights + b * block_bytes + prefetch_distance(BLOCKS));
  }
  ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) {
    const auto x = Format::activation(panel + r * kStretch);
    ONWARD_UNROLL for (int b = 0; b < BLOCKS; ++b) sum[r][b] = Format::step(sum[r][b], w[b], x);
  }
}

// The walk along K that all formats but int4 share: stretches of 64 bytes of each row.
template <class Format, int ROWS, int BLOCKS>
inline void walk(const uint8_t* panel, const uint8_t* weights, int64_t block_bytes, int64_t inputs,
                 Sums<typename Format::Sum, ROWS, BLOCKS>& sum) {
  constexpr int kSteps = kStretch / Format::kPanelBytes;
  int64_t steps = ceil_div(inputs, Format::kStepInputs);
  for (; steps >= kSteps; steps -= kSteps, panel += (ROWS - 1) * kStretch) {
    _Pragma("GCC unroll 4") for (int s = 0; s < kSteps; ++s) {
      one_step<Format, ROWS, BLOCKS>(panel, weights, block_bytes, sum);
      panel += Format::kPanelBytes;
      weights += Format::kStepBytes;
    }
  }
  for (; steps > 0; --steps, panel += Format::kPanelBytes, weights += Format::kStepBytes) {
    one_step<Format, ROWS, BLOCKS>(panel, weights, block_bytes, sum);
  }
}

template <class Format, int ROWS, int BLOCKS>
struct Kernel {
  static void run(const Tile& tile) {
    Sums<f32x16, ROWS, BLOCKS> sum;
    for_sums<ROWS, BLOCKS>([&](int r, int b) { sum[r][b] = zero_f32(); });
    walk<Format, ROWS, BLOCKS>(tile.panel, tile.weights, tile.block_bytes, tile.inputs, sum);
    for_sums<ROWS, BLOCKS>([&](int r, int b) { store(tile.out + (r * BLOCKS + b) * 16, sum[r][b]); });
  }
};

template <int ROWS, int BLOCKS>
struct Kernel<Int8Format, ROWS, BLOCKS> {
  static void run(const Tile& tile) {
    Sums<i32x16, ROWS, BLOCKS> sum;
    for_sums<ROWS, BLOCKS>([&](int r, int b) { sum[r][b] = splat(*word(tile.panel + r * 4)); });
    walk<Int8Format, ROWS, BLOCKS>(tile.panel + ROWS * 8, tile.weights + kInt8Header,
                                   tile.block_bytes, tile.inputs, sum);
    const auto* x_scale = reinterpret_cast<const float*>(tile.panel + ROWS * 4);
    for_sums<ROWS, BLOCKS>([&](int r, int b) {
      const f32x16 w_scale =
          load(reinterpret_cast<const float*>(tile.weights + b * tile.block_bytes));
      store(tile.out + (r * BLOCKS + b) * 16,
            mul(mul(to_f32(sum[r][b]), splat(x_scale[r])), w_scale));
    });
  }
};

// Steps of four inputs, whose integers have a magnitude of at most 127, that words of 16 bits can sum where codes have so
// many bits: two products each.
constexpr int steps_in_words(int bits) { return 32767 / (2 * 127 * ((1 << bits) - 1)); }

// Integers whose sums began at the bits of a float `unit` (activations.h), times the scale of their activations: that is
// one unit in the last place of the float, so that a subtraction converts and scales them, exactly.
inline f32x16 scaled(i32x16 sum, const float* unit) { return sub(as_f32(sum), splat(*unit)); }

}  // namespace onward::linear
