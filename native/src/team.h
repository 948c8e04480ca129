// The team of threads: persistent workers that share a loop with the thread that calls.
#pragma once
#include <cstdint>
#include <type_traits>

#include "ahead.h"

namespace onward {

using ChunkBody = void (*)(void* context, int64_t begin, int64_t end);

// Runs body over [0, count) in chunks of `grain` (or a multiple of it, where there would be more than
// 65535), on the caller and on the workers, and returns when all are done. Every thread starts on its
// own contiguous share of the chunks, in order, and helps the others when it is done. So a kernel's
// result may never depend on who ran a chunk, and chunks must write to disjoint places. A loop of one
// chunk, or one inside another, runs inline; loops of several callers take turns.
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

int num_threads();  // workers and the caller

// What this thread's next loop but one will read: idle threads look ahead to it (ahead.h) as soon as
// the next loop has begun, or post_reads() is called.
void stage_reads(const Reads& reads);
void post_reads();

// A program in progress: workers stay awake between its loops, and look ahead no further than its end.
struct AwakeTeam {
  AwakeTeam();
  ~AwakeTeam();
};

}  // namespace onward
