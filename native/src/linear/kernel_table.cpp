#include "kernel_table.h"

#include <utility>

namespace onward::linear {
namespace {

template <class F, int ROWS, int... B>
constexpr void fill_rows(KernelTable& table, std::integer_sequence<int, B...>) {
  ((table.run[ROWS][B + 1] = Kernel<F, ROWS, B + 1>::run), ...);
}
template <class F, int... R>
constexpr KernelTable make_table(std::integer_sequence<int, R...>) {
  KernelTable table;
  (fill_rows<F, R + 1>(table, std::make_integer_sequence<int, kBlocks[R + 1]>{}), ...);
  return table;
}
template <class F>
constexpr KernelTable kKernels = make_table<F>(std::make_integer_sequence<int, kStreamRows>{});

}  // namespace

const KernelTable& kernels_of(Format format) {
  switch (format) {
    case kPackedF32: return kKernels<F32Format>;
    case kPackedBf16: return kKernels<Bf16Format>;
    case kPackedF16: return kKernels<F16Format>;
    case kPackedInt8: return kKernels<Int8Format>;
    default: return grouped_kernels(format);
  }
}

}  // namespace onward::linear
