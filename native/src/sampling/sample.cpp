// Draws an id for each row: temperature, top-k, top-p, min-p and Gumbel-max in one call. The definition
// is onward.sampling in Python, and the ids are the same whatever the instruction set.
#include "program.h"
#include "race.h"
#include "scratch.h"

// Row r of x draws with temperature[r] (0: greedy), top_k[r] (0: all), top_p[r] (1: all), min_score[r]
// (ids score at least this; the best scores 0; -inf: all) and the noise of seeds[r] at positions[r].
// A row without a finite largest element gives the first NaN, else the first largest.
// columns in 1 … 2^22: sums of units fit in 64 bits.
ONWARD_API int32_t onward_sample(int64_t rows, int64_t columns, const void* x, int32_t dtype,
                                 int64_t stride, const float* temperature, const int64_t* top_k,
                                 const float* top_p, const float* min_score, const int64_t* seeds,
                                 const int64_t* positions, int64_t* out) {
  using namespace onward;
  if (rows < 0 || columns <= 0 || columns > int64_t(1) << 22) return kBadArgument;
  const int64_t each = round_up(RowMemory(columns).bytes(), 64);
  const int64_t together = std::max<int64_t>(1, std::min<int64_t>(rows, num_threads()));
  char* memory = static_cast<char*>(scratch(kScratchActivations, together * each));
  if (memory == nullptr) return kOutOfMemory;
  const bool known = with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t first = 0; first < rows; first += together) {
      // A row alone is shared out; several run one a thread.
      parallel_for(std::min(together, rows - first), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t row = first + i;
          const SampleOptions options{temperature[row], top_k[row],         top_p[row],
                                      min_score[row],   uint64_t(seeds[row]), uint32_t(positions[row])};
          RowMemory place(columns);
          place.place(memory + i * each);
          out[row] = Race<T>(static_cast<const T*>(x) + row * stride, columns, options, place).run();
        }
      });
    }
  });
  return known ? kOk : kBadArgument;
}
ONWARD_INSTRUCTION(onward_sample);
