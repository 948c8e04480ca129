// The instruction sets that were built, those that this processor can run, and the one of this library.
#include "api.h"
#include "platform.h"

ONWARD_API const char* onward_isa_name() { return ONWARD_ISA_NAME; }

// The names of all instruction sets, best first.
ONWARD_API const char* onward_isas() {
#define ONWARD_ISA(name, check) name " "
  return
#include "isas.h"
      ;
#undef ONWARD_ISA
}

// One bit for each of onward_isas, the lowest for the first: whether this processor can run it.
ONWARD_API int32_t onward_usable_isas() {
  ONWARD_ASK_PROCESSOR();
#define HAS(feature) ONWARD_PROCESSOR_HAS(feature)
#define ONWARD_ISA(name, check) bool(check),
  const bool usable[] = {
#include "isas.h"
  };
#undef ONWARD_ISA
  int32_t bits = 0, bit = 1;
  for (const bool each : usable) {
    bits |= each ? bit : 0;
    bit <<= 1;
  }
  return bits;
}
