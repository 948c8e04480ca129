// Applies a bit mask of the allowed ids to logits, and reports whether any id is left.
#include <limits>

#include "api.h"
#include "simd_math.h"
#include "team.h"

namespace onward {
namespace {

constexpr int64_t kPiece = 1 << 14;  // ids per unit of work

// Sixteen bits of a row's words; 0 beyond its last word.
inline uint32_t bits_at(const uint32_t* words, int64_t count, int64_t id) {
  return id / 32 < count ? words[id / 32] >> (id % 32) & 0xffff : 0;
}

// Whether any id is left: allowed by the mask, and not -inf. NaN counts.
template <class T>
bool apply_mask(const T* x, const uint32_t* words, int64_t count, int64_t begin, int64_t end, T* out) {
  const f32x16 nothing = splat(-std::numeric_limits<float>::infinity());
  bool left = false;
  for (int64_t i = begin; i < end; i += 16) {
    uint32_t bits = bits_at(words, count, i);
    if (end - i < 16) bits &= (1u << (end - i)) - 1;
    const f32x16 v = load_first(x + i, end - i);
    const f32x16 kept = select(lanes_of(bits), v, nothing);
    store_first(out + i, kept, end - i);
    left = left || any(either(less(nothing, kept), is_nan(kept)));
  }
  return left;
}

}  // namespace
}  // namespace onward

// out[r, c] = x[r, c] if bit c of row r's words is set, else -inf. left[r]: whether any remaining logit of the row is
// above -inf or NaN. Rows have `count` words each; ids past them are not allowed.
ONWARD_API int32_t onward_apply_token_mask(int64_t rows, int64_t columns, const void* x, int32_t dtype, int64_t stride,
                                const uint32_t* words, int64_t count, void* out, uint8_t* left) {
  using namespace onward;
  if (rows < 0 || columns < 1 || count < 0) return kBadArgument;
  const int64_t pieces = ceil_div(columns, kPiece);
  std::memset(left, 0, size_t(rows));
  const bool known = with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(rows * pieces, ceil_div(kPiece, columns), [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t row = item / pieces, first = item % pieces * kPiece;
        const int64_t last = columns - first < kPiece ? columns : first + kPiece;
        const bool any = apply_mask(static_cast<const T*>(x) + row * stride, words + row * count, count, first, last,
                               static_cast<T*>(out) + row * columns);
        // Several threads may set the flag of a row; none clears it.
        if (any) __atomic_store_n(left + row, uint8_t(1), __ATOMIC_RELAXED);
      }
    });
  });
  return known ? kOk : kBadArgument;
}
