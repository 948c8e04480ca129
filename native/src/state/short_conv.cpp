// A short causal depthwise convolution over the tokens of a row and the inputs before them.
#include <limits>

#include "../program.h"
#include "../simd_math.h"
#include "../team.h"
#include "places.h"

// The arguments of onward_short_conv (ShortConvArguments in Python).
struct OnwardShortConv {
  int64_t batch, queries, channels, taps;
  const void* x;         // [B, T, C] of dtype; channels are contiguous
  int64_t x_strides[2];  // strides of rows and tokens
  const void* weight;    // [taps, C] of dtype, contiguous; the last tap is that of the token itself
  const void* bias;      // [C] of dtype, or null
  void* out;             // [B, T, C], contiguous
  int32_t dtype, silu;
  OnwardState state;     // of dtype, [taps - 1 + 16, C] per place: the inputs from taps - 1 before the block on
};

namespace onward {
namespace {

constexpr int64_t kChannels = 256;  // per unit of work

template <class T>
struct Piece {
  const OnwardShortConv& conv;
  Places places;
  int64_t b, channel, count;  // channels `channel` … `channel` + count - 1 of row b
  int64_t offset;

  T* place(int which) const {
    const auto& state = conv.state;
    return static_cast<T*>(state.data) + places.slot * state.strides[0] + which * state.strides[1] + channel;
  }
  // The index of an absolute position in the place of `block`, counted from 1.
  int64_t index(int64_t position, int64_t block) const {
    return position - (block - 1) * kStateBlock + conv.taps - 1;
  }
  const T* token(int64_t t) const {
    return static_cast<const T*>(conv.x) + b * conv.x_strides[0] + t * conv.x_strides[1] + channel;
  }
  // The input at an absolute position, which is at least offset - (taps - 1); null: zeros.
  const T* input(int64_t position) const {
    if (position >= offset) return token(position - offset);
    return places.from < 0 ? nullptr : place(places.from) + index(position, block_after(offset)) * conv.channels;
  }

  void run() const {
    T* out = static_cast<T*>(conv.out) + b * conv.queries * conv.channels + channel;
    for (int64_t t = 0; t < conv.queries; ++t, out += conv.channels) {
      for (int64_t c = 0; c < count; c += 16) store_first(out + c, sum(offset + t, c), count - c);
    }
    if (places.from == -2) return;
    if (places.from >= 0) keep(places.from, block_after(offset), offset);
    if (places.to != places.from) keep(places.to, places.block, (places.block - 1) * kStateBlock - conv.taps + 1);
  }

  f32x16 sum(int64_t position, int64_t c) const {
    const int64_t n = count - c;
    if (places.from == -2) return splat(std::numeric_limits<float>::quiet_NaN());
    const T* weight = static_cast<const T*>(conv.weight) + channel + c;
    f32x16 sum = conv.bias == nullptr ? zero_f32() : load_first(static_cast<const T*>(conv.bias) + channel + c, n);
    for (int64_t i = 0; i < conv.taps; ++i, weight += conv.channels) {
      const T* x = input(position - conv.taps + 1 + i);
      if (x != nullptr) sum = fma(load_first(weight, n), load_first(x + c, n), sum);
    }
    return conv.silu ? times_sigmoid(sum, sum) : sum;
  }

  // Stores the inputs from `first` on in a place, as far as its block has room.
  void keep(int which, int64_t block, int64_t first) const {
    const int64_t end = offset + conv.queries, full = block * kStateBlock;
    for (int64_t position = first; position < (end < full ? end : full); ++position) {
      T* to = place(which) + index(position, block) * conv.channels;
      const T* x = input(position);
      if (x == nullptr) std::memset(to, 0, size_t(count) * sizeof(T));
      else std::memcpy(to, x, size_t(count) * sizeof(T));
    }
  }
};

}  // namespace
}  // namespace onward

// out[b, t, c] = sum over i of weight[i, c] * x[b, t - taps + 1 + i, c], in order, + bias; then silu if `silu` is not
// 0. Inputs before the first token are read from the state, to which the call adds its inputs.
ONWARD_API int32_t onward_short_conv(const OnwardShortConv* arguments) {
  using namespace onward;
  const auto& c = *arguments;
  if (c.batch < 0 || c.queries < 1 || c.channels < 1 || c.taps < 1) return kBadArgument;
  if (!valid_state(c.state, c.batch)) return kBadArgument;
  const int64_t pieces = ceil_div(c.channels, kChannels);
  const bool known = with_dtype(c.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(c.batch * pieces, ceil_div(64, c.queries * c.taps), [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) {
        const int64_t b = at / pieces, channel = at % pieces * kChannels, left = c.channels - channel;
        const int64_t count = left < kChannels ? left : kChannels;
        Piece<T>{c, places_of(c.state, b, c.queries), b, channel, count, c.state.offsets[b]}.run();
      }
    });
  });
  if (known) note_held(c.state, c.batch, c.queries);
  return known ? kOk : kBadArgument;
}
ONWARD_INSTRUCTION(onward_short_conv);
