// The shapes of tiles on each instruction set, and the kernels by shape. linear.cpp chooses among them.
#pragma once
#include "kernels.h"

namespace onward::linear {

#if defined(__AVX512F__)
constexpr int kStreamRows = 16, kTileRows = 8;
constexpr int kBlocks[kStreamRows + 1] = {0, 4, 4, 4, 4, 4, 4, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1};
constexpr int kInt4TileRows = 6, kInt4Blocks = 2, kGroupedStreamRows = 8;
#elif defined(__AVX2__)
constexpr int kStreamRows = 4, kTileRows = 4;
constexpr int kBlocks[kStreamRows + 1] = {0, 4, 2, 1, 1};
constexpr int kInt4TileRows = 4, kInt4Blocks = 1, kGroupedStreamRows = 4;
#else
constexpr int kStreamRows = 4, kTileRows = 4;
constexpr int kBlocks[kStreamRows + 1] = {0, 1, 1, 1, 1};
constexpr int kInt4TileRows = 4, kInt4Blocks = 1, kGroupedStreamRows = 4;
#endif
constexpr int kMaxBlocks = 4;

using KernelFunction = void (*)(const Tile&);
struct KernelTable {
  KernelFunction run[kStreamRows + 1][kMaxBlocks + 1] = {};
};

// Of a format of grouped.h: up to kGroupedStreamRows rows one block at a time, and tiles as int4 has.
const KernelTable& grouped_kernels(Format format);

}  // namespace onward::linear
