// The steps between the projections and attention, in one pass over the heads of each token: the norm, the
// rotary embedding, and the write to the cache.
#include <atomic>
#include <cstring>

#include "attention/formats.h"
#include "norm.h"
#include "program.h"
#include "rope.h"
#include "scratch.h"
#include "team.h"

// One projection (HeadsArguments in Python).
struct OnwardHeads {
  int64_t heads;
  const void* x;           // [B, heads, T, D]
  int64_t x_strides[3];    // strides of rows, heads, queries, in elements. Features are contiguous.
  const void* norm_weight; // [D] of dtype, or null: no norm
  float eps, weight_offset;
  int32_t after_cast;      // see onward_rms_norm
  int32_t rotate;          // 0: no rotation; 1: pairs (i, pairs + i); 2: pairs (2i, 2i + 1)
  void* out;               // [B, heads, T, D], or a cache [B, heads, positions, D]
  int64_t out_strides[3];  // strides of rows, heads, queries or positions
  int32_t to_cache;        // 0: no cache; 1 + a format of rows: token t of row b goes to position offsets[b] + t
  int64_t positions;
  // int32 [B, positions / 64], or null: the cache is [N, heads, 64, D], and entry m of a row is the block of
  // its positions 64 m, …, 64 m + 63.
  const int32_t* table;
  int64_t table_stride;    // between rows
};

namespace onward {
namespace {

constexpr int64_t kElementsPerChunk = 1 << 14;

// The angles of one token, or null.
struct Angles {
  const float *cos, *sin;
  int64_t pairs;
};

// Rounds every step to T, as the kernels of the separate steps do. out may be x.
template <class T>
void run_head(const OnwardHeads& part, const T* x, int64_t dim, const Angles& angles, T* out) {
  if (part.norm_weight != nullptr) {
    rms_norm_row(x, dim, part.eps, {part.norm_weight, part.weight_offset, part.after_cast != 0}, out);
    x = out;
  }
  if (part.rotate) {
    rotate_row(x, dim, angles.cos, angles.sin, angles.pairs, part.rotate == 2, out);
  } else if (out != x) {
    std::memcpy(out, x, size_t(dim) * sizeof(T));
  }
}

// The same, into a row of integers and their scale. row: working memory for the unquantized head.
template <class T>
void run_head(const OnwardHeads& part, const T* x, int64_t dim, const Angles& angles, T* row, I8* out) {
  run_head(part, x, dim, angles, row);
  attention::store_row(row, dim, out);
}

// Prefetches the rows that a token's heads are written to. They are far apart in memory, and rows of the KV cache
// are usually not in a processor cache. Called while the previous token is computed. (GCC 12 drops calls that
// only prefetch unless they must be inlined.)
template <class T>
__attribute__((always_inline)) inline void claim_places(const OnwardHeads& part, const T* first,
                                                        int64_t width) {
  for (int64_t h = 0; h < part.heads; ++h) {
    const char* line = reinterpret_cast<const char*>(first + h * part.out_strides[1]);
    for (int64_t i = 0; i < width * int64_t(sizeof(T)); i += 64) __builtin_prefetch(line + i, 1, 3);
  }
}

constexpr int64_t kBlock = 64;  // positions per block of a block table

// The entry of a part's block table for a position.
int32_t block_of(const OnwardHeads& part, int64_t b, int64_t position) {
  return part.table[b * part.table_stride + position / kBlock];
}

bool has_integer_rows(const OnwardHeads& part) { return part.to_cache == 1 + attention::kInt8Rows; }

// The destination of a token's first head. T: the element type of `out`.
template <class T>
T* place_of(const OnwardHeads& part, int64_t b, int64_t t, const int32_t* offsets) {
  int64_t row = b, place = part.to_cache ? offsets[b] + t : t;
  if (part.to_cache && part.table != nullptr) {
    row = block_of(part, b, place);
    place %= kBlock;
  }
  return static_cast<T*>(part.out) + row * part.out_strides[0] + place * part.out_strides[2];
}

// Whether the table has a block for each of the row's new positions.
bool has_blocks(const OnwardHeads& part, int64_t b, int64_t first, int64_t end) {
  for (int64_t at = first / kBlock * kBlock; at < end; at += kBlock) {
    if (block_of(part, b, at) < 0) return false;
  }
  return true;
}

bool valid(const OnwardHeads& part, int64_t batch, int64_t queries, bool angles,
           const int32_t* offsets) {
  if (part.heads < 0 || part.rotate < 0 || part.rotate > 2) return false;
  if (part.rotate && !angles) return false;
  if (!part.to_cache) return true;
  if (part.to_cache != 1 + attention::kFloatRows && !has_integer_rows(part)) return false;
  for (int64_t b = 0; b < batch; ++b) {
    if (offsets == nullptr || offsets[b] < 0) return false;
    if (offsets[b] + queries > part.positions) return false;
    if (part.table != nullptr && !has_blocks(part, b, offsets[b], offsets[b] + queries)) return false;
  }
  return true;
}

}  // namespace
}  // namespace onward

// For each part and token: out = rotate(rms_norm(x)). Each step is rounded to dtype, and is skipped unless the
// part enables it. cos and sin: float [batch, queries, pairs] as for onward_rotate, with its angle_strides (rows,
// queries); read only if a part rotates. offsets: [batch], read only if a part writes to a cache. Nothing is
// written if a row does not fit into the cache.
ONWARD_API int32_t onward_heads(const OnwardHeads* parts, int64_t count, int64_t batch,
                                int64_t queries, int64_t dim, int32_t dtype, const float* cos,
                                const float* sin, const int64_t* angle_strides, int64_t pairs,
                                const int32_t* offsets) {
  using namespace onward;
  if (count < 0 || batch < 0 || queries < 0 || dim < 0 || pairs < 0 || 2 * pairs > dim) {
    return kBadArgument;
  }
  const bool given = cos != nullptr && sin != nullptr && angle_strides != nullptr;
  int64_t heads = 0;
  bool integers = false;
  for (int64_t i = 0; i < count; ++i) {
    if (!valid(parts[i], batch, queries, given || pairs == 0, offsets)) return kBadArgument;
    heads += parts[i].heads;
    integers |= has_integer_rows(parts[i]);
  }
  const int64_t grain = ceil_div(kElementsPerChunk, heads * dim + 1);
  std::atomic<bool> ok{true};
  const bool known = with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const auto claim = [&](int64_t token) __attribute__((always_inline)) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t b = token / queries, t = token % queries;
        if (has_integer_rows(parts[i])) {
          claim_places(parts[i], place_of<I8>(parts[i], b, t, offsets), dim + attention::kScaleBytes);
        } else {
          claim_places(parts[i], place_of<T>(parts[i], b, t, offsets), dim);
        }
      }
    };
    parallel_for(batch * queries, grain, [&](int64_t begin, int64_t end) {
      T* row = nullptr;
      if (integers) {
        row = static_cast<T*>(scratch(kScratchWorker, dim * int64_t(sizeof(T))));
        if (row == nullptr) {
          ok = false;
          return;
        }
      }
      claim(begin);
      for (int64_t token = begin; token < end; ++token) {
        if (token + 1 < end) claim(token + 1);
        const int64_t b = token / queries, t = token % queries;
        Angles angles{cos, sin, pairs};
        if (given) {
          const int64_t at = b * angle_strides[0] + t * angle_strides[1];
          angles.cos += at, angles.sin += at;
        }
        for (int64_t i = 0; i < count; ++i) {
          const OnwardHeads& part = parts[i];
          const T* x = static_cast<const T*>(part.x) + b * part.x_strides[0] + t * part.x_strides[2];
          const auto run_heads = [&](auto* out, auto... room) {
            for (int64_t h = 0; h < part.heads; ++h) {
              run_head(part, x + h * part.x_strides[1], dim, angles, room..., out + h * part.out_strides[1]);
            }
          };
          if (has_integer_rows(part)) {
            run_heads(place_of<I8>(part, b, t, offsets), row);
          } else {
            run_heads(place_of<T>(part, b, t, offsets));
          }
        }
      }
    });
  });
  return !known ? kBadArgument : ok ? kOk : kOutOfMemory;
}
ONWARD_INSTRUCTION(onward_heads);
