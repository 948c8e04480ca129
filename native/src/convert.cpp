// Rows of one element type to rows of another.
#include "program.h"
#include "simd.h"
#include "team.h"

namespace onward {
namespace {

constexpr int64_t kElementsPerChunk = 1 << 16;

template <class From, class To>
void convert_row(int64_t count, const From* from, To* to) {
  for (int64_t i = 0; i < count; i += 16) {
    store_first(to + i, load_first(from + i, count - i), count - i);
  }
}

}  // namespace
}  // namespace onward

// to[r, c] = from[r, c], rounded to nearest even. Strides are in elements, from row to row; columns
// are contiguous.
ONWARD_API int32_t onward_convert(int64_t rows, int64_t columns, const void* from,
                                  int32_t from_dtype, int64_t from_stride, void* to,
                                  int32_t to_dtype, int64_t to_stride) {
  using namespace onward;
  if (rows < 0 || columns < 0) return kBadArgument;
  bool known = false;
  with_dtype(from_dtype, [&](auto* from_tag) {
    known = with_dtype(to_dtype, [&](auto* to_tag) {
      using From = std::remove_pointer_t<decltype(from_tag)>;
      using To = std::remove_pointer_t<decltype(to_tag)>;
      const auto* source = static_cast<const From*>(from);
      auto* target = static_cast<To*>(to);
      const int64_t grain = columns > 0 ? ceil_div(kElementsPerChunk, columns) : rows + 1;
      parallel_for(rows, grain, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          convert_row(columns, source + r * from_stride, target + r * to_stride);
        }
      });
    });
  });
  return known ? kOk : kBadArgument;
}
ONWARD_INSTRUCTION(onward_convert);
