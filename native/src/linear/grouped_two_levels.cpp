// Kernels of the grouped formats whose groups have small numbers for scales, times a float16 or over
// a float32 for 256 inputs.
#include <utility>

#include "grouped_kernels.h"

namespace onward::linear {

const KernelTable& two_level_kernels(Format format) {
  switch (format) {
    case kPackedQ4K: return kGroupedKernels<kPackedQ4K>;
    case kPackedQ5K: return kGroupedKernels<kPackedQ5K>;
    case kPackedQ6K: return kGroupedKernels<kPackedQ6K>;
    case kPackedQ2K: return kGroupedKernels<kPackedQ2K>;
    case kPackedNvfp4: return kGroupedKernels<kPackedNvfp4>;
    case kPackedQ3K: return kGroupedKernels<kPackedQ3K>;
    default: return kGroupedKernels<kPackedIq4Xs>;
  }
}

}  // namespace onward::linear
