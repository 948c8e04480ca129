// Float matrices to packed int8, int4 and iq4_nl: the search for scales that onward/quantization/rounding.py
// defines, for 16 groups at a time.
//
// Everything is computed in single IEEE operations in one order, so all libraries give the same bits.
#include <algorithm>
#include <limits>

#include "../program.h"
#include "../simd_math.h"
#include "../team.h"
#include "layout.h"

namespace onward::linear {
namespace {

constexpr int kRefinements = 2;
constexpr float kSmallest = 1e-30f;     // under it the reciprocal of a scale might overflow
constexpr float kSmallestF16 = 5e-8f;   // all float16 under it are 0
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// What a part of the matrix was, and how far it was moved.
struct Sums {
  double error = 0.0, size = 0.0;  // of squares
  float largest = 0.0f;            // magnitude; NaN where one is infinite or NaN

  // zeros: the sums of x - x over all x.
  void see(float magnitude, f32x16 zeros) {
    if (any(is_nan(zeros))) largest = kNaN;
    if (magnitude > largest) largest = magnitude;  // NaN stays
  }
};

inline f32x16 whole(f32x16 x) { return to_f32(to_i32(x)); }

// As float16 stores it.
inline f32x16 as_stored(f32x16 scale) {
  F16 halves[16];
  store(halves, scale);
  return load(halves);
}

// Group g of 16 rows: lane r is a row, x[i] its inputs i.
struct Group {
  f32x16 x[kGroup];
};

struct Choice {
  f32x16 scale, error;
};

// What weights divided by their group's scale are rounded to, and the code of that. kPlaces: where the
// element of largest magnitude may come to lie; kPlain: where rules without a search put it.
struct Int4 {
  static constexpr float kPlaces[] = {-9.5f, -9.0f, -8.5f, -8.0f,  -7.5f,
                                      -7.0f, 6.0f,  6.67f, 7.33f, 8.0f};
  static constexpr float kPlain[] = {7.0f, -8.0f};
  // The clamp comes first: its bounds are integers, and what is rounded then fits.
  static f32x16 nearest(f32x16 x) { return whole(max(min(x, splat(7.0f)), splat(-8.0f))); }
  static f32x16 code(f32x16 x) { return add(nearest(x), splat(8.0f)); }
};

struct Iq4Nl {
  static constexpr float kPlaces[] = {-145.0f, -136.0f, -127.0f, -119.0f, -110.0f, -102.0f,
                                      90.0f,   98.0f,   106.0f,  113.0f,  121.0f,  129.0f};
  static constexpr float kPlain[] = {-127.0f, 113.0f};
  // of(i), where value i of the table is the nearest to x; half-way between two the lower one.
  template <class Of>
  static f32x16 of_nearest(f32x16 x, Of&& of) {
    f32x16 found = splat(of(0));
    for (int i = 1; i < 16; ++i) {
      const f32x16 half_way = splat(0.5f * float(kIq4[i - 1] + kIq4[i]));
      found = select(less(half_way, x), splat(of(i)), found);
    }
    return found;
  }
  static f32x16 nearest(f32x16 x) {
    return of_nearest(x, [](int i) { return float(kIq4[i]); });
  }
  static f32x16 code(f32x16 x) {
    return of_nearest(x, [](int i) { return float(i); });
  }
};

// Of a scale as stored; 0 of 0.
inline f32x16 reciprocal_of(f32x16 scale) {
  const auto is_zero = less(abs(scale), splat(kSmallestF16));
  return select(is_zero, zero_f32(), div(splat(1.0f), select(is_zero, splat(1.0f), scale)));
}

// sum(q x) and sum(q^2); the latter 1 where all values are 0.
struct Moments {
  f32x16 product, size;
};
template <class Codebook>
inline Moments moments(const Group& group, f32x16 reciprocal) {
  Moments m{zero_f32(), zero_f32()};
  for (int i = 0; i < kGroup; ++i) {
    const f32x16 q = Codebook::nearest(mul(group.x[i], reciprocal));
    m.product = add(m.product, mul(q, group.x[i]));
    m.size = add(m.size, mul(q, q));
  }
  m.size = max(m.size, splat(1.0f));
  return m;
}

// Of the first n inputs.
template <class Codebook>
inline f32x16 error_of(const Group& group, f32x16 scale, int64_t n = kGroup) {
  const f32x16 reciprocal = reciprocal_of(scale);
  f32x16 error = zero_f32();
  for (int64_t i = 0; i < n; ++i) {
    const f32x16 q = Codebook::nearest(mul(group.x[i], reciprocal));
    const f32x16 off = sub(group.x[i], mul(q, scale));
    error = add(error, mul(off, off));
  }
  return error;
}

// Takes the scale, as stored, if it errs less. One that overflowed errs by no finite number, which is not less.
template <class Codebook>
inline void keep_if_better(const Group& group, f32x16 scale, Choice& best) {
  const f32x16 stored = as_stored(scale), error = error_of<Codebook>(group, stored);
  const auto better = less(error, best.error);
  best.scale = select(better, stored, best.scale);
  best.error = select(better, error, best.error);
}

// The least-squares scale over the places that leaves the least: sum(x^2) - sum(q x)^2 / sum(q^2).
template <class Codebook>
inline f32x16 searched(const Group& group, f32x16 extreme) {
  const auto tiny = less(abs(extreme), splat(kSmallest));
  const f32x16 reciprocal = select(tiny, zero_f32(), div(splat(1.0f), select(tiny, splat(1.0f), extreme)));
  f32x16 best_gain = zero_f32(), best = div(extreme, splat(Codebook::kPlain[0]));
  for (float place : Codebook::kPlaces) {
    const Moments m = moments<Codebook>(group, mul(reciprocal, splat(place)));
    const f32x16 scale = div(m.product, m.size), gain = mul(m.product, scale);
    const auto better = less(best_gain, gain);
    best_gain = select(better, gain, best_gain);
    best = select(better, scale, best);
  }
  return best;
}

template <class Codebook>
Choice best_scale(const Group& group) {
  f32x16 highest = group.x[0], lowest = group.x[0];
  for (int i = 1; i < kGroup; ++i) {
    highest = max(group.x[i], highest);
    lowest = min(group.x[i], lowest);
  }
  const f32x16 extreme = select(less(highest, sub(zero_f32(), lowest)), lowest, highest);
  Choice best{as_stored(div(extreme, splat(Codebook::kPlain[0]))), zero_f32()};
  best.error = error_of<Codebook>(group, best.scale);
  keep_if_better<Codebook>(group, div(extreme, splat(Codebook::kPlain[1])), best);
  f32x16 scale = searched<Codebook>(group, extreme);
  keep_if_better<Codebook>(group, scale, best);
  for (int i = 0; i < kRefinements; ++i) {
    const Moments m = moments<Codebook>(group, reciprocal_of(as_stored(scale)));
    scale = div(m.product, m.size);
    keep_if_better<Codebook>(group, scale, best);
  }
  best.scale = add(best.scale, zero_f32());  // no -0
  return best;
}

// Inputs k … k + 31 of up to 16 rows; zeros stand for what is not there.
template <class T>
void read_group(const T* x, int64_t stride, int64_t rows, int64_t k, int64_t inputs, Group& group) {
  alignas(64) float lanes[kGroup][kBlockRows] = {};
  const int64_t n = inputs - k < kGroup ? inputs - k : kGroup;
  for (int64_t r = 0; r < rows; ++r) {
    alignas(64) float row[kGroup];
    store(row, load_first(x + r * stride + k, n));
    store(row + 16, n > 16 ? load_first(x + r * stride + k + 16, n - 16) : zero_f32());
    for (int64_t i = 0; i < n; ++i) lanes[i][r] = row[i];
  }
  for (int i = 0; i < kGroup; ++i) group.x[i] = load(lanes[i]);
}

// The group's codes in the lines of its pair.
template <class Codebook>
void write_lines(const Group& group, f32x16 scale, uint8_t* lines) {
  const f32x16 reciprocal = reciprocal_of(scale);
  alignas(64) float q[kGroup][kBlockRows];
  for (int i = 0; i < kGroup; ++i) store(q[i], Codebook::code(mul(group.x[i], reciprocal)));
  for (int line = 0; line < 4; ++line) {
    for (int r = 0; r < kBlockRows; ++r) {
      for (int j = 0; j < 4; ++j) {
        const int low = int(q[line * 8 + j][r]), high = int(q[line * 8 + 4 + j][r]);
        lines[line * 64 + r * 4 + j] = uint8_t(low | high << 4);
      }
    }
  }
}

// What the lanes of a group add to the sums; those past `rows` are zeros.
void count(const Group& group, f32x16 error, Sums& sums) {
  f32x16 size = zero_f32(), largest = zero_f32(), zeros = zero_f32();
  for (int i = 0; i < kGroup; ++i) {
    size = add(size, mul(group.x[i], group.x[i]));
    largest = max(abs(group.x[i]), largest);
    zeros = add(zeros, sub(group.x[i], group.x[i]));
  }
  float sizes[16], errors[16];
  store(sizes, size), store(errors, error);
  for (int r = 0; r < 16; ++r) sums.size += double(sizes[r]), sums.error += double(errors[r]);
  sums.see(max_lanes(largest), zeros);
}

template <class Codebook, class T>
Sums grouped_block(const T* x, int64_t stride, int64_t rows, int64_t inputs, uint8_t* block) {
  Sums sums;
  for (int64_t k = 0; k < round_up(inputs, 2 * kGroup); k += kGroup) {
    uint8_t* pair = block + k / (2 * kGroup) * kInt4Pair;
    const int64_t half = k / kGroup % 2;
    Group group;
    read_group(x, stride, rows, k, inputs, group);
    const Choice best = best_scale<Codebook>(group);
    store(reinterpret_cast<F16*>(pair) + half * 16, best.scale);
    write_lines<Codebook>(group, best.scale, pair + 64 + half * 256);
    // A table without 0 errs in what fills up the last group, too.
    const bool whole_group = inputs - k >= kGroup;
    count(group, whole_group ? best.error : error_of<Codebook>(group, best.scale, inputs - k), sums);
  }
  return sums;
}

// A row to multiples of its absmax / 127, in the lines of its block.
template <class T>
void int8_row(const T* x, int64_t inputs, float& scale, uint8_t* lines, Sums& sums) {
  f32x16 largest = zero_f32(), zeros = zero_f32();
  for (int64_t k = 0; k < inputs; k += 16) {
    const f32x16 v = load_first(x + k, inputs - k);
    largest = max(abs(v), largest);
    zeros = add(zeros, sub(v, v));
  }
  const float absmax = max_lanes(largest);
  scale = absmax / 127.0f;
  sums.see(absmax, zeros);
  const f32x16 divisor = splat(scale > 0.0f ? scale : 1.0f);
  for (int64_t k = 0; k < round_up(inputs, 4); k += 16) {
    const f32x16 v = k < inputs ? load_first(x + k, inputs - k) : zero_f32();
    const f32x16 q = whole(max(min(div(v, divisor), splat(127.0f)), splat(-127.0f)));
    float weights[16], off[16], integers[16];
    store(weights, v), store(off, sub(v, mul(q, splat(scale)))), store(integers, q);
    for (int i = 0; i < 16; ++i) {
      sums.size += double(weights[i]) * double(weights[i]);
      sums.error += double(off[i]) * double(off[i]);
    }
    for (int64_t i = 0; i < 16 && k + i < round_up(inputs, 4); ++i) {
      lines[(k + i) / 4 * 64 + (k + i) % 4] = uint8_t(int(integers[i]) + 128);
    }
  }
}

template <class T>
Sums int8_block(const T* x, int64_t stride, int64_t rows, int64_t inputs, uint8_t* block) {
  Sums sums;
  auto* scales = reinterpret_cast<float*>(block);
  if (rows < kBlockRows) {  // what is not there is 0
    std::fill_n(scales, kBlockRows, 0.0f);
    std::fill_n(block + kInt8Header, ceil_div(inputs, 4) * 64, uint8_t(128));
  }
  for (int64_t r = 0; r < rows; ++r) {
    int8_row(x + r * stride, inputs, scales[r], block + kInt8Header + r * 4, sums);
  }
  return sums;
}

}  // namespace
}  // namespace onward::linear

// x, float [rows, inputs] with a stride in elements from row to row, to a packed int8, int4 or iq4_nl weight.
// sums: double [blocks of 16 rows, 3]: the squared error, the squares of x, the largest magnitude, which
// is NaN, and the weight of no use, where x holds an infinity or a NaN.
ONWARD_API int32_t onward_linear_quantize(int32_t format, int64_t rows, int64_t inputs, const void* x,
                                          int32_t x_dtype, int64_t x_stride, void* packed,
                                          double* sums) {
  using namespace onward;
  using namespace onward::linear;
  if (format != kPackedInt8 && format != kPackedInt4 && format != kPackedIq4Nl) return kBadArgument;
  if (rows < 0 || inputs < 0 || inputs > kMaxInputs) return kBadArgument;
  const int64_t bytes = block_bytes(Format(format), inputs);
  const bool known = with_dtype(x_dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(blocks_of(rows), 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const int64_t first = b * kBlockRows;
        const int64_t count = rows - first < kBlockRows ? rows - first : kBlockRows;
        const T* part = static_cast<const T*>(x) + first * x_stride;
        auto* block = static_cast<uint8_t*>(packed) + b * bytes;
        const Sums found = format == kPackedInt8   ? int8_block(part, x_stride, count, inputs, block)
                           : format == kPackedInt4 ? grouped_block<Int4>(part, x_stride, count, inputs, block)
                                                   : grouped_block<Iq4Nl>(part, x_stride, count, inputs, block);
        sums[b * 3] = found.error, sums[b * 3 + 1] = found.size, sums[b * 3 + 2] = found.largest;
      }
    });
  });
  return known ? kOk : kBadArgument;
}
ONWARD_INSTRUCTION(onward_linear_quantize);
