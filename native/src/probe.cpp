// The limits of the machine, which benchmarks print next to their results.
#include "simd.h"
#include "team.h"

namespace onward {
namespace {

// As many independent sums as the registers hold, to hide the latency of every step.
constexpr int kSums = shapes::linear::kTileRows * shapes::linear::kBlocks[shapes::linear::kTileRows];

i32x16 start(int32_t bits, i32x16*) { return splat(bits); }
f32x16 start(int32_t bits, f32x16*) { return as_f32(splat(bits)); }

// Repeats a step on every sum; returns a value that depends on all sums. They start from different values,
// because otherwise the compiler would compute only one of them.
template <class Sum, class Step>
float repeat(int64_t iterations, Step step) {
  Sum sum[kSums];
#pragma GCC unroll 32
  for (int s = 0; s < kSums; ++s) sum[s] = start(s, &sum[s]);
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 32
    for (int s = 0; s < kSums; ++s) sum[s] = step(sum[s]);
  }
  float total = 0;
#pragma GCC unroll 32
  for (int s = 0; s < kSums; ++s) total += float(sum_lanes(sum[s]));
  return total;
}

}  // namespace
}  // namespace onward

// Reads `bytes` (a multiple of 256) of 64-byte aligned data once. The threads share pieces of `grain` bytes. The
// result depends on all bytes, so that no read is optimized away.
ONWARD_API int64_t onward_probe_read(const void* data, int64_t bytes, int64_t grain) {
  using namespace onward;
  const auto* lines = static_cast<const uint8_t*>(data);
  int64_t total = 0;
  parallel_for(bytes / 256, ceil_div(grain, 256), [&](int64_t begin, int64_t end) {
    i32x16 sum[4] = {zero_i32(), zero_i32(), zero_i32(), zero_i32()};
    for (int64_t i = begin; i < end; ++i) {
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        sum[part] = add(sum[part], load_i32(lines + i * 256 + part * 64));
      }
    }
    const int64_t mine = sum_lanes(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
    __atomic_fetch_add(&total, mine, __ATOMIC_RELAXED);
  });
  return total;
}

// Every thread runs `iterations` rounds of independent 16-lane steps. kind: 0 float fma (2 operations per
// lane), 1 pairs of bf16 (4), 2 bytes (8). Returns the number of steps of all threads.
ONWARD_API int64_t onward_probe_arithmetic(int32_t kind, int64_t iterations) {
  using namespace onward;
  volatile float sink = 0;
  volatile float one = 1.0f;
  volatile int32_t words = 0x3f003f00;
  parallel_for(num_threads(), 1, [&](int64_t, int64_t) {
    const f32x16 wf = splat(float(one)), xf = wf;
    const i32x16 wi = splat(int32_t(words)), xi = wi;
    if (kind == 0) sink = repeat<f32x16>(iterations, [&](f32x16 s) { return fma(wf, xf, s); });
    if (kind == 1) sink = repeat<f32x16>(iterations, [&](f32x16 s) { return dot_bf16(s, wi, xi); });
    if (kind == 2) sink = repeat<i32x16>(iterations, [&](i32x16 s) { return dot_i8(s, wi, xi); });
  });
  return iterations * kSums * num_threads();
}
