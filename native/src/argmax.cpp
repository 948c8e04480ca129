// The index of the largest element of each row: greedy decoding.
#include <cmath>

#include "program.h"
#include "scratch.h"
#include "simd_math.h"
#include "team.h"

namespace onward {
namespace {

// A row is searched in pieces, and a piece in blocks. Vectors find the largest element of a block; its
// index is looked up only if it beats all previous blocks.
constexpr int64_t kPiece = 1 << 14;
constexpr int64_t kBlock = 256;

struct Best {
  float value;
  int64_t index;  // -1: nothing yet
};

// NaN beats every number, so that a broken row is noticed. Among equal elements the first wins.
bool beats(float challenger, const Best& best) {
  if (best.index < 0) return true;
  if (std::isnan(best.value)) return false;
  return std::isnan(challenger) || challenger > best.value;
}

template <class T>
bool may_beat(const T* x, int64_t count, const Best& best) {
  if (count < kBlock || best.index < 0) return true;
  f32x16 largest = splat(best.value);
  mask16 nan = is_nan(largest);
  for (int64_t i = 0; i < kBlock; i += 16) {
    const f32x16 v = load(x + i);
    nan = either(nan, is_nan(v));
    largest = max(v, largest);
  }
  return any(nan) || any(less(splat(best.value), largest));
}

template <class T>
Best search(const T* x, int64_t begin, int64_t end) {
  Best best{0.0f, -1};
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t count = end - i < kBlock ? end - i : kBlock;
    if (!may_beat(x + i, count, best)) continue;
    for (int64_t j = 0; j < count; j += 16) {
      float lanes[16];
      store(lanes, load_first(x + i + j, count - j));
      for (int64_t lane = 0; lane < 16 && j + lane < count; ++lane) {
        if (beats(lanes[lane], best)) best = {lanes[lane], i + j + lane};
      }
    }
  }
  return best;
}

}  // namespace
}  // namespace onward

// out[r] = the lowest index of the largest x[r, c], or of the first NaN in the row. columns > 0.
ONWARD_API int32_t onward_argmax(int64_t rows, int64_t columns, const void* x, int32_t dtype,
                                 int64_t stride, int64_t* out) {
  using namespace onward;
  if (rows < 0 || columns <= 0) return kBadArgument;
  const int64_t pieces = ceil_div(columns, kPiece);
  auto* found = static_cast<Best*>(
      scratch(kScratchActivations, rows * pieces * int64_t(sizeof(Best)) + 1));
  if (found == nullptr) return kOutOfMemory;
  const bool known = with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(rows * pieces, ceil_div(kPiece, columns), [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t first = item % pieces * kPiece;
        const int64_t last = columns - first < kPiece ? columns : first + kPiece;
        found[item] = search(static_cast<const T*>(x) + item / pieces * stride, first, last);
      }
    });
  });
  if (!known) return kBadArgument;
  for (int64_t row = 0; row < rows; ++row) {
    Best best = found[row * pieces];
    for (int64_t piece = 1; piece < pieces; ++piece) {
      const Best& next = found[row * pieces + piece];
      if (beats(next.value, best)) best = next;
    }
    out[row] = best.index;
  }
  return kOk;
}
ONWARD_INSTRUCTION(onward_argmax);
