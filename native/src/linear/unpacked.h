// Weights whose inputs share scales in groups, for many rows: a slice of K of as many blocks as a tile takes is
// unpacked to bytes and float scales, and all tiles of rows pass through it while it stays in the first level cache.
// Between slices a tile's sums are in memory, so an output has the bits that it has in one walk along K.
#pragma once
#include "kernel_table.h"

namespace onward::linear {

constexpr int64_t kSliceGroups = 16;          // of 32 inputs: two blocks of them, with the rows, fill 32 KB
constexpr int64_t kMaxUnpackedGroup = 12 * 64;  // bytes: two scales and two minima of 16 rows, and 8 lines of codes
constexpr int64_t kTilesAtOnce = 44;          // that pass through a slice

struct UnpackedKernels {
  int64_t group_bytes;  // of 32 inputs of a block
  // Groups first … first + count - 1 of a packed block.
  void (*unpack)(const uint8_t* block, int64_t first, int64_t count, uint8_t* to);
  // Add to the sums in `out`. The panel begins at the slice.
  KernelTable add;
};

inline bool unpacks(Format format) { return format >= kPackedInt4 && !grouped_of(format).floats; }
const UnpackedKernels& unpacked_kernels(Format format);

// Rows of activations as tiles: the first `longer` of them have one row more than the others.
struct Tiles {
  const uint8_t* panels;
  int64_t row_bytes, rows, count, first = 0;  // first: the first row in the panels
  int64_t least = rows / count, longer = rows % count;
  int64_t first_row(int64_t tile) const { return first + least * tile + (tile < longer ? tile : longer); }
};

// Asks for a share of the packed weights that are unpacked next, into the second level cache.
inline void prefetch_share(const uint8_t* next, int64_t bytes, int64_t share, int64_t shares) {
  const int64_t lines = ceil_div(bytes, 64), each = ceil_div(lines, shares);
  for (int64_t line = share * each; line < (share + 1) * each && line < lines; ++line) {
    __builtin_prefetch(next + line * 64, 0, 2);
  }
}

// Tiles begin … end - 1 times at most kInt4Blocks blocks. done(row, rows, sums) gets each tile, [rows, blocks, 16].
template <class Done>
void run_unpacked(Format format, const Tiles& tiles, int64_t begin, int64_t end, int64_t inputs,
                  const uint8_t* weights, int64_t block_bytes, int64_t blocks, Done&& done) {
  alignas(64) uint8_t slice[kInt4Blocks * kSliceGroups * kMaxUnpackedGroup];
  alignas(64) float sums[kTilesAtOnce * kInt4TileRows * kInt4Blocks * 16];
  const UnpackedKernels& kernels = unpacked_kernels(format);
  const Grouped g = grouped_of(format);
  const int64_t groups = round_up(inputs, g.unit()) / kGroup, row_group = group_row_bytes(g);
  const int64_t packed_slice = groups == 0 ? 0 : block_bytes / groups * kSliceGroups;
  for (int64_t last; begin < end; begin = last) {
    last = begin + kTilesAtOnce < end ? begin + kTilesAtOnce : end;
    for (int64_t group = 0; group == 0 || group < groups; group += kSliceGroups) {
      const int64_t count = groups - group < kSliceGroups ? groups - group : kSliceGroups;
      const int64_t slice_bytes = count * kernels.group_bytes;
      for (int64_t b = 0; b < blocks; ++b) {
        kernels.unpack(weights + b * block_bytes, group, count, slice + b * slice_bytes);
      }
      const bool ends = group + count == groups;
      const uint8_t* next = ends ? weights + blocks * block_bytes : weights + (group / kSliceGroups + 1) * packed_slice;
      float* to = sums;
      for (int64_t tile = begin; tile < last; ++tile) {
        const int64_t row = tiles.first_row(tile), rows = tiles.first_row(tile + 1) - row;
        const uint8_t* panel = tiles.panels + row * tiles.row_bytes;
        for (int64_t b = 0; b < blocks; ++b) {
          prefetch_share(next + b * block_bytes, packed_slice, tile - begin, last - begin);
        }
        for (int64_t r = 0; group == 0 && r < rows; ++r) {
          const f32x16 poison = splat(reinterpret_cast<const float*>(panel)[r]);
          for (int64_t b = 0; b < blocks; ++b) store(to + (r * blocks + b) * 16, poison);
        }
        kernels.add.run[rows][blocks]({panel + rows * (4 + group * row_group), slice, slice_bytes, count * kGroup, to});
        if (ends) done(row, rows, to);
        to += rows * blocks * 16;
      }
    }
  }
}

}  // namespace onward::linear
