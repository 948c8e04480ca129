// Which of the libraries this processor can run, and which one this is.
#include "api.h"

ONWARD_API const char* onward_isa_name() { return ONWARD_ISA_NAME; }

// A bit per library beyond the portable one: 1 avx2, 2 avx512. __builtin_cpu_supports also asks
// whether the operating system saves the wide registers.
ONWARD_API int32_t onward_cpu_features() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") &&
                      __builtin_cpu_supports("avx512bf16");
  return (avx2 ? 1 : 0) | (avx512 ? 2 : 0);
#else
  return 0;
#endif
}
