// The shapes of tiles on each instruction set, and the kernels by shape. linear.cpp and the experts choose among them.
#pragma once
#include "kernels.h"

namespace onward::linear {

// Up to kStreamRows rows go through the weights once, block after block, at the pace of
// memory (through few weights some blocks at a time). More rows are cut into tiles of at most
// kTileRows, for which the weights stay in the second level cache; such a tile of r rows takes
// kBlocks[r] blocks at a time, so that the sums and the operands fit into the registers. int4, with two
// sums for every output, takes smaller ones.
using namespace shapes::linear;
constexpr int kMaxBlocks = 4;

using KernelFunction = void (*)(const Tile&);
struct KernelTable {
  KernelFunction run[kStreamRows + 1][kMaxBlocks + 1] = {};
};

// int4 and the grouped formats have kernels for one block at a time here, and for tiles in unpacked.h.
const KernelTable& kernels_of(Format format);
const KernelTable& grouped_kernels(Format format);

// Up to so many rows go through the weights at once.
inline int64_t stream_rows(Format format) {
  return is_grouped(format) ? kGroupedStreamRows : kStreamRows;
}

// Rows that are cut into tiles of nearly equal size: the first rows % tiles of them have one row more.
inline int64_t rows_of_tile(Format format) {
  return format >= kPackedInt4 ? kInt4TileRows : kTileRows;
}
inline int64_t tiles_of(Format format, int64_t rows) {
  return rows <= stream_rows(format) ? 1 : ceil_div(rows, rows_of_tile(format));
}
inline int64_t first_row(int64_t rows, int64_t tiles, int64_t tile) {
  const int64_t longer = rows % tiles;
  return rows / tiles * tile + (tile < longer ? tile : longer);
}

// How many blocks a tile takes at a time where the weights lie in a cache.
inline int64_t blocks_at_once(Format format, int64_t rows) {
  return format >= kPackedInt4 ? kInt4Blocks : kBlocks[rows];
}

}  // namespace onward::linear
