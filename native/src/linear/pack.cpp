// Between row-major matrices and packed weights, in both directions, and single rows out of them.
#include <cstring>

#include "../program.h"
#include "../simd.h"
#include "../team.h"
#include "layout.h"

namespace onward::linear {
namespace {

bool valid(int32_t format, int64_t rows, int64_t inputs) {
  return known(format) && rows >= 0 && inputs >= 0 && inputs <= kMaxInputs;
}

// Runs body(block, first_row, rows_in_block) for all blocks.
template <class Body>
void for_blocks(Format format, int64_t rows, int64_t inputs, const void* packed, Body&& body) {
  uint8_t* data = static_cast<uint8_t*>(const_cast<void*>(packed));
  const int64_t bytes = block_bytes(format, inputs);
  parallel_for(blocks_of(rows), 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * kBlockRows;
      body(data + b * bytes, first, rows - first < kBlockRows ? rows - first : kBlockRows);
    }
  });
}

// Packs one block of 16 rows: converts a stretch of each row to T, then deals the rows out in units of
// the layout (uint32_t: 1 float or 2 bf16; uint16_t: 1 f16).
template <class T, class Unit, class From>
void pack_block(const From* w, int64_t stride, int64_t count, int64_t inputs, uint8_t* block) {
  constexpr int64_t kStretch = 64, kPerUnit = sizeof(Unit) / sizeof(T);
  alignas(64) T rows[kBlockRows][kStretch];
  Unit* to = reinterpret_cast<Unit*>(block);
  for (int64_t k = 0; k < inputs; k += kStretch) {
    const int64_t n = inputs - k < kStretch ? inputs - k : kStretch;
    for (int64_t r = 0; r < kBlockRows; ++r) {
      for (int64_t i = 0; i < kStretch; i += 16) {
        const int64_t left = r < count && n > i ? n - i : 0;
        store(rows[r] + i, left > 0 ? load_first(w + r * stride + k + i, left) : zero_f32());
      }
    }
    for (int64_t unit = 0; unit < ceil_div(n, kPerUnit); ++unit) {
      for (int64_t r = 0; r < kBlockRows; ++r) {
        std::memcpy(to++, rows[r] + unit * kPerUnit, sizeof(Unit));
      }
    }
  }
  const int64_t bytes = reinterpret_cast<uint8_t*>(to) - block;  // f16, an odd number of inputs
  if (bytes % 64 != 0) std::memset(to, 0, size_t(64 - bytes % 64));
}

// Where the line of an int4 block starts that holds the inputs 8 * line … 8 * line + 7.
inline int64_t int4_line(int64_t line) { return line / 8 * kInt4Pair + 64 + line % 8 * 64; }
inline int64_t int4_scales(int64_t group) { return group / 2 * kInt4Pair + group % 2 * 32; }

// The integers of row r of an int8 or int4 block.
void int8_values(const uint8_t* block, int64_t r, int64_t inputs, int8_t* q) {
  for (int64_t k = 0; k < inputs; ++k) {
    q[k] = int8_t(block[kInt8Header + k / 4 * 64 + r * 4 + k % 4] - 128);
  }
}
void int4_values(const uint8_t* block, int64_t r, int64_t inputs, int8_t* q) {
  for (int64_t line = 0; line < ceil_div(inputs, 8); ++line) {
    uint32_t word;
    std::memcpy(&word, block + int4_line(line) + r * 4, 4);
    for (int64_t i = 0; i < 8 && line * 8 + i < inputs; ++i) {
      q[line * 8 + i] = int8_t(int(word >> (i % 4 * 8 + i / 4 * 4) & 15) - 8);
    }
  }
}

float half_as_float(const uint8_t* p) {
  F16 one[16] = {};
  std::memcpy(one, p, sizeof(F16));
  alignas(64) float values[16];
  store(values, load(one));
  return values[0];
}

float e4m3(uint8_t byte) {
  uint8_t bytes[16] = {byte};
  alignas(64) float values[16];
  store(values, e4m3_256th(bytes));
  return values[0] * 256.0f;
}

// A plane's field of input i of 32 in row r; `bits` bits wide.
int field_of(const uint8_t* lines, int bits, int64_t r, int64_t i) {
  const int64_t fields = 8 / bits;
  return lines[i / (4 * fields) * 64 + r * 4 + i % 4] >> i / 4 % fields * bits & ((1 << bits) - 1);
}

// The value of a code of a grouped format: input i of the 32 whose codes these are.
float grouped_value(const Grouped& g, const uint8_t* codes, int64_t r, int64_t i) {
  if (g.floats && g.bits == 8) return e4m3(codes[i * 16 + r]);
  const int low = g.bits == 8 ? 8 : g.bits >= 4 ? 4 : 2;
  int code = field_of(codes, low, r, i);
  if (g.bits > low) code |= field_of(codes + low * 64, g.bits - low, r, i) << low;
  if (g.floats) return kNf4[code];
  return g.table != nullptr ? g.table[code] : float(code - g.offset);
}

// Scale and minimum (or zero point) of a group of row r, from the header of its unit.
struct Levels {
  float scale, minimum;
};
Levels grouped_levels(const Grouped& g, const uint8_t* unit, int64_t r, int64_t group) {
  if (g.exponent) {
    const uint32_t e = unit[group * 16 + r];
    const uint32_t bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return {scale, 0.0f};
  }
  if (g.zeros) {
    const float zero = unit[g.unit() / g.group * 32 + group * 16 + r];
    return {half_as_float(unit + group * 32 + r * 2), zero};
  }
  if (g.floats || g.divided) {
    const float number = reinterpret_cast<const float*>(unit)[r];
    return {g.divided ? e4m3(unit[64 + group * 16 + r]) * 0.5f / number : number, 0.0f};
  }
  if (g.levels == 1) {
    const uint8_t* minima = unit + g.unit() / g.group * 32;
    return {half_as_float(unit + group * 32 + r * 2),
            g.minimum ? half_as_float(minima + group * 32 + r * 2) : 0.0f};
  }
  const uint8_t* sub = unit + 64 + group * (g.minimum ? 32 : 16) + r;
  const float scale = g.is_signed ? float(int8_t(*sub)) : float(*sub);
  return {scale * half_as_float(unit + r * 2),
          g.minimum ? float(sub[16]) * half_as_float(unit + 32 + r * 2) : 0.0f};
}

// 16 values of row r of a grouped block, from input k on (a multiple of 16), with ggml's roundings.
f32x16 sixteen_grouped(const Grouped& g, const uint8_t* block, int64_t r, int64_t k) {
  const uint8_t* unit = block + k / g.unit() * g.unit_bytes();
  const int64_t inside = k % g.unit();
  const uint8_t* codes = unit + g.header_bytes() + inside / 32 * g.codes_bytes();
  const Levels levels = grouped_levels(g, unit, r, inside / g.group);
  alignas(64) float values[16];
  for (int64_t i = 0; i < 16; ++i) values[i] = grouped_value(g, codes, r, inside % 32 + i);
  if (g.zeros) return mul(sub(load(values), splat(levels.minimum)), splat(levels.scale));
  const f32x16 scaled = mul(load(values), splat(levels.scale));
  return g.minimum ? sub(scaled, splat(levels.minimum)) : scaled;
}

// The values of row r of a block, inputs k … k + 15 (k a multiple of 16), past the end undefined.
f32x16 sixteen_values(Format format, const uint8_t* block, int64_t r, int64_t k, int64_t inputs) {
  if (is_grouped(format)) return sixteen_grouped(grouped_of(format), block, r, k);
  alignas(64) float values[16] = {};
  const int64_t n = inputs - k < 16 ? inputs - k : 16;
  if (format == kPackedF32) {
    const float* from = reinterpret_cast<const float*>(block) + k * 16 + r;
    for (int64_t i = 0; i < n; ++i) values[i] = from[i * 16];
  } else if (format == kPackedBf16) {
    Bf16 row[16] = {};
    for (int64_t i = 0; i < n; i += 2) std::memcpy(row + i, block + (k + i) * 32 + r * 4, 4);
    return load(row);
  } else if (format == kPackedF16) {
    F16 row[16] = {};
    for (int64_t i = 0; i < n; ++i) std::memcpy(row + i, block + (k + i) * 32 + r * 2, 2);
    return load(row);
  } else {
    int8_t q[16] = {};
    f32x16 scale;
    if (format == kPackedInt8) {
      int8_values(block + k * 16, r, n, q);
      scale = splat(reinterpret_cast<const float*>(block)[r]);
    } else {
      const uint8_t* lines = block + int4_line(k / 8) - 64;
      int4_values(lines, r, n, q);
      F16 one[16] = {reinterpret_cast<const F16*>(block + int4_scales(k / kGroup))[r]};
      store(values, load(one));
      scale = splat(values[0]);
    }
    for (int64_t i = 0; i < 16; ++i) values[i] = float(q[i]);
    return mul(load(values), scale);
  }
  return load(values);
}

}  // namespace
}  // namespace onward::linear

using namespace onward;
using namespace onward::linear;

ONWARD_API int64_t onward_linear_packed_bytes(int32_t format, int64_t rows, int64_t inputs) {
  if (!valid(format, rows, inputs)) return -1;
  return blocks_of(rows) * block_bytes(Format(format), inputs);
}

// Packs w [rows, inputs] into the formats f32, bf16 and f16, rounding to nearest even.
ONWARD_API int32_t onward_linear_pack(int32_t format, int64_t rows, int64_t inputs, const void* w,
                                      int32_t w_dtype, int64_t w_stride, void* packed) {
  if (!valid(format, rows, inputs) || format > kPackedF16) return kBadArgument;
  const bool ok = with_dtype(w_dtype, [&](auto* tag) {
    using From = std::remove_pointer_t<decltype(tag)>;
    for_blocks(Format(format), rows, inputs, packed, [&](uint8_t* block, int64_t row, int64_t n) {
      const From* from = static_cast<const From*>(w) + row * w_stride;
      if (format == kPackedF32) pack_block<float, uint32_t>(from, w_stride, n, inputs, block);
      if (format == kPackedBf16) pack_block<Bf16, uint32_t>(from, w_stride, n, inputs, block);
      if (format == kPackedF16) pack_block<F16, uint16_t>(from, w_stride, n, inputs, block);
    });
  });
  return ok ? kOk : kBadArgument;
}

// out[i] = the values of row ids[i], or of row i where ids is null. An id outside 0 … rows-1 is an
// error, and nothing is written.
ONWARD_API int32_t onward_linear_rows(int32_t format, int64_t rows, int64_t inputs,
                                      const void* packed, const int64_t* ids, int64_t count,
                                      void* out, int32_t out_dtype, int64_t out_stride) {
  if (!valid(format, rows, inputs)) return kBadArgument;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = ids != nullptr ? ids[i] : i;
    if (row < 0 || row >= rows) return kBadArgument;
  }
  const int64_t bytes = block_bytes(Format(format), inputs);
  const bool ok = with_dtype(out_dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(count, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = ids != nullptr ? ids[i] : i;
        const uint8_t* block = static_cast<const uint8_t*>(packed) + row / kBlockRows * bytes;
        T* to = static_cast<T*>(out) + i * out_stride;
        for (int64_t k = 0; k < inputs; k += 16) {
          store_first(to + k, sixteen_values(Format(format), block, row % kBlockRows, k, inputs),
                      inputs - k);
        }
      }
    });
  });
  return ok ? kOk : kBadArgument;
}
ONWARD_INSTRUCTION(onward_linear_rows);
