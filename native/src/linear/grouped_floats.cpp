// Kernels of the grouped formats whose codes stand for floats: FP8 and NF4. Activations are not rounded.
//
// A unit is a group with one scale. Its inputs are taken in four quarters, each with a sum of its own, one fma an input
// in order; then total = fma(((sum 0 + sum 1) + sum 2) + sum 3, scale, total). A float of few bits and one of 24 have a
// product that fma does not round.
#include <utility>

#include "grouped_kernels.h"

namespace onward::linear {
namespace {

template <int32_t FORMAT, int ROWS, int BLOCKS>
struct FloatKernel {
  static constexpr Grouped g = grouped_of(FORMAT);
  static constexpr int kQuarter = int(g.unit()) / 4;
  // E4M3 comes as a 256th of its value, which the scale makes up for.
  static constexpr float kUnits = g.bits == 8 ? 256.0f : 1.0f;
  using Sum = Sums<f32x16, ROWS, BLOCKS>;

  static void clear(Sum& sum) {
    for_sums<ROWS, BLOCKS>([&](int r, int b) { sum[r][b] = zero_f32(); });
  }
  static void add_to(Sum& sum, const Sum& part) {
    for_sums<ROWS, BLOCKS>([&](int r, int b) { sum[r][b] = add(sum[r][b], part[r][b]); });
  }

  // Input STEP of eight, of 16 rows.
  template <int STEP>
  static f32x16 value(const uint8_t* codes) {
    if constexpr (g.bits == 8) return e4m3_256th(codes + STEP * 16);
    return look_up(shift_right<STEP % 4 * 8 + STEP / 4 * 4>(load_i32(codes)), kNf4);
  }

  // Inputs first … first + 7 of the unit.
  static void eight(const uint8_t* panel, const uint8_t* codes, int64_t block_bytes, int first, Sum& sum) {
    const auto* x = reinterpret_cast<const float*>(panel + first / 16 * ROWS * kStretch) + first % 16;
    codes += first / 8 * 16 * g.bits;
    each_step(
        [&](auto at) {
          constexpr int kStep = decltype(at)::value;
          f32x16 w[BLOCKS];
          ONWARD_UNROLL for (int b = 0; b < BLOCKS; ++b) {
            w[b] = value<kStep>(codes + b * block_bytes);
          }
          for_sums<ROWS, BLOCKS>([&](int r, int b) {
            sum[r][b] = fma(w[b], splat(x[r * (kStretch / 4) + kStep]), sum[r][b]);
          });
        },
        std::make_integer_sequence<int, 8>{});
  }

  // The sum over a unit. One row waits for its sums, so it takes the quarters side by side.
  static void unit(const uint8_t* panel, const uint8_t* codes, int64_t block_bytes, Sum& sum) {
    if constexpr (ROWS * BLOCKS <= 2) {
      Sum parts[4];
      for (Sum& part : parts) clear(part);
      ONWARD_UNROLL for (int i = 0; i < kQuarter; i += 8) {
        ONWARD_UNROLL for (int q = 0; q < 4; ++q) {
          eight(panel, codes, block_bytes, q * kQuarter + i, parts[q]);
        }
      }
      add_to(parts[0], parts[1]);
      add_to(parts[0], parts[2]);
      add_to(parts[0], parts[3]);
      for_sums<ROWS, BLOCKS>([&](int r, int b) { sum[r][b] = parts[0][r][b]; });
    } else {
      for (int q = 0; q < 4; ++q) {
        Sum part;
        clear(part);
        for (int i = 0; i < kQuarter; i += 8) {
          eight(panel, codes, block_bytes, q * kQuarter + i, part);
        }
        if (q == 0) clear(sum);
        add_to(sum, part);
      }
    }
  }

  static void run(const Tile& tile) {
    const uint8_t *panel = tile.panel, *unit_at = tile.weights;
    Sum total;
    clear(total);
    for (int64_t k = 0; k < tile.inputs; k += g.unit(), unit_at += g.unit_bytes()) {
      ONWARD_UNROLL for (int b = 0; b < BLOCKS; ++b) {
        const uint8_t* ahead = unit_at + b * tile.block_bytes + prefetch_distance(BLOCKS);
        for (int64_t at = 0; at < g.unit_bytes(); at += 64) prefetch(ahead + at);
      }
      Sum sum;
      unit(panel, unit_at + g.header_bytes(), tile.block_bytes, sum);
      ONWARD_UNROLL for (int b = 0; b < BLOCKS; ++b) {
        const auto* scales = reinterpret_cast<const float*>(unit_at + b * tile.block_bytes);
        const f32x16 scale = mul(load(scales), splat(kUnits));
        ONWARD_UNROLL for (int r = 0; r < ROWS; ++r) {
          total[r][b] = fma(sum[r][b], scale, total[r][b]);
        }
      }
      panel += ROWS * 4 * g.unit();
    }
    for_sums<ROWS, BLOCKS>([&](int r, int b) { store(tile.out + (r * BLOCKS + b) * 16, total[r][b]); });
  }
};

template <int32_t FORMAT, int BLOCKS, int... R>
constexpr void fill(KernelTable& table, std::integer_sequence<int, R...>) {
  ((table.run[R + 1][BLOCKS] = FloatKernel<FORMAT, R + 1, BLOCKS>::run), ...);
}
template <int32_t FORMAT>
constexpr KernelTable float_table() {
  KernelTable table;
  fill<FORMAT, 1>(table, std::make_integer_sequence<int, kGroupedStreamRows>{});
  if constexpr (kInt4Blocks == 2) fill<FORMAT, 2>(table, std::make_integer_sequence<int, kInt4TileRows>{});
  return table;
}
template <int32_t FORMAT>
constexpr KernelTable kFloatKernels = float_table<FORMAT>();

}  // namespace

const KernelTable& float_kernels(Format format) {
  return format == kPackedFp8 ? kFloatKernels<kPackedFp8> : kFloatKernels<kPackedNf4>;
}

}  // namespace onward::linear
