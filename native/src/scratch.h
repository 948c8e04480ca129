// Working memory of a kernel call, kept between calls.
#pragma once
#include <cstdint>

namespace onward {

// At least `bytes` of 64-byte aligned memory, private to the calling thread and valid until its next
// call with the same slot; null when there is none. Ask for it in the thread that makes the kernel
// call, before parallel_for, and let the team's chunks share it. Contents are undefined.
enum ScratchSlot { kScratchActivations, kScratchWorker, kScratchSlots };
void* scratch(ScratchSlot slot, int64_t bytes);

}  // namespace onward
