// Working memory of kernel calls, reused between calls.
#pragma once
#include <cstdint>

namespace onward {

// Returns at least `bytes` of 64-byte aligned memory with undefined contents, or null if out of memory. It
// belongs to the calling thread and is valid until that thread's next call with the same slot. Call this in
// the thread that calls the kernel, before parallel_for; the chunks can share the memory.
enum ScratchSlot { kScratchActivations, kScratchWorker, kScratchSlots };
void* scratch(ScratchSlot slot, int64_t bytes);

}  // namespace onward
