// The micro-kernels of the formats whose inputs share scales in groups (layout.h): those of GGUF, and of
// checkpoints with zero points or NVFP4.
//
// For each group of 32 (or twice 16) inputs, in order: sum = fma(float(integer product), scale of the
// weights * scale of the activations, sum), and for formats with minima sum = fma(minimum, -scale of the
// activations * sum of their integers, sum). Scales of two levels are products of 8 and 11 bits: exact.
#pragma once
#include "kernel_table.h"

namespace onward::linear {

// Body(std::integral_constant<int, 0>) … of N, so that a step's shifts are constants.
template <class Body, int... STEPS>
inline void each_step(Body&& body, std::integer_sequence<int, STEPS...>) {
  (body(std::integral_constant<int, STEPS>{}), ...);
}

// The table's values with 128 added, as dot_i8 takes them.
struct OffsetTable {
  uint8_t bytes[16] = {};
  constexpr explicit OffsetTable(const int8_t* table) {
    for (int i = 0; i < 16; ++i) bytes[i] = table ? uint8_t(table[i] + 128) : uint8_t(0);
  }
};

template <int32_t FORMAT>
struct GroupedCodes {
  static constexpr Grouped g = grouped_of(FORMAT);
  static constexpr OffsetTable kTable{g.table};

  // Field kField of kBits bits of every byte, moved to bit kTo of it.
  template <int kBits, int kField, int kTo>
  static i32x16 field(i32x16 a) {
    constexpr int kShift = kField * kBits - kTo;
    constexpr int32_t kMask = int32_t(0x01010101u * (((1u << kBits) - 1) << kTo));
    if constexpr (kShift >= 0) {
      return bit_and(shift_right<kShift>(a), kMask);
    } else {
      return bit_and(shift_left<-kShift>(a), kMask);
    }
  }

  // The codes of the inputs 4 STEP … 4 STEP + 3 of 32, of 16 rows, one a byte.
  template <int STEP>
  static i32x16 at(const uint8_t* codes) {
    if constexpr (g.bits == 8) {
      return load_i32(codes + STEP * 64);
    } else if constexpr (g.bits >= 4) {
      const i32x16 low = field<4, STEP % 2, 0>(load_i32(codes + STEP / 2 * 64));
      const uint8_t* high = codes + 256;
      if constexpr (g.bits == 5) return bit_or(low, field<1, STEP, 4>(load_i32(high)));
      if constexpr (g.bits == 6) {
        return bit_or(low, field<2, STEP % 4, 4>(load_i32(high + STEP / 4 * 64)));
      }
      if constexpr (g.table != nullptr) return look_up(low, kTable.bytes);
      return low;
    } else {
      const i32x16 low = field<2, STEP % 4, 0>(load_i32(codes + STEP / 4 * 64));
      if constexpr (g.bits == 3) return bit_or(low, field<1, STEP, 2>(load_i32(codes + 128)));
      return low;
    }
  }
};

// 16 rows' scales and minima of one group, from the header of their unit.
template <int32_t FORMAT>
struct GroupedLevels {
  static constexpr Grouped g = grouped_of(FORMAT);

  // Of half `half` of 32 inputs, which are the group-th of their unit.
  static constexpr int64_t place(int64_t group, int half) {
    return g.group > kGroup ? group * kGroup / g.group : group * g.halves() + half;
  }
  static const F16* halves(const uint8_t* p) { return reinterpret_cast<const F16*>(p); }

  static f32x16 scale(const uint8_t* unit, int64_t group) {
    if constexpr (g.levels == 2) {
      const uint8_t* p = unit + 64 + group * (g.minimum ? 32 : 16);
      if constexpr (g.divided) {
        // The table's values are doubled, and E4M3 comes as a 256th.
        const f32x16 divisors = load(reinterpret_cast<const float*>(unit));
        return div(mul(e4m3_256th(p), splat(128.0f)), divisors);
      }
      const i32x16 sub = g.is_signed ? load_bytes(reinterpret_cast<const int8_t*>(p)) : load_bytes(p);
      return mul(load(halves(unit)), to_f32(sub));
    } else if constexpr (g.exponent) {
      // 2^(e - 128): half of the float with that exponent; 2^-128 where e is 0.
      const i32x16 exponents = shift_left<23>(load_bytes(unit + group * 16));
      return max(mul(as_f32(exponents), splat(0.5f)), splat(0x1p-128f));
    } else {
      return load(halves(unit + group * 32));
    }
  }

  static f32x16 minimum(const uint8_t* unit, int64_t group) {
    if constexpr (g.levels == 2) {
      return mul(load(halves(unit + 32)), to_f32(load_bytes(unit + 64 + group * 32 + 16)));
    } else if constexpr (g.zeros) {
      const uint8_t* zeros = unit + g.unit() / g.group * 32;
      return mul(scale(unit, group), to_f32(load_bytes(zeros + group * 16)));
    } else {
      return load(halves(unit + (g.unit() / g.group + group) * 32));
    }
  }
};

// Weights as they are packed, for a kernel: where a unit's parts are, and how to read them.
template <int32_t FORMAT>
struct PackedLayout : GroupedCodes<FORMAT>, GroupedLevels<FORMAT> {
  static constexpr Grouped g = grouped_of(FORMAT);
  static constexpr int kHalves = g.halves();
  static constexpr bool kMinimum = g.minimum;
  static constexpr int64_t kUnit = g.unit(), kUnitBytes = g.unit_bytes();
  static constexpr int64_t kHeaderBytes = g.header_bytes(), kCodesBytes = g.codes_bytes();
  // Steps that words of 16 bits can sum: none where a table makes bytes of the codes.
  static constexpr int kStepsInWords = g.table == nullptr ? steps_in_words(g.bits) : 0;
  static constexpr bool kPrefetches = true;
};

template <class Layout, int ROWS, int BLOCKS>
struct GroupedKernel {
  static constexpr int kHalves = Layout::kHalves;
  using Totals = Sums<f32x16, ROWS, BLOCKS>;

  // Where the sum of half H of 32 inputs begins: at the unit of the row, less what the codes' offset adds.
  template <int H>
  static i32x16 start(const uint8_t* panel, int r) {
    return splat(*word(panel + ((Layout::kMinimum ? kHalves : H) * ROWS + r) * 4));
  }

  // One group's integer products: half H of 32 inputs.
  template <int H>
  static void products(const uint8_t* panel, const uint8_t* codes, int64_t block_bytes,
                       Sums<i32x16, ROWS, BLOCKS>& sum) {
    constexpr int kSteps = 8 / kHalves;
    const uint8_t* x = panel + ROWS * (4 * kHalves + 4);
    for_sums<ROWS, BLOCKS>([&](int r, int b) { sum[r][b] = start<H>(panel, r); });
    each_step(
        [&](auto at) {
          constexpr int kStep = H * kSteps + decltype(at)::value;
          i32x16 w[BLOCKS];
          ONWARD_UNROLL for (int b = 0; b < BLOCKS; ++b) {
            w[b] = Layout::template at<kStep>(codes + b * block_bytes);
          }
          for_sums<ROWS, BLOCKS>([&](int r, int b) {
            const int32_t* at_x = word(x + r * kGroup + kStep * 4);
            if constexpr (BLOCKS == 1) {
              sum[r][b] = dot_i8(sum[r][b], w[b], at_x);
            } else {
              sum[r][b] = dot_i8(sum[r][b], w[b], splat(*at_x));
            }
          });
        },
        std::make_integer_sequence<int, kSteps>{});
  }

  // The same, in words of 16 bits for as many steps as fit.
  static constexpr int kFit = Layout::kStepsInWords;
  static constexpr bool kInWords = ByteWords::kUsed && kFit > 0;
  template <int H, class N = ByteWords>
  static void products_in_words(const uint8_t* panel, const uint8_t* codes, int64_t block_bytes,
                                Sums<i32x16, ROWS, BLOCKS>& sum) {
    constexpr int kSteps = 8 / kHalves;
    const uint8_t* x = panel + ROWS * (4 * kHalves + 4);
    Sums<i32x16, ROWS, BLOCKS> words;
    for_sums<ROWS, BLOCKS>([&](int r, int b) {
      sum[r][b] = start<H>(panel, r);
      words[r][b] = zero_i32();
    });
    each_step(
        [&](auto at) {
          constexpr int kAt = decltype(at)::value, kStep = H * kSteps + kAt;
          ONWARD_UNROLL for (int b = 0; b < BLOCKS; ++b) {
            const i32x16 w = Layout::template at<kStep>(codes + b * block_bytes);
            ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) {
              words[r][b] = N::step(words[r][b], w, splat(*word(x + r * kGroup + kStep * 4)));
            }
          }
          if constexpr ((kAt + 1) % kFit == 0 || kAt + 1 == kSteps) {
            for_sums<ROWS, BLOCKS>([&](int r, int b) {
              sum[r][b] = add(sum[r][b], N::sums(words[r][b]));
              words[r][b] = zero_i32();
            });
          }
        },
        std::make_integer_sequence<int, kSteps>{});
  }

  template <int H>
  static void half(const uint8_t* panel, const uint8_t* unit, int64_t group, const uint8_t* codes,
                   int64_t block_bytes, Totals& total) {
    Sums<i32x16, ROWS, BLOCKS> sum;
    if constexpr (kInWords) {
      products_in_words<H>(panel, codes, block_bytes, sum);
    } else {
      products<H>(panel, codes, block_bytes, sum);
    }
    const auto* starts = reinterpret_cast<const float*>(panel);
    const float* units = starts + ROWS * kHalves;
    const int64_t place = Layout::place(group, H);
    ONWARD_UNROLL for (int b = 0; b < BLOCKS; ++b) {
      const uint8_t* header = unit + b * block_bytes;
      const f32x16 scales = Layout::scale(header, place);
      ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) {
        total[r][b] = fma(scaled(sum[r][b], units + r), scales, total[r][b]);
      }
      if constexpr (Layout::kMinimum) {
        const f32x16 minimum = Layout::minimum(header, place);
        ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) {
          total[r][b] = fma(minimum, splat(starts[H * ROWS + r]), total[r][b]);
        }
      }
    }
  }

  static void prefetch_ahead(const uint8_t* p, int64_t bytes, int64_t block_bytes) {
    if constexpr (!Layout::kPrefetches) return;
    ONWARD_UNROLL for (int b = 0; b < BLOCKS; ++b) {
      for (int64_t at = 0; at < bytes; at += 64) {
        prefetch(p + b * block_bytes + at + prefetch_distance(BLOCKS));
      }
    }
  }

  // Adds the products of all inputs to the totals.
  static void add_products(const Tile& tile, const uint8_t* panel, Totals& total) {
    const uint8_t* unit = tile.weights;
    for (int64_t k = 0; k < tile.inputs; k += Layout::kUnit, unit += Layout::kUnitBytes) {
      prefetch_ahead(unit, Layout::kHeaderBytes, tile.block_bytes);
      for (int64_t group = 0; group < Layout::kUnit / kGroup; ++group) {
        const uint8_t* codes = unit + Layout::kHeaderBytes + group * Layout::kCodesBytes;
        prefetch_ahead(codes, Layout::kCodesBytes, tile.block_bytes);
        half<0>(panel, unit, group, codes, tile.block_bytes, total);
        if constexpr (kHalves == 2) half<1>(panel, unit, group, codes, tile.block_bytes, total);
        panel += ROWS * (4 * kHalves + 4 + kGroup);
      }
    }
  }

  static void run(const Tile& tile) {
    const auto* poison = reinterpret_cast<const float*>(tile.panel);
    Totals total;
    for_sums<ROWS, BLOCKS>([&](int r, int b) { total[r][b] = splat(poison[r]); });
    add_products(tile, tile.panel + ROWS * 4, total);
    for_sums<ROWS, BLOCKS>([&](int r, int b) { store(tile.out + (r * BLOCKS + b) * 16, total[r][b]); });
  }
};

template <int32_t FORMAT, int... R>
constexpr KernelTable grouped_table(std::integer_sequence<int, R...>) {
  KernelTable table;
  ((table.run[R + 1][1] = GroupedKernel<PackedLayout<FORMAT>, R + 1, 1>::run), ...);
  return table;
}
template <int32_t FORMAT>
constexpr KernelTable kGroupedKernels = grouped_table<FORMAT>(std::make_integer_sequence<int, kGroupedStreamRows>{});

// int4 where words of 16 bits are no help. Few rows, whose registers have room for twice as many sums, have sums of
// their own for the high halves of the bytes, which spares them a shift.
template <int ROWS>
struct Int4Kernel {
  static constexpr bool kApart = 2 * ROWS <= kStreamRows;

  // The integer dot products of one group of 32 inputs: 4 lines of the block, 8 words of each row.
  static void products(const uint8_t* panel, const uint8_t* lines, i32x16 (&sum)[ROWS]) {
    i32x16 upper[ROWS];
    ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) {
      sum[r] = splat(*word(panel + r * 4));
      upper[r] = zero_i32();
    }
    const uint8_t* x = panel + ROWS * 8;
    ONWARD_UNROLL for (int line = 0; line < 4; ++line, x += 8) {
      const i32x16 both = load_i32(lines + line * 64), low = low_nibbles(both);
      const i32x16 high = kApart ? high_nibbles_16(both) : high_nibbles(both);
      prefetch(lines + line * 64 + prefetch_distance(1));
      ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) {
        sum[r] = dot_i8(sum[r], low, word(x + r * kGroup));
        auto& to = kApart ? upper[r] : sum[r];
        to = dot_i8(to, high, word(x + r * kGroup + 4));
      }
    }
    if constexpr (kApart) {
      ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) sum[r] = add(sum[r], sixteenth(upper[r]));
    }
  }

  static void run(const Tile& tile) {
    const auto* poison = reinterpret_cast<const float*>(tile.panel);
    const uint8_t *panel = tile.panel + ROWS * 4, *pair = tile.weights;
    f32x16 total[ROWS];
    ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) total[r] = splat(poison[r]);
    for (int64_t k = 0; k < tile.inputs; k += 2 * kGroup, pair += kInt4Pair) {
      prefetch(pair + prefetch_distance(1));
      ONWARD_UNROLL for (int half = 0; half < 2; ++half, panel += ROWS * (8 + kGroup)) {
        i32x16 sum[ROWS];
        products(panel, pair + 64 + half * 256, sum);
        const auto* units = reinterpret_cast<const float*>(panel + ROWS * 4);
        const f32x16 scales = load(reinterpret_cast<const F16*>(pair + half * 32));
        ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) total[r] = fma(scaled(sum[r], units + r), scales, total[r]);
      }
    }
    ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) store(tile.out + r * 16, total[r]);
  }
};

}  // namespace onward::linear
