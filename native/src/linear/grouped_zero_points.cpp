// Kernels of the grouped formats whose groups have a float16 scale and a zero point.
#include <utility>

#include "grouped_kernels.h"

namespace onward::linear {

const KernelTable& zero_point_kernels(Format format) {
  switch (format) {
    case kPackedUint4: return kGroupedKernels<kPackedUint4>;
    case kPackedUint4_128: return kGroupedKernels<kPackedUint4_128>;
    default: return kGroupedKernels<kPackedUint8_128>;
  }
}

}  // namespace onward::linear
