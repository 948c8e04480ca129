// Computes each token with the experts chosen for it:
//   out[t] = sum over e of weight[t, e] * (down_e(activation(gate_e(x[t]), up_e(x[t]))))
//
// Tokens are sorted by expert, so that each chosen expert is read once for all of its tokens. There are two
// parallel loops, over gate and up and over down. The first is divided by experts, rows and blocks, the
// second by columns of the result. So one thread adds up a token's sum, in the order of the experts'
// numbers. A token's bits depend on that token alone: the products are those of linear/kernels.h.
#include "experts.h"

#include <cstring>

#include "../program.h"
#include "../scratch.h"
#include "../simd_math.h"
#include "../team.h"

namespace onward::experts {
namespace {

using namespace linear;

constexpr int64_t kMostRows = 8192;            // at once, to limit working memory
constexpr int64_t kStreamBytes = 128 << 10;    // weights per piece, with few rows
constexpr int64_t kResidentBytes = 192 << 10;  // weights per piece, with many rows: they stay in a cache
constexpr int64_t kInlineBytes = 128 << 10;    // up to this many weights times rows, one thread is faster
constexpr int64_t kPiecesPerThread = 4;

f32x16 bias_at(const void* biases, int32_t dtype, int64_t place, int64_t left) {
  f32x16 bias = zero_f32();
  if (biases == nullptr) return bias;
  with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    bias = load_first(static_cast<const T*>(biases) + place, left);
  });
  return bias;
}

struct Swiglu {
  f32x16 operator()(f32x16 gate, f32x16 up) const { return mul(times_sigmoid(gate, gate), up); }
};
struct Geglu {
  f32x16 operator()(f32x16 gate, f32x16 up) const { return mul(mul(gate, normal_cdf(gate)), up); }
};
struct GegluTanh {
  f32x16 operator()(f32x16 gate, f32x16 up) const { return mul(gelu_tanh(gate), up); }
};
// The order of the operands of min and max propagates NaN.
struct ClampedSwiglu {
  float alpha, limit;
  f32x16 operator()(f32x16 gate, f32x16 up) const {
    gate = min(splat(limit), gate);
    up = max(splat(-limit), min(splat(limit), up));
    return mul(times_sigmoid(gate, mul(splat(alpha), gate)), add(up, splat(1.0f)));
  }
};

// Has no gate.
struct Relu2 {
  f32x16 operator()(f32x16, f32x16 up) const {
    up = max(zero_f32(), up);
    return mul(up, up);
  }
};

// Calls body(first row in the part, rows) for each tile of a part.
template <class Body>
inline void for_tiles(Format format, int64_t rows, Body&& body) {
  const int64_t tiles = tiles_of(format, rows);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t row = first_row(rows, tiles, tile);
    body(row, first_row(rows, tiles, tile + 1) - row);
  }
}

// The number of blocks to multiply at once: one for few rows, which are limited by memory bandwidth.
int64_t step_of(Format format, int64_t part_rows, int64_t tile_rows) {
  return part_rows <= stream_rows(format) ? 1 : blocks_at_once(format, tile_rows);
}

// The matrices of one part: one or two, which take turns, so that each stream's prefetches reach its own next block.
struct Matrices {
  const void* weights[2];
  int64_t first_block, inputs;  // first_block: of the part's expert
  const uint8_t* panels;
};

// A part's rows times the blocks begin … end - 1: done(matrix, row, rows, block, blocks, products) gets each tile's
// products, [rows, blocks, 16].
template <class Done>
inline void multiply(const Work& w, const Part& part, const Matrices& m, int64_t begin, int64_t end, Done&& done) {
  const int64_t bytes = block_bytes(w.format, m.inputs), row_bytes = panel_row_bytes(w.format, m.inputs);
  const auto each_step = [&](int64_t most, auto&& body) {
    for (int64_t block = begin; block < end; block += most) {
      const int64_t blocks = end - block < most ? end - block : most;
      for (int matrix = 0; matrix < 2; ++matrix) {
        if (m.weights[matrix] == nullptr) continue;
        body(matrix, block, blocks, static_cast<const uint8_t*>(m.weights[matrix]) + (m.first_block + block) * bytes);
      }
    }
  };
  if (part.rows > stream_rows(w.format) && unpacks(w.format)) {
    const Tiles tiles{m.panels, row_bytes, part.rows, tiles_of(w.format, part.rows), part.first};
    each_step(kInt4Blocks, [&](int matrix, int64_t block, int64_t blocks, const uint8_t* weights) {
      const auto done_tile = [&](int64_t row, int64_t rows, const float* products) {
        done(matrix, row, rows, block, blocks, products);
      };
      run_unpacked(w.format, tiles, 0, tiles.count, m.inputs, weights, bytes, blocks, done_tile);
    });
    return;
  }
  alignas(64) float products[kStreamRows * kMaxBlocks * 16];
  const KernelTable& table = kernels_of(w.format);
  for_tiles(w.format, part.rows, [&](int64_t row, int64_t rows) {
    row += part.first;
    each_step(step_of(w.format, part.rows, rows), [&](int matrix, int64_t block, int64_t blocks, const uint8_t* weights) {
      table.run[rows][blocks]({m.panels + row * row_bytes, weights, bytes, m.inputs, products});
      done(matrix, row, rows, block, blocks, products);
    });
  });
}

// ── gate and up ───────────────────────────────────────────────────────────────────────────────────

template <class F>
void activate(const Work& w, const Part& part, const Piece& piece, F activation) {
  const OnwardExperts& call = w.call;
  for (int64_t n = piece.begin * kBlockRows; n < piece.end * kBlockRows; n += 16) {
    const int64_t place = part.expert * call.inner + n, left = call.inner - n;
    const f32x16 gate_bias = bias_at(call.gate_bias, call.bias_dtype, place, left);
    const f32x16 up_bias = bias_at(call.up_bias, call.bias_dtype, place, left);
    for (int64_t row = part.first; row < part.first + part.rows; ++row) {
      float* gate = w.gate + row * w.inner_stride + n;
      const float* up = w.up + row * w.inner_stride + n;
      store(gate, activation(add(load(gate), gate_bias), add(load(up), up_bias)));
    }
  }
}

void activate(const Work& w, const Part& part, const Piece& piece) {
  switch (w.call.activation) {
    case kSwiglu: return activate(w, part, piece, Swiglu{});
    case kGeglu: return activate(w, part, piece, Geglu{});
    case kGegluTanh: return activate(w, part, piece, GegluTanh{});
    case kRelu2: return activate(w, part, piece, Relu2{});
    default: return activate(w, part, piece, ClampedSwiglu{w.call.alpha, w.call.limit});
  }
}

void gate_and_up(const Work& w, const Piece& piece) {
  const Part& part = w.parts[piece.part];
  const Matrices matrices{{w.call.gate, w.call.up}, part.expert * w.up_blocks, w.call.width, w.panels};
  multiply(w, part, matrices, piece.begin, piece.end,
           [&](int matrix, int64_t row, int64_t rows, int64_t block, int64_t blocks, const float* products) {
             float* to = (matrix == 0 ? w.gate : w.up) + row * w.inner_stride + block * kBlockRows;
             for (int64_t r = 0; r < rows; ++r) {
               std::memcpy(to + r * w.inner_stride, products + r * blocks * 16, size_t(blocks) * 64);
             }
           });
  activate(w, part, piece);
}

// ── down ──────────────────────────────────────────────────────────────────────────────────────────

// sums[token] += weight * (product + bias) for the rows of a finished tile.
void add_tile(const Work& w, int64_t expert, int64_t row, int64_t rows, int64_t block,
              int64_t blocks, const float* products) {
  const OnwardExperts& call = w.call;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t n = (block + b) * kBlockRows;
    const f32x16 bias = bias_at(call.down_bias, call.bias_dtype, expert * call.width + n, call.width - n);
    for (int64_t r = 0; r < rows; ++r) {
      float* sum = w.sums + (w.token_of[row + r] - w.first_token) * w.sums_stride + n;
      f32x16 value = load(products + (r * blocks + b) * 16);
      if (call.down_bias != nullptr) value = add(value, bias);
      store(sum, fma(splat(w.weight_of[row + r]), value, load(sum)));
    }
  }
}

void down_part(const Work& w, const Part& part, int64_t begin, int64_t end) {
  const Matrices matrices{{w.call.down, nullptr}, part.expert * w.down_blocks, w.call.inner, w.inner_panels};
  multiply(w, part, matrices, begin, end,
           [&](int, int64_t row, int64_t rows, int64_t block, int64_t blocks, const float* products) {
             add_tile(w, part.expert, row, rows, block, blocks, products);
           });
}

// Computes the columns of blocks begin … end - 1 of the result: sums over all experts, then one rounding.
void down_columns(const Work& w, int64_t begin, int64_t end) {
  const int64_t first = begin * kBlockRows;
  const int64_t last = end * kBlockRows < w.call.width ? end * kBlockRows : w.call.width;
  for (int64_t t = 0; t < w.tokens; ++t) {
    std::memset(w.sums + t * w.sums_stride + first, 0, size_t(end * kBlockRows - first) * 4);
  }
  for (int64_t part = 0; part < w.num_parts; ++part) down_part(w, w.parts[part], begin, end);
  with_dtype(w.call.out_dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t t = 0; t < w.tokens; ++t) {
      T* out = static_cast<T*>(w.call.out) + (w.first_token + t) * w.call.out_stride;
      const float* sums = w.sums + t * w.sums_stride;
      for (int64_t n = first; n < last; n += 16) store_first(out + n, load(sums + n), last - n);
    }
  });
}

// ── chunks ──────────────────────────────────────────────────────────────────────────────────────

// Blocks in groups; a group is a whole number of steps.
struct Groups {
  int64_t blocks, step, count;
  int64_t first(int64_t group) const {
    const int64_t block = ceil_div(blocks, step) * group / count * step;
    return block < blocks ? block : blocks;
  }
};

// Divides blocks of `bytes` in all into groups: at least `least`, if there are enough steps.
Groups cut(const Work& w, int64_t blocks, int64_t bytes, int64_t least) {
  const bool streaming = w.rows <= stream_rows(w.format) * w.num_parts;
  const int64_t step = streaming ? 1 : blocks_at_once(w.format, rows_of_tile(w.format));
  int64_t count = ceil_div(bytes, streaming ? kStreamBytes : kResidentBytes);
  count = count < least ? least : count;
  const int64_t most = ceil_div(blocks, step);
  return {blocks, step, count < most ? count : most};
}

void make_panels(const Work& w, const Rows& x, int64_t inputs, int64_t row_bytes, uint8_t* panels) {
  constexpr int64_t kInputsPerChunk = 16 << 10;
  const int64_t rows_per_part = ceil_div(w.rows, w.num_parts);
  parallel_for(w.num_parts, ceil_div(kInputsPerChunk, rows_per_part * (inputs + 1)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   for_tiles(w.format, w.parts[i].rows, [&](int64_t row, int64_t rows) {
                     row += w.parts[i].first;
                     make_panel(w.format, x, row, rows, inputs, panels + row * row_bytes);
                   });
                 }
               });
}

void run_gate_and_up(const Work& w, bool small) {
  const int64_t bytes = 2 * w.up_blocks * w.up_block_bytes;
  const Groups groups =
      cut(w, w.up_blocks, bytes, ceil_div(kPiecesPerThread * num_threads(), w.num_parts));
  const int64_t count = w.num_parts * groups.count;
  parallel_for(count, small ? count : 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t group = i % groups.count;
      gate_and_up(w, {i / groups.count, groups.first(group), groups.first(group + 1)});
    }
  });
}

void run_down(const Work& w, bool small) {
  Groups groups = cut(w, w.down_blocks, w.down_blocks * w.down_block_bytes, 1);
  const int64_t even = round_up(groups.count, num_threads()), most = ceil_div(w.down_blocks, groups.step);
  groups.count = even < most ? even : most;
  parallel_for(groups.count, small ? groups.count : 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) down_columns(w, groups.first(i), groups.first(i + 1));
  });
}

int32_t run(const OnwardExperts& call, int64_t first_token, int64_t tokens) {
  Work w{call, Format(call.format), first_token, tokens};
  Arena size(nullptr);
  w.lay_out(size);
  auto* memory = static_cast<uint8_t*>(scratch(kScratchActivations, size.used() + 1));
  if (memory == nullptr) return kOutOfMemory;
  Arena arena(memory);
  w.lay_out(arena);
  if (!w.make_lists()) return kBadArgument;
  const bool small = 3 * w.up_blocks * w.up_block_bytes * w.rows <= kInlineBytes;
  make_panels(w, {call.x, call.x_dtype, call.x_stride, w.token_of}, call.width, w.panel_bytes, w.panels);
  run_gate_and_up(w, small);
  make_panels(w, {w.gate, kF32, w.inner_stride}, call.inner, w.inner_panel_bytes, w.inner_panels);
  run_down(w, small);
  return kOk;
}

bool known_dtype(int32_t dtype) { return dtype >= kF32 && dtype <= kF16; }

bool valid(const OnwardExperts& call) {
  const bool sizes = call.tokens >= 0 && call.width > 0 && call.inner > 0 && call.experts > 0 &&
                     call.chosen > 0 && call.chosen <= kMostRows;
  return sizes && call.width <= kMaxInputs && call.inner <= kMaxInputs && known(call.format) &&
         known_dtype(call.x_dtype) && known_dtype(call.bias_dtype) && known_dtype(call.out_dtype) &&
         call.activation >= 0 && call.activation < kActivations &&
         (call.gate == nullptr) == (call.activation == kRelu2);
}

}  // namespace
}  // namespace onward::experts

// See OnwardExperts for the arguments. x and the activation's float results are rounded as in
// onward_linear_many. Sums over experts are float, rounded once to the dtype of out.
ONWARD_API int32_t onward_experts(const OnwardExperts* arguments) {
  using namespace onward;
  using namespace onward::experts;
  const auto& call = *arguments;
  if (!valid(call)) return kBadArgument;
  const int64_t most = kMostRows / call.chosen;
  for (int64_t token = 0; token < call.tokens; token += most) {
    const int64_t left = call.tokens - token;
    const int32_t status = run(call, token, left < most ? left : most);
    if (status != kOk) return status;
  }
  return kOk;
}
ONWARD_INSTRUCTION(onward_experts);
