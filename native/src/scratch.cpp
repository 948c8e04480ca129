#include "scratch.h"

#include <cstdlib>

#include "platform.h"

namespace onward {
namespace {

struct Buffers {
  void* data[kScratchSlots] = {};
  int64_t bytes[kScratchSlots] = {};
  ~Buffers() {
    for (void* buffer : data) std::free(buffer);
  }
};

thread_local Buffers buffers;

}  // namespace

void* scratch(ScratchSlot slot, int64_t bytes) {
  if (bytes > buffers.bytes[slot]) {
    // Allocate half as much again, so that a slowly growing prompt doesn't allocate at every length.
    const int64_t wanted = (bytes + bytes / 2 + 4095) / 4096 * 4096;
    std::free(buffers.data[slot]);
    buffers.bytes[slot] = 0;
    buffers.data[slot] = allocate(wanted);
    if (buffers.data[slot] != nullptr) buffers.bytes[slot] = wanted;
  }
  return buffers.data[slot];
}

}  // namespace onward
