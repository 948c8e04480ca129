#include "platform.h"

#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace onward {

int allowed_cores() {
#if defined(__linux__) && !defined(ONWARD_PORTABLE_PLATFORM)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
#endif
  return int(sysconf(_SC_NPROCESSORS_ONLN));
}

int64_t now_in_nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

void yield_core() { sched_yield(); }

void* allocate(int64_t bytes) {
  void* data = nullptr;
  return posix_memalign(&data, 4096, size_t(bytes)) == 0 ? data : nullptr;
}

#if !defined(__x86_64__)
bool processor_has([[maybe_unused]] const char* feature) {
#if defined(__linux__) && defined(__aarch64__) && !defined(ONWARD_PORTABLE_PLATFORM)
  // HWCAP_ASIMDDP and HWCAP2_I8MM on Linux.
  if (std::strcmp(feature, "dotprod") == 0) return (getauxval(AT_HWCAP) & 1ul << 20) != 0;
  if (std::strcmp(feature, "i8mm") == 0) return (getauxval(AT_HWCAP2) & 1ul << 13) != 0;
#elif defined(__APPLE__) && !defined(ONWARD_PORTABLE_PLATFORM)
  const char* name = std::strcmp(feature, "dotprod") == 0 ? "hw.optional.arm.FEAT_DotProd"
                     : std::strcmp(feature, "i8mm") == 0  ? "hw.optional.arm.FEAT_I8MM"
                                                          : "";
  int32_t has = 0;
  size_t bytes = sizeof has;
  return sysctlbyname(name, &has, &bytes, nullptr, 0) == 0 && has != 0;
#endif
  return false;
}
#endif

}  // namespace onward
