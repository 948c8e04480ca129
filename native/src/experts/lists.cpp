// Lists the tokens of each expert, from the experts of each token.
#include <cstring>

#include "experts.h"

namespace onward::experts {

namespace {
constexpr int64_t kRowsPerPart = 64;
}

void Work::lay_out(Arena& arena) {
  ends = arena.take<int32_t>(call.experts);
  token_of = arena.take<int32_t>(rows);
  weight_of = arena.take<float>(rows);
  parts = arena.take<Part>((call.experts < rows ? call.experts : rows) + rows / kRowsPerPart);
  panels = arena.take<uint8_t>(rows * panel_bytes);
  gate = arena.take<float>(rows * inner_stride);
  up = arena.take<float>(rows * inner_stride);
  inner_panels = arena.take<uint8_t>(rows * inner_panel_bytes);
  sums = arena.take<float>(tokens * sums_stride);
}

// A counting sort. The rows of an expert with many rows are divided into parts of nearly equal size.
bool Work::make_lists() {
  const int32_t* ids = call.ids + first_token * call.chosen;
  const float* weights = call.weights + first_token * call.chosen;
  std::memset(ends, 0, size_t(call.experts) * sizeof *ends);
  for (int64_t i = 0; i < rows; ++i) {
    if (ids[i] < 0 || ids[i] >= call.experts) return false;
    ++ends[ids[i]];
  }
  int32_t first = 0;
  num_parts = 0;
  for (int64_t expert = 0; expert < call.experts; ++expert) {
    const int64_t count = ends[expert], cuts = ceil_div(count, kRowsPerPart);
    for (int64_t cut = 0; cut < cuts; ++cut) {
      const int64_t begin = linear::first_row(count, cuts, cut);
      parts[num_parts++] = {expert, first + begin, linear::first_row(count, cuts, cut + 1) - begin};
    }
    ends[expert] = first;
    first += int32_t(count);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const int32_t row = ends[ids[i]]++;
    token_of[row] = int32_t(first_token + i / call.chosen);
    weight_of[row] = weights[i];
  }
  return true;
}

}  // namespace onward::experts
