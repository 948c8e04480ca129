#include "unpacked.h"

#include <utility>

#include "grouped_kernels.h"

namespace onward::linear {
namespace {

// 32 inputs after the other: the scale of each half and its minimum, then 8 lines of codes, one a byte.
template <int HALVES, bool MINIMUM, int STEPS_IN_WORDS>
struct UnpackedLayout {
  static constexpr int kHalves = HALVES, kStepsInWords = STEPS_IN_WORDS;
  static constexpr bool kMinimum = MINIMUM, kPrefetches = false;
  static constexpr int64_t kPlaceBytes = MINIMUM ? 128 : 64, kHeaderBytes = HALVES * kPlaceBytes;
  static constexpr int64_t kUnit = kGroup, kCodesBytes = 512, kUnitBytes = kHeaderBytes + kCodesBytes;
  static_assert(kUnitBytes <= kMaxUnpackedGroup);

  static constexpr int64_t place(int64_t, int half) { return half; }
  static f32x16 scale(const uint8_t* unit, int64_t place) {
    return load(reinterpret_cast<const float*>(unit + place * kPlaceBytes));
  }
  static f32x16 minimum(const uint8_t* unit, int64_t place) {
    return load(reinterpret_cast<const float*>(unit + place * kPlaceBytes + 64));
  }
  template <int STEP>
  static i32x16 at(const uint8_t* codes) { return load_i32(codes + STEP * 64); }
};

// Where no sums have words of 16 bits, formats of the same scales share their kernels.
template <class Packed>
using UnpackedOf =
    UnpackedLayout<Packed::kHalves, Packed::kMinimum, ByteWords::kUsed ? Packed::kStepsInWords : 0>;

template <class Packed>
void unpack(const uint8_t* block, int64_t first, int64_t count, uint8_t* to) {
  using To = UnpackedOf<Packed>;
  constexpr int64_t kGroups = Packed::kUnit / kGroup;
  const auto put = [](uint8_t* at, f32x16 v) { store(reinterpret_cast<float*>(at), v); };
  for (int64_t i = first; i < first + count; ++i, to += To::kUnitBytes) {
    const uint8_t* unit = block + i / kGroups * Packed::kUnitBytes;
    const uint8_t* codes = unit + Packed::kHeaderBytes + i % kGroups * Packed::kCodesBytes;
    ONWARD_UNROLL for (int half = 0; half < Packed::kHalves; ++half) {
      const int64_t place = Packed::place(i % kGroups, half);
      put(to + half * To::kPlaceBytes, Packed::scale(unit, place));
      if constexpr (Packed::kMinimum) put(to + half * To::kPlaceBytes + 64, Packed::minimum(unit, place));
    }
    each_step(
        [&](auto at) {
          constexpr int kStep = decltype(at)::value;
          put(to + To::kHeaderBytes + kStep * 64, as_f32(Packed::template at<kStep>(codes)));
        },
        std::make_integer_sequence<int, 8>{});
  }
}

template <class Layout, int ROWS, int BLOCKS>
void add_to(const Tile& tile) {
  using Kernel = GroupedKernel<Layout, ROWS, BLOCKS>;
  typename Kernel::Totals total;
  for_sums<ROWS, BLOCKS>([&](int r, int b) { total[r][b] = load(tile.out + (r * BLOCKS + b) * 16); });
  Kernel::add_products(tile, tile.panel, total);
  for_sums<ROWS, BLOCKS>([&](int r, int b) { store(tile.out + (r * BLOCKS + b) * 16, total[r][b]); });
}

template <class Layout, int... R>
constexpr KernelTable add_table(std::integer_sequence<int, R...>) {
  KernelTable table;
  ((table.run[R + 1][1] = add_to<Layout, R + 1, 1>), ...);
  if constexpr (kInt4Blocks == 2) ((table.run[R + 1][2] = add_to<Layout, R + 1, 2>), ...);
  return table;
}
template <class Packed>
constexpr UnpackedKernels kKernels = {UnpackedOf<Packed>::kUnitBytes, unpack<Packed>,
                                      add_table<UnpackedOf<Packed>>(std::make_integer_sequence<int, kInt4TileRows>{})};

template <int... FORMATS>
const UnpackedKernels& find(Format format, std::integer_sequence<int, FORMATS...>) {
  static constexpr const UnpackedKernels* kTable[] = {&kKernels<PackedLayout<kPackedInt4 + FORMATS>>...};
  return *kTable[format - kPackedInt4];
}

}  // namespace

const UnpackedKernels& unpacked_kernels(Format format) {
  return find(format, std::make_integer_sequence<int, kPackedFp8 - kPackedInt4>{});
}

}  // namespace onward::linear
