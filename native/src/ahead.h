// Idle threads prefetch the memory that the next kernel will read.
//
// Decoding a token reads all weights once, at memory bandwidth. Between two matrices only one thread has
// work (norms, heads, activations), and the memory bus would be idle. A program knows its next kernel and
// announces it. A thread that waits for work then prefetches the beginning of its share.
#pragma once
#include <atomic>
#include <cstdint>

namespace onward {

// The memory that a kernel is going to read: runs of units, divided between the threads as parallel_for
// divides chunks. The runs are concatenated or, if `abreast`, parallel: thread i has the same units of
// each run.
struct Reads {
  static constexpr int kRuns = 3;
  static constexpr int kBlocks = 8;
  struct Run {
    int64_t data, stride, bytes, units;  // address of the first unit; stride from unit to unit
  };
  int64_t abreast = 0;
  Run runs[kRuns] = {};
  // If units are split into blocks, byte i of a unit is blocks[i / block_bytes] + i % block_bytes after its
  // address. These are copies of the entries of a block table, which may be freed before the last prefetch.
  int64_t block_bytes = 0;  // 0: units are contiguous
  int64_t blocks[kBlocks] = {};
};

// The latest Reads, visible to all threads. A thread may see parts of two of them: it then prefetches the
// wrong lines, which is harmless.
class Board {
 public:
  void post(const Reads& reads) {
    const auto* words = reinterpret_cast<const int64_t*>(&reads);
    for (int i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_relaxed);
    edition_.store(edition_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }
  uint32_t edition() const { return edition_.load(std::memory_order_acquire); }
  void read(Reads& reads) const {
    auto* words = reinterpret_cast<int64_t*>(&reads);
    for (int i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_relaxed);
  }

 private:
  static constexpr int kWords = sizeof(Reads) / sizeof(int64_t);
  alignas(128) std::atomic<uint32_t> edition_{0};
  std::atomic<int64_t> words_[kWords] = {};
};

// The position of one thread in its share.
class Ahead {
 public:
  // Prefetches the next lines of the share of thread `me` of `threads`. Returns false if none are left.
  // (GCC 12 drops calls that only prefetch unless they must be inlined.)
  __attribute__((always_inline)) inline bool step(const Board& board, int me, int threads) {
    if (board.edition() != edition_) begin(board, me, threads);
    if (left_ <= 0) return false;
    int64_t address = run().data + unit_ * run().stride + offset_;
    int64_t bytes = run().bytes - offset_ < kStep ? run().bytes - offset_ : kStep;
    if (reads_.block_bytes > 0) {
      const int64_t block = offset_ / reads_.block_bytes, start = block * reads_.block_bytes;
      address += reads_.blocks[block % Reads::kBlocks] - start;
      if (start + reads_.block_bytes < offset_ + bytes) bytes = start + reads_.block_bytes - offset_;
    }
    const char* line = reinterpret_cast<const char*>(address);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(line + i, 0, 2);
    left_ -= kStep;
    offset_ += bytes;
    if (offset_ >= run().bytes) next_unit();
    return true;
  }

 private:
  static constexpr int64_t kStep = 1024;       // bytes between two checks for work
  static constexpr int64_t kMost = 256 << 10;  // a part of the second-level cache

  const Reads::Run& run() const { return reads_.runs[at_]; }

  void begin(const Board& board, int me, int threads) {
    edition_ = board.edition();
    board.read(reads_);
    int64_t units = 0;
    for (const auto& r : reads_.runs) units += r.units;
    if (reads_.abreast) units = reads_.runs[0].units;
    unit_ = units * me / threads;
    end_ = units * (me + 1) / threads;
    at_ = 0, offset_ = 0;
    left_ = unit_ < end_ ? kMost : 0;
    if (!reads_.abreast) skip_runs();
  }

  // In concatenated runs, unit_ and end_ are relative to the beginning of the current run.
  void skip_runs() {
    while (left_ > 0 && unit_ >= run().units) {
      unit_ -= run().units;
      end_ -= run().units;
      if (++at_ == Reads::kRuns) return stop();
    }
  }

  void next_unit() {
    offset_ = 0;
    if (reads_.abreast) {
      if (++at_ < Reads::kRuns && run().units > 0) return;
      at_ = 0;
    }
    if (++unit_ >= end_) return stop();
    if (!reads_.abreast) skip_runs();
  }

  void stop() { left_ = 0, at_ = 0; }

  uint32_t edition_ = 0;
  int64_t left_ = 0;  // bytes that may still be prefetched
  Reads reads_;
  int at_ = 0;  // run
  int64_t unit_ = 0, end_ = 0, offset_ = 0;
};

}  // namespace onward
