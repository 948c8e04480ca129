// Draws an id for each row, with temperature, top-k, top-p, min-p and Gumbel-max in one call; and computes the sums for
// logprobs. The definitions are in onward.sampling in Python; results don't depend on the instruction set.
#include "program.h"
#include "race.h"
#include "scratch.h"

namespace onward {
namespace {

// Calls run(row, x, memory) for each row of [rows, columns], with working memory for its race.
template <class Run>
int32_t for_rows(int64_t rows, int64_t columns, const void* x, int32_t dtype, int64_t stride, const Run& run) {
  if (rows < 0 || columns <= 0 || columns > int64_t(1) << 22) return kBadArgument;
  const int64_t each = round_up(RowMemory(columns).bytes(), 64);
  const int64_t together = std::max<int64_t>(1, std::min<int64_t>(rows, num_threads()));
  char* memory = static_cast<char*>(scratch(kScratchActivations, together * each));
  if (memory == nullptr) return kOutOfMemory;
  const bool known = with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t first = 0; first < rows; first += together) {
      // A single row is divided between the threads; otherwise each thread takes a row.
      parallel_for(std::min(together, rows - first), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          RowMemory place(columns);
          place.place(memory + i * each);
          run(first + i, static_cast<const T*>(x) + (first + i) * stride, place);
        }
      });
    }
  });
  return known ? kOk : kBadArgument;
}

}  // namespace
}  // namespace onward

// Draws an id from row r of x with temperature[r] (0: greedy), top_k[r] (0: all), top_p[r] (1: all), min_score[r]
// (the lowest score that is kept, where the best id has score 0; -inf: all) and the noise of seeds[r] at
// positions[r]. If the largest element of a row is not finite, the result is the first NaN, or else the first
// largest element. columns in 1 … 2^22, so that sums of units fit in 64 bits.
ONWARD_API int32_t onward_sample(int64_t rows, int64_t columns, const void* x, int32_t dtype,
                                 int64_t stride, const float* temperature, const int64_t* top_k,
                                 const float* top_p, const float* min_score, const int64_t* seeds,
                                 const int64_t* positions, int64_t* out) {
  using namespace onward;
  return for_rows(rows, columns, x, dtype, stride, [&](int64_t row, auto* logits, RowMemory& memory) {
    const SampleOptions options{temperature[row], top_k[row],         top_p[row],
                                min_score[row],   uint64_t(seeds[row]), uint32_t(positions[row])};
    out[row] = Race(logits, columns, options, memory).run();
  });
}
ONWARD_INSTRUCTION(onward_sample);

// out[r] = the logarithm of the sum of e^x[r, c], float64: the largest x plus the logarithm of an exact sum in units of
// 2^-40. NaN for a row with NaN, +inf or only -inf.
ONWARD_API int32_t onward_log_sums(int64_t rows, int64_t columns, const void* x, int32_t dtype,
                                   int64_t stride, double* out) {
  using namespace onward;
  const SampleOptions options{1.0f, 0, 1.0f, -INFINITY, 0, 0};
  return for_rows(rows, columns, x, dtype, stride, [&](int64_t row, auto* logits, RowMemory& memory) {
    out[row] = Race(logits, columns, options, memory).log_sum();
  });
}
