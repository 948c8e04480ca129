// Gathers rows of a table by index: the embedding.
#include <cstring>

#include "api.h"
#include "program.h"
#include "team.h"

namespace onward {
namespace {
constexpr int64_t kBytesPerChunk = 1 << 16;
}
}  // namespace onward

// out[i] = table[ids[i]]. Rows have `columns` elements; strides are in elements. ids are int32, or int64 with
// `wide_ids`. Nothing is written if an id is not in 0 … rows - 1.
ONWARD_API int32_t onward_gather_rows(int64_t count, int64_t columns, int32_t dtype,
                                      const void* table, int64_t rows, int64_t table_stride,
                                      const void* ids, int32_t wide_ids, void* out,
                                      int64_t out_stride) {
  using namespace onward;
  if (count < 0 || columns < 0 || dtype < kF32 || dtype > kF16) return kBadArgument;
  const auto id = [&](int64_t i) -> int64_t {
    return wide_ids ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
  };
  for (int64_t i = 0; i < count; ++i) {
    if (id(i) < 0 || id(i) >= rows) return kBadArgument;
  }
  const int64_t size = element_size(dtype), bytes = columns * size;
  parallel_for(count, ceil_div(kBytesPerChunk, bytes + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(static_cast<char*>(out) + i * out_stride * size,
                  static_cast<const char*>(table) + id(i) * table_stride * size, size_t(bytes));
    }
  });
  return kOk;
}
ONWARD_INSTRUCTION(onward_gather_rows);
