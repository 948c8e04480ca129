// Blocks of GGUF's types, as they lie in a file, into the grouped formats of layout.h; nothing is lost.
#include <atomic>
#include <cstring>

#include "../api.h"
#include "../team.h"
#include "layout.h"

namespace onward::linear {
namespace {

// A block of 32 or 256 weights, unpacked. minimum, of formats that have one, is what is subtracted.
struct Block {
  uint8_t codes[256];
  uint16_t scale, minimum;  // float16 (MXFP4: the exponent)
  uint8_t sub_scales[16], sub_minima[16];
};

uint16_t half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return bits;
}
uint16_t negated(uint16_t half) { return half ^ 0x8000; }

// n bytes: the low 4 bits of each to codes, the high to codes + apart.
void split_nibbles(const uint8_t* p, int n, int apart, uint8_t* codes) {
  for (int i = 0; i < n; ++i) codes[i] = p[i] & 15, codes[apart + i] = p[i] >> 4;
}
// Bit i of 4 bytes to bit 4 of code i.
void add_fifth_bits(const uint8_t* p, uint8_t* codes) {
  for (int i = 0; i < 32; ++i) codes[i] = uint8_t(codes[i] | (p[i / 8] >> i % 8 & 1) << 4);
}

// 12 bytes: 8 scales and 8 minima of 6 bits. (blocks.py of checkpoint/gguf has the order in words.)
void read_sub_scales(const uint8_t* s, Block& block) {
  for (int i = 0; i < 4; ++i) {
    block.sub_scales[i] = s[i] & 63, block.sub_minima[i] = s[4 + i] & 63;
    block.sub_scales[4 + i] = uint8_t((s[8 + i] & 15) | s[i] >> 6 << 4);
    block.sub_minima[4 + i] = uint8_t(s[8 + i] >> 4 | s[4 + i] >> 6 << 4);
  }
}

void read_q8_0(const uint8_t* p, Block& block) {
  block.scale = half_at(p);
  for (int i = 0; i < 32; ++i) block.codes[i] = p[2 + i] ^ 128;
}
void read_q4_0(const uint8_t* p, Block& block) {
  block.scale = half_at(p);
  split_nibbles(p + 2, 16, 16, block.codes);
}
void read_q4_1(const uint8_t* p, Block& block) {
  block.scale = half_at(p), block.minimum = negated(half_at(p + 2));
  split_nibbles(p + 4, 16, 16, block.codes);
}
void read_q5_0(const uint8_t* p, Block& block) {
  block.scale = half_at(p);
  split_nibbles(p + 6, 16, 16, block.codes);
  add_fifth_bits(p + 2, block.codes);
}
void read_q5_1(const uint8_t* p, Block& block) {
  block.scale = half_at(p), block.minimum = negated(half_at(p + 2));
  split_nibbles(p + 8, 16, 16, block.codes);
  add_fifth_bits(p + 4, block.codes);
}
void read_mxfp4(const uint8_t* p, Block& block) {
  block.scale = p[0];
  split_nibbles(p + 1, 16, 16, block.codes);
}
void read_q4_k(const uint8_t* p, Block& block) {
  block.scale = half_at(p), block.minimum = half_at(p + 2);
  read_sub_scales(p + 4, block);
  for (int c = 0; c < 4; ++c) split_nibbles(p + 16 + 32 * c, 32, 32, block.codes + 64 * c);
}
void read_q5_k(const uint8_t* p, Block& block) {
  block.scale = half_at(p), block.minimum = half_at(p + 2);
  read_sub_scales(p + 4, block);
  for (int c = 0; c < 4; ++c) split_nibbles(p + 48 + 32 * c, 32, 32, block.codes + 64 * c);
  for (int g = 0; g < 8; ++g) {
    for (int i = 0; i < 32; ++i) {
      uint8_t& code = block.codes[32 * g + i];
      code = uint8_t(code | (p[16 + i] >> g & 1) << 4);
    }
  }
}
void read_q6_k(const uint8_t* p, Block& block) {
  block.scale = half_at(p + 208);
  std::memcpy(block.sub_scales, p + 192, 16);
  for (int h = 0; h < 2; ++h) {
    uint8_t* codes = block.codes + 128 * h;
    split_nibbles(p + 64 * h, 64, 64, codes);
    for (int field = 0; field < 4; ++field) {
      for (int i = 0; i < 32; ++i) {
        uint8_t& code = codes[32 * field + i];
        code = uint8_t(code | (p[128 + 32 * h + i] >> 2 * field & 3) << 4);
      }
    }
  }
}
void read_q2_k(const uint8_t* p, Block& block) {
  block.scale = half_at(p + 80), block.minimum = half_at(p + 82);
  for (int i = 0; i < 16; ++i) block.sub_scales[i] = p[i] & 15, block.sub_minima[i] = p[i] >> 4;
  for (int i = 0; i < 256; ++i) block.codes[i] = p[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
}
void read_q3_k(const uint8_t* p, Block& block) {
  block.scale = half_at(p + 108);
  for (int i = 0; i < 16; ++i) {
    const int low = p[96 + i % 8] >> i / 8 * 4 & 15, high = p[104 + i % 4] >> i / 4 * 2 & 3;
    block.sub_scales[i] = uint8_t((low | high << 4) - 32);
  }
  for (int i = 0; i < 256; ++i) {
    const int low = p[32 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
    block.codes[i] = uint8_t(low | (p[i % 32] >> i / 32 & 1) << 2);
  }
}
void read_iq4_xs(const uint8_t* p, Block& block) {
  block.scale = half_at(p);
  const uint16_t high = half_at(p + 2);
  for (int g = 0; g < 8; ++g) {
    const int low = p[4 + g / 2] >> g % 2 * 4 & 15;
    block.sub_scales[g] = uint8_t((low | (high >> 2 * g & 3) << 4) - 32);
    split_nibbles(p + 8 + 16 * g, 16, 16, block.codes + 32 * g);
  }
}

// How a type's blocks are read, and where they go.
struct Source {
  int64_t bytes;  // of a block
  void (*read)(const uint8_t*, Block&);
};
Source source_of(int32_t format) {
  switch (format) {
    case kPackedInt4: return {18, read_q4_0};
    case kPackedQ8_0: return {34, read_q8_0};
    case kPackedQ4_1: return {20, read_q4_1};
    case kPackedQ5_0: return {22, read_q5_0};
    case kPackedQ5_1: return {24, read_q5_1};
    case kPackedQ4K: return {144, read_q4_k};
    case kPackedQ5K: return {176, read_q5_k};
    case kPackedQ6K: return {210, read_q6_k};
    case kPackedQ2K: return {84, read_q2_k};
    case kPackedQ3K: return {110, read_q3_k};
    case kPackedIq4Nl: return {18, read_q4_0};
    case kPackedIq4Xs: return {136, read_iq4_xs};
    case kPackedMxfp4: return {17, read_mxfp4};
    default: return {0, nullptr};
  }
}

uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

// Four codes' bits from `from` on, `bits` of them, at the bottom of their bytes.
uint32_t field(uint32_t codes, int from, int bits) {
  return codes >> from & 0x01010101u * ((1u << bits) - 1);
}

// Writes the plane of `bits` bits, from bit `from` of 32 codes of a row: lines of 8 / bits fields.
uint8_t* put_plane(const uint8_t* codes, int from, int bits, int64_t row, uint8_t* lines) {
  const int fields = 8 / bits;
  for (int line = 0; line < bits; ++line) {
    uint32_t word = 0;
    for (int i = 0; i < fields; ++i) {
      word |= field(word_at(codes + (line * fields + i) * 4), from, bits) << i * bits;
    }
    std::memcpy(lines + line * 64 + row * 4, &word, 4);
  }
  return lines + bits * 64;
}

void put_codes(const Grouped& g, const uint8_t* codes, int64_t row, uint8_t* to) {
  const int low = g.bits == 8 ? 8 : g.bits >= 4 ? 4 : 2;
  to = put_plane(codes, 0, low, row, to);
  if (g.bits > low) put_plane(codes, low, g.bits - low, row, to);
}

// Writes a block's scales into its unit's header. `at`: which of the unit's blocks it is.
void put_scales(const Grouped& g, const Block& block, int64_t at, int64_t row, uint8_t* unit) {
  if (g.exponent) {
    unit[at * 16 + row] = uint8_t(block.scale);
    return;
  }
  std::memcpy(unit + at * 32 + row * 2, &block.scale, 2);
  const int64_t minima = g.levels == 2 ? 32 : g.unit() / g.group * 32;
  if (g.minimum) std::memcpy(unit + minima + at * 32 + row * 2, &block.minimum, 2);
  if (g.levels == 1) return;
  const int64_t step = g.minimum ? 32 : 16;
  for (int64_t i = 0; i < 256 / g.group; ++i) {
    unit[64 + i * step + row] = block.sub_scales[i];
    if (g.minimum) unit[64 + i * step + 16 + row] = block.sub_minima[i];
  }
}

// Whether a block's scales are numbers; E8M0 has one exponent that stands for none.
bool finite(const Grouped& g, const Block& block) {
  if (g.exponent) return block.scale != 255;
  return (block.scale & 0x7c00) != 0x7c00 && (!g.minimum || (block.minimum & 0x7c00) != 0x7c00);
}

// Packs one row of blocks; false if it has a scale that is no number.
bool pack_row(const Grouped& g, const Source& source, const uint8_t* blocks, int64_t inputs,
              int64_t row, uint8_t* packed) {
  const int64_t weights = g.levels == 2 ? 256 : 32;
  bool numbers = true;
  Block block;
  for (int64_t k = 0; k < inputs; k += weights, blocks += source.bytes) {
    source.read(blocks, block);
    numbers &= finite(g, block);
    uint8_t* unit = packed + k / g.unit() * g.unit_bytes();
    const int64_t at = k % g.unit() / weights, first = at * weights / 32;
    put_scales(g, block, at, row, unit);
    for (int64_t i = 0; i < weights / 32; ++i) {
      put_codes(g, block.codes + 32 * i, row, unit + g.header_bytes() + (first + i) * g.codes_bytes());
    }
  }
  return numbers;
}

// What fills up a row of a block from input k on: codes that stand for 0 (in a table, the first), scales 0.
void fill_row(const Grouped& g, int64_t k, int64_t inputs, int64_t row, uint8_t* packed) {
  uint8_t codes[32];
  std::memset(codes, g.table != nullptr ? 0 : g.offset, sizeof codes);
  for (; k < round_up(inputs, g.unit()); k += 32) {
    uint8_t* unit = packed + k / g.unit() * g.unit_bytes();
    put_codes(g, codes, row, unit + g.header_bytes() + k % g.unit() / 32 * g.codes_bytes());
  }
}

}  // namespace
}  // namespace onward::linear

// Packs rows of a file's blocks, row_bytes apart, of the type that `format` holds. An error where the inputs
// are no whole number of blocks, or a scale is infinite or NaN.
ONWARD_API int32_t onward_linear_pack_blocks(int32_t format, int64_t rows, int64_t inputs,
                                             const void* blocks, int64_t row_bytes, void* packed) {
  using namespace onward;
  using namespace onward::linear;
  const Source source = source_of(format);
  const Grouped g = grouped_of(format);
  if (source.read == nullptr || rows < 0 || inputs < 0 || inputs > kMaxInputs) return kBadArgument;
  if (inputs % (g.levels == 2 ? 256 : 32) != 0) return kBadArgument;
  const int64_t bytes = block_bytes(Format(format), inputs);
  std::atomic<bool> numbers{true};
  parallel_for(blocks_of(rows), 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      auto* to = static_cast<uint8_t*>(packed) + b * bytes;
      std::memset(to, 0, size_t(bytes));
      for (int64_t row = 0; row < kBlockRows; ++row) {
        const int64_t at = b * kBlockRows + row;
        fill_row(g, at < rows ? inputs : 0, inputs, row, to);
        if (at >= rows) continue;
        const auto* from = static_cast<const uint8_t*>(blocks) + at * row_bytes;
        if (!pack_row(g, source, from, inputs, row, to)) numbers = false;
      }
    }
  });
  return numbers ? kOk : kBadArgument;
}
