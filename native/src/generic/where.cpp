// Chooses between two tensors, element by element.
#include "../program.h"
#include "walk.h"

namespace onward::generic {
namespace {

constexpr int64_t kGrain = 1 << 15;

template <class Word>
inline void choose(const uint8_t* __restrict condition, const Word* __restrict a,
                   const Word* __restrict b, int64_t count, Word* __restrict out) {
  for (int64_t i = 0; i < count; ++i) out[i] = condition[i] != 0 ? a[i] : b[i];
}

}  // namespace
}  // namespace onward::generic

// out = condition ? a : b. a and b are first converted to out's type.
ONWARD_API int32_t onward_where(int64_t ndim, const int64_t* shape, const void* condition,
                                const int64_t* condition_strides, const void* a, int32_t a_dtype,
                                const int64_t* a_strides, const void* b, int32_t b_dtype,
                                const int64_t* b_strides, void* out, int32_t out_dtype,
                                const int64_t* out_strides) {
  using namespace onward;
  using namespace onward::generic;
  const Operand operands[4] = {{condition, kBool, condition_strides},
                               {a, a_dtype, a_strides},
                               {b, b_dtype, b_strides},
                               {out, out_dtype, out_strides}};
  Walk walk;
  if (!make_walk(kAnyOrder, ndim, shape, operands, &walk)) return kBadArgument;
  with_word(element_bytes(out_dtype), [&](auto* word) {
    using Word = std::remove_pointer_t<decltype(word)>;
    parallel_for(walk.count, kGrain, [&](int64_t begin, int64_t end) {
      Reader tests(walk, 0, operands[0], kBool), first(walk, 1, operands[1], out_dtype),
          second(walk, 2, operands[2], out_dtype);
      Writer writer(walk, 3, operands[3], out_dtype);
      alignas(64) Word result[kBlock];
      walk.for_blocks(begin, end, [&](int64_t at, int64_t count) {
        choose(tests.read<uint8_t>(at, count), first.read<Word>(at, count),
               second.read<Word>(at, count), count, result);
        writer.write(at, count, result);
      });
    });
  });
  return kOk;
}
ONWARD_INSTRUCTION(onward_where);
