// Rotary position embedding over [B, H, T, D].
#include "rope.h"

#include "program.h"
#include "team.h"

namespace onward {
namespace {

constexpr int64_t kElementsPerChunk = 1 << 13;
constexpr int64_t kMaxPairs = 1024;

// x and out [batch, heads, queries, dim], features contiguous.
struct Heads {
  int64_t batch, heads, queries, dim;
  int32_t dtype;
  const void* x;
  void* out;
  const int64_t *x_strides, *out_strides;  // of rows, heads, queries; in elements
};

bool valid(const Heads& h, int64_t pairs) {
  return h.batch >= 0 && h.heads >= 0 && h.queries >= 0 && pairs >= 0 && pairs <= kMaxPairs &&
         2 * pairs <= h.dim;
}

// Turns the heads of every token (b, t) by the angles that find(b, t, work) returns as two arrays.
template <class Find>
int32_t rotate_heads(const Heads& h, int64_t pairs, bool interleaved, Find&& find) {
  const int64_t grain = ceil_div(kElementsPerChunk, h.heads * h.dim + 1);
  const bool known = with_dtype(h.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(h.batch * h.queries, grain, [&](int64_t begin, int64_t end) {
      float work[2 * kMaxPairs];
      for (int64_t token = begin; token < end; ++token) {
        const int64_t b = token / h.queries, t = token % h.queries;
        const auto at = find(b, t, work);
        const T* x = static_cast<const T*>(h.x) + b * h.x_strides[0] + t * h.x_strides[2];
        T* out = static_cast<T*>(h.out) + b * h.out_strides[0] + t * h.out_strides[2];
        for (int64_t head = 0; head < h.heads; ++head) {
          rotate_row(x + head * h.x_strides[1], h.dim, at.cos, at.sin, pairs, interleaved,
                     out + head * h.out_strides[1]);
        }
      }
    });
  });
  return known ? kOk : kBadArgument;
}

struct Angles {
  const float *cos, *sin;
};

// [2 * pairs] each, for either feature of a pair: the first takes its sine negated.
void angles_of_both_halves(double position, const float* frequencies, int64_t pairs, float* cos, float* sin) {
  angles(position, frequencies, pairs, cos, sin + pairs);
  std::memcpy(cos + pairs, cos, size_t(pairs) * sizeof(float));
  for (int64_t i = 0; i < pairs; ++i) sin[i] = -sin[pairs + i];
}

}  // namespace
}  // namespace onward

// Angle = (offsets[b] + t) * scale * inverse_frequencies[i]. offsets: [batch] int32. Features past
// 2 * pairs are copied. out may be x, with the same strides.
ONWARD_API int32_t onward_rope(int64_t batch, int64_t heads, int64_t queries, int64_t dim,
                               int32_t dtype, const void* x, const int64_t* x_strides,
                               const int32_t* offsets, const float* inverse_frequencies,
                               int64_t pairs, double scale, int32_t interleaved, void* out,
                               const int64_t* out_strides) {
  using namespace onward;
  const Heads h{batch, heads, queries, dim, dtype, x, out, x_strides, out_strides};
  if (!valid(h, pairs)) return kBadArgument;
  return rotate_heads(h, pairs, interleaved != 0, [&](int64_t b, int64_t t, float* work) {
    angles(double(offsets[b] + t) * scale, inverse_frequencies, pairs, work, work + kMaxPairs);
    return Angles{work, work + kMaxPairs};
  });
}
ONWARD_INSTRUCTION(onward_rope);

// The same with given cos and sin: float32 [batch, queries, pairs] each, with the same strides of
// rows and queries, pairs contiguous.
ONWARD_API int32_t onward_rotate(int64_t batch, int64_t heads, int64_t queries, int64_t dim,
                                 int32_t dtype, const void* x, const int64_t* x_strides,
                                 const float* cos, const float* sin, int64_t pairs,
                                 const int64_t* angle_strides, int32_t interleaved, void* out,
                                 const int64_t* out_strides) {
  using namespace onward;
  const Heads h{batch, heads, queries, dim, dtype, x, out, x_strides, out_strides};
  if (!valid(h, pairs)) return kBadArgument;
  return rotate_heads(h, pairs, interleaved != 0, [&](int64_t b, int64_t t, float*) {
    const int64_t at = b * angle_strides[0] + t * angle_strides[1];
    return Angles{cos + at, sin + at};
  });
}
ONWARD_INSTRUCTION(onward_rotate);

// cos and sin of radians [rows, pairs] as onward.ops.rotate takes them, each [rows, 2 * pairs]: both halves of a row
// hold them, the first half of sin negated.
ONWARD_API int32_t onward_rotary_angles(int64_t rows, int64_t pairs, const float* radians, float* cos,
                                        float* sin) {
  using namespace onward;
  if (rows < 0 || pairs < 0) return kBadArgument;
  parallel_for(rows, ceil_div(int64_t(1) << 9, pairs + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      angles_of_both_halves(1.0, radians + row * pairs, pairs, cos + row * 2 * pairs, sin + row * 2 * pairs);
    }
  });
  return kOk;
}
ONWARD_INSTRUCTION(onward_rotary_angles);

// The angles alone, for onward_rotate and for forwards that turn by themselves: cos and sin of
// (offsets[b] + t) * scale * inverse_frequencies[i], float32 [batch, queries, 2 * pairs] each, contiguous, in the
// layout of onward_rotary_angles.
ONWARD_API int32_t onward_angles(int64_t batch, int64_t queries, const int32_t* offsets,
                                 const float* inverse_frequencies, int64_t pairs, double scale,
                                 float* cos, float* sin) {
  using namespace onward;
  if (batch < 0 || queries < 0 || pairs < 0) return kBadArgument;
  parallel_for(batch * queries, ceil_div(kElementsPerChunk, 8 * pairs + 1), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const double position = double(offsets[token / queries] + token % queries);
      angles_of_both_halves(position * scale, inverse_frequencies, pairs, cos + token * 2 * pairs,
                            sin + token * 2 * pairs);
    }
  });
  return kOk;
}
ONWARD_INSTRUCTION(onward_angles);
