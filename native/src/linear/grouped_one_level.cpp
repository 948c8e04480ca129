// Kernels of the grouped formats whose groups have float16 scales (or exponents) of their own.
#include <utility>

#include "grouped_kernels.h"

namespace onward::linear {

const KernelTable& two_level_kernels(Format format);

const KernelTable& grouped_kernels(Format format) {
  switch (format) {
    case kPackedQ8_0: return kGroupedKernels<kPackedQ8_0>;
    case kPackedQ4_1: return kGroupedKernels<kPackedQ4_1>;
    case kPackedQ5_0: return kGroupedKernels<kPackedQ5_0>;
    case kPackedQ5_1: return kGroupedKernels<kPackedQ5_1>;
    case kPackedIq4Nl: return kGroupedKernels<kPackedIq4Nl>;
    case kPackedMxfp4: return kGroupedKernels<kPackedMxfp4>;
    default: return two_level_kernels(format);
  }
}

}  // namespace onward::linear
