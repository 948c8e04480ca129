// Rotary position embedding over [B, H, T, D].
#include "rope.h"

#include "program.h"
#include "sine.h"
#include "team.h"

namespace onward {
namespace {

constexpr int64_t kElementsPerChunk = 1 << 13;

// cos and sin of radians [pairs], each [2 * pairs]: both halves hold the values of all pairs, and the first half of
// sin is negated. Each value is the nearest float or its neighbor, for angles up to 2^31.
void angles_of_both_halves(const float* radians, int64_t pairs, float* cos, float* sin) {
  for (int64_t i = 0; i < pairs; ++i) {
    const Turn turn = sine_and_cosine(double(radians[i]));
    cos[i] = cos[pairs + i] = float(turn.cos);
    sin[pairs + i] = float(turn.sin);
    sin[i] = -sin[pairs + i];
  }
}

}  // namespace
}  // namespace onward

// cos and sin: float32 [batch, queries, pairs], with the same strides of rows and queries; pairs are contiguous.
// Features past 2 * pairs are copied. out may be x, with the same strides.
ONWARD_API int32_t onward_rotate(int64_t batch, int64_t heads, int64_t queries, int64_t dim,
                                 int32_t dtype, const void* x, const int64_t* x_strides,
                                 const float* cos, const float* sin, int64_t pairs,
                                 const int64_t* angle_strides, int32_t interleaved, void* out,
                                 const int64_t* out_strides) {
  using namespace onward;
  if (batch < 0 || heads < 0 || queries < 0 || pairs < 0 || 2 * pairs > dim) return kBadArgument;
  const int64_t grain = ceil_div(kElementsPerChunk, heads * dim + 1);
  const bool known = with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(batch * queries, grain, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t b = token / queries, t = token % queries;
        const int64_t at = b * angle_strides[0] + t * angle_strides[1];
        const T* from = static_cast<const T*>(x) + b * x_strides[0] + t * x_strides[2];
        T* to = static_cast<T*>(out) + b * out_strides[0] + t * out_strides[2];
        for (int64_t head = 0; head < heads; ++head) {
          rotate_row(from + head * x_strides[1], dim, cos + at, sin + at, pairs, interleaved != 0,
                     to + head * out_strides[1]);
        }
      }
    });
  });
  return known ? kOk : kBadArgument;
}
ONWARD_INSTRUCTION(onward_rotate);

// cos and sin of radians [rows, pairs], each [rows, 2 * pairs], as onward.ops.rotate takes them: both halves of a row
// hold the values of all pairs, and the first half of sin is negated.
ONWARD_API int32_t onward_rotary_angles(int64_t rows, int64_t pairs, const float* radians, float* cos,
                                        float* sin) {
  using namespace onward;
  if (rows < 0 || pairs < 0) return kBadArgument;
  parallel_for(rows, ceil_div(int64_t(1) << 9, pairs + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      angles_of_both_halves(radians + row * pairs, pairs, cos + row * 2 * pairs, sin + row * 2 * pairs);
    }
  });
  return kOk;
}
ONWARD_INSTRUCTION(onward_rotary_angles);
