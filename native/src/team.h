// The team of threads: persistent workers that run loops together with the calling thread.
#pragma once
#include <cstdint>
#include <type_traits>

#include "ahead.h"

namespace onward {

using ChunkBody = void (*)(void* context, int64_t begin, int64_t end);

// Runs body over [0, count) in chunks of `grain` (or of a multiple of it, to have at most 65535 chunks), on the
// calling thread and the workers, and returns when all chunks are done. Every thread starts with a contiguous share
// of the chunks, in order, and then helps the others. So the result of a kernel must not depend on the thread that
// runs a chunk, and chunks must write to disjoint memory. A loop of one chunk and a loop inside another run inline;
// loops of several callers take turns.
void parallel_for(int64_t count, int64_t grain, ChunkBody body, void* context);

template <class Body>
inline void parallel_for(int64_t count, int64_t grain, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  parallel_for(
      count, grain,
      [](void* context, int64_t begin, int64_t end) {
        (*static_cast<Plain*>(context))(begin, end);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

int num_threads();  // the workers and the calling thread

// Announces the memory that the loop after this thread's next loop will read. Idle threads prefetch it (ahead.h) as
// soon as the next loop begins or post_reads() is called.
void stage_reads(const Reads& reads);
void post_reads();

// Exists while a program runs: workers stay awake between its loops, and prefetching ends with the program.
struct AwakeTeam {
  AwakeTeam();
  ~AwakeTeam();
};

}  // namespace onward
