// A layer of experts: the arguments of a call, and its working memory.
#pragma once
#include "../linear/unpacked.h"

// The arguments of onward_experts (ExpertsArguments in Python).
struct OnwardExperts {
  int64_t tokens, width, inner, experts, chosen;
  const void* x;  // [tokens, width]
  int64_t x_stride;
  const int32_t* ids;    // [tokens, chosen], each in 0 … experts - 1
  const float* weights;  // [tokens, chosen]
  // Packed weights, expert after expert: gate and up [inner, width], down [width, inner]; no gate for kRelu2. Biases
  // [experts, inner] and [experts, width], or null.
  const void *gate, *up, *down;
  const void *gate_bias, *up_bias, *down_bias;
  void* out;  // [tokens, width]
  int64_t out_stride;
  int32_t x_dtype, bias_dtype, out_dtype, format, activation;
  float alpha, limit;  // of kClampedSwiglu
};

namespace onward::experts {

using linear::Format;

enum Activation : int32_t { kSwiglu, kGeglu, kGegluTanh, kClampedSwiglu, kRelu2, kActivations };

// Rows of one expert: entries first … first + rows - 1 of the list.
struct Part {
  int64_t expert, first, rows;
};
// A part and some blocks of its expert's weights, the unit of work.
struct Piece {
  int64_t part, begin, end;
};

// Divides one allocation into arrays. Without a base address, it only adds up their sizes.
class Arena {
 public:
  explicit Arena(uint8_t* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    uint8_t* at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(count * int64_t(sizeof(T)), 64);
    return reinterpret_cast<T*>(at);
  }
  int64_t used() const { return used_; }

 private:
  uint8_t* base_;
  int64_t used_ = 0;
};

// Some tokens of a call. A row is a pair of a token and one of its experts. The list has all rows, sorted by
// expert and then by token.
struct Work {
  const OnwardExperts& call;
  Format format;
  int64_t first_token, tokens;

  int64_t rows = tokens * call.chosen;
  int64_t inner_stride = round_up(call.inner, linear::kBlockRows);
  int64_t sums_stride = round_up(call.width, linear::kBlockRows);
  int64_t panel_bytes = linear::panel_row_bytes(format, call.width);
  int64_t inner_panel_bytes = linear::panel_row_bytes(format, call.inner);
  int64_t up_blocks = linear::blocks_of(call.inner), down_blocks = linear::blocks_of(call.width);
  int64_t up_block_bytes = linear::block_bytes(format, call.width);
  int64_t down_block_bytes = linear::block_bytes(format, call.inner);

  int64_t num_parts = 0, num_pieces = 0;
  int32_t *ends = nullptr, *token_of = nullptr;  // [experts]: the end of each in the list; [rows]
  float* weight_of = nullptr;                    // [rows]
  Part* parts = nullptr;
  uint8_t *panels = nullptr, *inner_panels = nullptr;
  float *gate = nullptr, *up = nullptr;  // [rows, inner_stride]
  float* sums = nullptr;                 // [tokens, sums_stride]

  void lay_out(Arena& arena);
  // Returns false if an id is not the number of an expert.
  bool make_lists();
};

}  // namespace onward::experts
