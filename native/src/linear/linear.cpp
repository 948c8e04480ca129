// out = x @ weight^T + bias over packed weights: the walk over blocks of weight rows and tiles of
// activation rows. The arithmetic is in kernels.h.
#include "../program.h"
#include "../scratch.h"
#include "../simd.h"
#include "../team.h"
#include "unpacked.h"

// One matrix of a call (LinearArguments in Python).
struct OnwardLinear {
  int64_t n;
  const void *packed, *bias;  // bias or null
  void* out;
  int64_t out_stride;
  int32_t bias_dtype, out_dtype;
};

namespace onward::linear {
namespace {

constexpr int64_t kRowsPerPart = 64;           // of a large T, so that there is enough to share out
constexpr int64_t kRowsPerUnpacking = 256;     // the same where weights are unpacked for them
constexpr int64_t kStreamBytes = 128 << 10;    // weights per group of a stream
constexpr int64_t kInlineBytes = 128 << 10;    // weights times rows not worth a second thread
// Weights so small have likely stayed in a cache since the last token. There, unlike behind the bus,
// one block at a time waits for its own sum; int4 does not: it has two for every block.
constexpr int64_t kCachedBytes = 768 << 10;
constexpr int64_t kResidentBytes = 192 << 10;  // weights per group of large T, used part by part

// One call, and how it is cut: T into `tiles` of nearly equal size (the first t % tiles of them have
// one row more), the tiles into parts, the blocks of all products, one after the other, into groups. A
// chunk of work is one part of the rows times one group of blocks.
struct Problem {
  Format format;
  int64_t t, k;
  const OnwardLinear* products;
  int64_t count;

  int64_t row_bytes = panel_row_bytes(format, k);
  int64_t bytes = block_bytes(format, k);
  int64_t blocks = count_blocks();
  bool int4 = format >= kPackedInt4;  // or as large a kernel
  bool streaming = t <= stream_rows(format);
  bool cached = blocks * bytes <= kCachedBytes && !int4;
  int64_t tile_rows = rows_of_tile(format);
  int64_t tiles = tiles_of(format, t);
  int64_t parts = ceil_div(t, unpacks(format) ? kRowsPerUnpacking : kRowsPerPart);
  int64_t unit = blocks_at_once(streaming ? t : tile_rows);  // groups are whole numbers of it
  int64_t groups = count_groups();
  uint8_t* panels = nullptr;

  int64_t count_blocks() const {
    int64_t sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += blocks_of(products[i].n);
    return sum;
  }
  int64_t first_row(int64_t tile) const { return linear::first_row(t, tiles, tile); }
  int64_t blocks_at_once(int64_t rows) const {
    if (streaming && !cached) return 1;
    return linear::blocks_at_once(format, rows);
  }
  // As many groups as their size asks for, and the same number for every thread.
  int64_t count_groups() const {
    const int64_t units = ceil_div(blocks, unit);
    if (blocks * bytes * t <= kInlineBytes) return 1;
    const int64_t resident = format == kPackedF32 ? kResidentFloatBytes : kResidentBytes;
    const int64_t wanted = ceil_div(blocks * bytes, streaming ? kStreamBytes : resident);
    const int64_t even = round_up(wanted > 1 ? wanted : 1, num_threads());
    return even < units ? even : units;
  }
  int64_t first_block(int64_t group) const {
    const int64_t block = ceil_div(blocks, unit) * group / groups * unit;
    return block < blocks ? block : blocks;
  }
};

// Adds the bias to a finished tile and stores it, without the padding of the last block.
template <class T, class Bias>
void store_tile(const OnwardLinear& product, const float* sums, int64_t row, int64_t rows,
                int64_t block, int64_t blocks) {
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t n = (block + b) * kBlockRows, left = product.n - n;
    f32x16 bias = zero_f32();
    if (product.bias) bias = load_first(static_cast<const Bias*>(product.bias) + n, left);
    for (int64_t r = 0; r < rows; ++r) {
      f32x16 value = load(sums + (r * blocks + b) * 16);
      if (product.bias) value = add(value, bias);
      store_first(static_cast<T*>(product.out) + (row + r) * product.out_stride + n, value, left);
    }
  }
}

void store_tile(const OnwardLinear& product, const float* sums, int64_t row, int64_t rows,
                int64_t block, int64_t blocks) {
  with_dtype(product.out_dtype, [&](auto* out_tag) {
    with_dtype(product.bias_dtype, [&](auto* bias_tag) {
      using T = std::remove_pointer_t<decltype(out_tag)>;
      using Bias = std::remove_pointer_t<decltype(bias_tag)>;
      store_tile<T, Bias>(product, sums, row, rows, block, blocks);
    });
  });
}

// Rows `row` … `row + rows - 1` of a tile times the blocks begin … end - 1 of one product.
void run_tile(const Problem& p, const OnwardLinear& product, int64_t row, int64_t rows,
              int64_t begin, int64_t end) {
  alignas(64) float sums[kStreamRows * kMaxBlocks * 16];
  const KernelTable& table = kernels_of(p.format);
  const uint8_t* panel = p.panels + row * p.row_bytes;
  const auto* weights = static_cast<const uint8_t*>(product.packed);
  const int64_t most = p.blocks_at_once(rows);
  for (int64_t block = begin; block < end;) {
    const int64_t blocks = end - block < most ? end - block : most;
    table.run[rows][blocks]({panel, weights + block * p.bytes, p.bytes, p.k, sums});
    store_tile(product, sums, row, rows, block, blocks);
    block += blocks;
  }
}

// The tiles of one part times the blocks begin … end - 1 of one product.
void run_tiles(const Problem& p, const OnwardLinear& product, int64_t part, int64_t begin, int64_t end) {
  const int64_t first = p.tiles * part / p.parts, last = p.tiles * (part + 1) / p.parts;
  if (p.streaming || !unpacks(p.format)) {
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t row = p.first_row(tile);
      run_tile(p, product, row, p.first_row(tile + 1) - row, begin, end);
    }
    return;
  }
  const auto* weights = static_cast<const uint8_t*>(product.packed);
  for (int64_t block = begin; block < end; block += kInt4Blocks) {
    const int64_t blocks = end - block < kInt4Blocks ? end - block : kInt4Blocks;
    const auto done = [&](int64_t row, int64_t rows, const float* sums) {
      store_tile(product, sums, row, rows, block, blocks);
    };
    run_unpacked(p.format, {p.panels, p.row_bytes, p.t, p.tiles}, first, last, p.k, weights + block * p.bytes, p.bytes,
                 blocks, done);
  }
}

// The tiles of one part times the blocks of one group, which may lie in several products.
void run_chunk(const Problem& p, int64_t group, int64_t part) {
  const int64_t begin = p.first_block(group), end = p.first_block(group + 1);
  int64_t first = 0;  // block of the product among all
  for (int64_t i = 0; i < p.count && first < end; ++i) {
    const int64_t blocks = blocks_of(p.products[i].n);
    const int64_t from = begin > first ? begin - first : 0;
    const int64_t to = end - first < blocks ? end - first : blocks;
    first += blocks;
    if (from < to) run_tiles(p, p.products[i], part, from, to);
  }
}

// The activations of all tiles, made by the team where there are many.
void make_panels(const Problem& p, const Rows& x) {
  constexpr int64_t kInputsPerChunk = 16 << 10;
  parallel_for(p.tiles, ceil_div(kInputsPerChunk, p.tile_rows * (p.k + 1)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t tile = begin; tile < end; ++tile) {
                   const int64_t row = p.first_row(tile), rows = p.first_row(tile + 1) - row;
                   make_panel(p.format, x, row, rows, p.k, p.panels + row * p.row_bytes);
                 }
               });
}

bool known_dtype(int32_t dtype) { return dtype >= kF32 && dtype <= kF16; }

bool valid(const OnwardLinear& product) {
  return product.n >= 0 && known_dtype(product.out_dtype) && known_dtype(product.bias_dtype);
}

}  // namespace
}  // namespace onward::linear

// For each of `count` packed matrices [n, k]: out[t, n] = sum over k of x[t, k] * weight[n, k], + bias[n]
// where it has one. All share x and the format, and one pass of the team. Strides are in elements from
// row to row. x is rounded to the format's activations: float for f32 and f16 weights, bf16 for bf16,
// int8 per row for int8, int8 per group of 32 for int4.
ONWARD_API int32_t onward_linear_many(const OnwardLinear* products, int64_t count, int32_t format,
                                      int64_t t, int64_t k, const void* x, int32_t x_dtype,
                                      int64_t x_stride) {
  using namespace onward;
  using namespace onward::linear;
  if (!known(format) || count < 0 || t < 0 || k < 0 || k > kMaxInputs) return kBadArgument;
  if (!known_dtype(x_dtype)) return kBadArgument;
  for (int64_t i = 0; i < count; ++i) {
    if (!valid(products[i])) return kBadArgument;
  }
  if (t == 0) return kOk;
  Problem p{Format(format), t, k, products, count};
  if (p.blocks == 0) return kOk;
  p.panels = static_cast<uint8_t*>(scratch(kScratchActivations, t * p.row_bytes + 1));
  if (p.panels == nullptr) return kOutOfMemory;
  make_panels(p, {x, x_dtype, x_stride});
  parallel_for(p.groups * p.parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run_chunk(p, i / p.parts, i % p.parts);
  });
  return kOk;
}

static onward::Reads reads_of_linear_many(const OnwardLinear* products, int64_t count,
                                          int32_t format, int64_t, int64_t k, const void*, int32_t,
                                          int64_t) {
  using namespace onward;
  Reads reads;
  const int64_t bytes = linear::block_bytes(linear::Format(format), k);
  for (int64_t i = 0; i < count && i < Reads::kRuns; ++i) {
    const auto address = int64_t(reinterpret_cast<intptr_t>(products[i].packed));
    reads.runs[i] = {address, bytes, bytes, linear::blocks_of(products[i].n)};
  }
  return reads;
}
ONWARD_INSTRUCTION_READS(onward_linear_many, reads_of_linear_many);

namespace onward::linear {
namespace {

constexpr int64_t kPanelBytes = 1 << 20;  // of the heads that share a pass, where one has no more

// Products of one shape, each of its own features of every row, and the pieces into which one of them is cut.
struct Heads {
  Format format;
  int64_t t, n, k;
  Rows x;  // of head 0
  int64_t x_step;
  const uint8_t* packed;
  uint8_t* out;
  int64_t out_step, out_stride;
  int32_t out_dtype;

  OnwardLinear product(int64_t head) const {
    const int64_t matrix_bytes = blocks_of(n) * block_bytes(format, k);
    void* to = out + head * out_step * element_size(out_dtype);
    return {n, packed + head * matrix_bytes, nullptr, to, out_stride, kF32, out_dtype};
  }
  Rows rows(int64_t head) const {
    const auto* from = static_cast<const uint8_t*>(x.data) + head * x_step * element_size(x.dtype);
    return {from, x.dtype, x.stride};
  }
};

// Heads first … end - 1, whose panels lie one after the other from `panels` on.
void run_heads(const Heads& heads, int64_t first, int64_t end, uint8_t* panels) {
  const OnwardLinear sample = heads.product(first);
  Problem cut{heads.format, heads.t, heads.k, &sample, 1};
  const int64_t pieces = cut.groups * cut.parts, panel_bytes = heads.t * cut.row_bytes;
  for (int64_t head = first; head < end; ++head) {
    cut.panels = panels + (head - first) * panel_bytes;
    make_panels(cut, heads.rows(head));
  }
  parallel_for((end - first) * pieces, 1, [&](int64_t begin, int64_t last) {
    for (int64_t i = begin; i < last; ++i) {
      const OnwardLinear product = heads.product(first + i / pieces);
      Problem p = cut;
      p.products = &product;
      p.panels = panels + i / pieces * panel_bytes;
      run_chunk(p, i % pieces / cut.parts, i % cut.parts);
    }
  });
}

}  // namespace
}  // namespace onward::linear

// A matrix [n, k] for each head, packed one after the other: out[t, h, n] = sum over k of x[t, h, k] * weight[h, n, k].
// Strides are in elements, from row to row and from head to head. Bits are those of onward_linear_many for each head.
ONWARD_API int32_t onward_linear_by_head(int32_t format, int64_t t, int64_t heads, int64_t n, int64_t k,
                                         const void* x, int32_t x_dtype, int64_t x_stride,
                                         int64_t x_head_stride, const void* packed, void* out,
                                         int32_t out_dtype, int64_t out_stride, int64_t out_head_stride) {
  using namespace onward;
  using namespace onward::linear;
  if (!known(format) || t < 0 || heads < 0 || n < 0 || k < 0 || k > kMaxInputs) return kBadArgument;
  if (!known_dtype(x_dtype) || !known_dtype(out_dtype)) return kBadArgument;
  if (t == 0 || heads == 0 || n == 0) return kOk;
  const int64_t panel_bytes = t * panel_row_bytes(Format(format), k);
  int64_t at_once = kPanelBytes / (panel_bytes + 1);
  at_once = at_once < 1 ? 1 : at_once > heads ? heads : at_once;
  auto* panels = static_cast<uint8_t*>(scratch(kScratchActivations, at_once * panel_bytes + 1));
  if (panels == nullptr) return kOutOfMemory;
  const Heads all{Format(format), t, n, k, {x, x_dtype, x_stride}, x_head_stride,
                  static_cast<const uint8_t*>(packed), static_cast<uint8_t*>(out), out_head_stride,
                  out_stride, out_dtype};
  for (int64_t first = 0; first < heads; first += at_once) {
    run_heads(all, first, first + at_once < heads ? first + at_once : heads, panels);
  }
  return kOk;
}

static onward::Reads reads_of_linear_by_head(int32_t format, int64_t, int64_t heads, int64_t n, int64_t k,
                                             const void*, int32_t, int64_t, int64_t, const void* packed,
                                             void*, int32_t, int64_t, int64_t) {
  using namespace onward;
  Reads reads;
  const int64_t bytes = linear::block_bytes(linear::Format(format), k);
  reads.runs[0] = {int64_t(reinterpret_cast<intptr_t>(packed)), bytes, bytes, heads * linear::blocks_of(n)};
  return reads;
}
ONWARD_INSTRUCTION_READS(onward_linear_by_head, reads_of_linear_by_head);
