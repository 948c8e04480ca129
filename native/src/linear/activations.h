// The activations as the micro-kernels read them.
//
// T rows are cut into tiles of some rows each, and each tile becomes a panel: stretch by stretch along
// K, 64 bytes of each row of the tile (16 float, 32 bf16 or 64 int8), so that a kernel walks one
// stream whatever its number of rows. Where no instruction has their dot products, bf16 lies there as floats
// and int8 as words of 16 bits. Rows end padded with zeros. What the quantized formats need to
// know of a row lies in front of the words:
//   int8   each panel:       int32 start[rows], float scale[rows], then the stretches
//   int4   each panel:       float poison[rows], then
//          each 32 inputs:   int32 start[rows], float unit[rows], then 32 bytes of each row
//   grouped formats    as int4, with a start for each group of 16 where groups are so small; formats with
//                      minima have float -scale * sum in its place, which their minima multiply
// scale is absmax / 127 over the row (int8), or over the 32 inputs and rounded up to a power of two
// (int4); start is -offset times the sum of the quantized inputs, which takes back the 128 or 8 that
// packed weights have added. With a power of two, it is added to the bits of unit = 1.5 * 2^23 * scale:
// then the bits of the sum are those of unit + scale * sum, see `scaled` in kernels.h.
// poison is 0, or NaN for a row with something that is no finite number.
#pragma once
#include "../simd.h"
#include "layout.h"

namespace onward::linear {

constexpr int64_t kStretch = 64;  // bytes

struct Rows {
  const void* data;
  int32_t dtype;
  int64_t stride;               // elements
  const int32_t* at = nullptr;  // where row i is not the i-th in memory: it is the at[i]-th
};

// Bytes of 32 inputs of a row: its starts, its scale, the integers.
constexpr int64_t group_row_bytes(const Grouped& g) { return 4 * g.halves() + 4 + kGroup; }

// Bytes of panel per row.
inline int64_t panel_row_bytes(Format format, int64_t inputs) {
  switch (format) {
    case kPackedF32:
    case kPackedF16: return round_up(inputs * 4, kStretch);
    case kPackedBf16: return round_up(inputs * (kDotsBf16 ? 2 : 4), kStretch);
    case kPackedInt8: return 8 + round_up(inputs, kStretch) * (kDotsBytes ? 1 : 2);
    default: {
      const Grouped g = grouped_of(format);
      if (g.floats) return round_up(inputs, g.unit()) * 4;
      return 4 + ceil_div(inputs, g.unit()) * (g.unit() / kGroup) * group_row_bytes(g);
    }
  }
}

// Writes the panel of rows first … first + count - 1.
void make_panel(Format format, const Rows& x, int64_t first, int64_t count, int64_t inputs,
                uint8_t* panel);

}  // namespace onward::linear
