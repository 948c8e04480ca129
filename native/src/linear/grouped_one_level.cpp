// Kernels of int4 and of the grouped formats whose groups have float16 scales (or exponents) of their own.
#include <utility>

#include "grouped_kernels.h"

namespace onward::linear {

namespace {

template <int... R>
constexpr KernelTable int4_table(std::integer_sequence<int, R...>) {
  KernelTable table;
  if constexpr (ByteWords::kUsed) {
    ((table.run[R + 1][1] = GroupedKernel<PackedLayout<kPackedInt4>, R + 1, 1>::run), ...);
  } else {
    ((table.run[R + 1][1] = Int4Kernel<R + 1>::run), ...);
  }
  return table;
}
constexpr KernelTable kInt4Kernels = int4_table(std::make_integer_sequence<int, kStreamRows>{});

}  // namespace

const KernelTable& two_level_kernels(Format format);
const KernelTable& zero_point_kernels(Format format);
const KernelTable& float_kernels(Format format);

const KernelTable& grouped_kernels(Format format) {
  switch (format) {
    case kPackedInt4: return kInt4Kernels;
    case kPackedQ8_0: return kGroupedKernels<kPackedQ8_0>;
    case kPackedQ4_1: return kGroupedKernels<kPackedQ4_1>;
    case kPackedQ5_0: return kGroupedKernels<kPackedQ5_0>;
    case kPackedQ5_1: return kGroupedKernels<kPackedQ5_1>;
    case kPackedIq4Nl: return kGroupedKernels<kPackedIq4Nl>;
    case kPackedMxfp4: return kGroupedKernels<kPackedMxfp4>;
    case kPackedUint4:
    case kPackedUint4_128:
    case kPackedUint8_128: return zero_point_kernels(format);
    case kPackedFp8:
    case kPackedNf4: return float_kernels(format);
    default: return two_level_kernels(format);
  }
}

}  // namespace onward::linear
