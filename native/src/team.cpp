#include "team.h"

#include <atomic>
#include <new>

#include "ahead.h"
#include "api.h"
#include "platform.h"

namespace onward {
namespace {

constexpr int kMaxThreads = 256;
// How long an idle thread spins: longer than the gap between two kernels of a forward, and too short to be noticed as
// load.
constexpr int64_t kSpinNanoseconds = 50'000;
// How long it spins while a program runs, because the program's next loop is certain to come.
constexpr int64_t kProgramSpinNanoseconds = 5'000'000;

// After this time, another process has probably taken the core of the thread being waited for, so the waiting thread
// yields its core. On an idle machine nothing else wants to run, and yielding costs half a microsecond.
constexpr int64_t kPatienceNanoseconds = 100'000;

// Spins until ready() returns true or limit() nanoseconds have passed, and calls idle() meanwhile. Returns whether
// it became ready.
template <class Limit, class Idle, class Ready>
bool spin_until(Limit&& limit, Idle&& idle, Ready&& ready) {
  if (ready()) return true;
  if (limit() <= 0) return false;
  const int64_t began = now_in_nanoseconds();
  int64_t waited;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      idle();
    }
    waited = now_in_nanoseconds() - began;
    if (waited > kPatienceNanoseconds) yield_core();
  } while (waited < limit());
  return false;
}

// A loop is divided into chunks. Every thread owns a contiguous share of them and takes chunks from the front; a
// thread that has finished takes chunks from the back of other shares. So a thread reads memory in one stream, and
// a late or preempted thread delays the others by at most one chunk.
//
// A share is one word: the loop's generation, the next chunk and the end. A thread claims a chunk by changing that
// word, and only then reads the loop's description: a loop with claimed chunks is not over, so its description is
// still valid. A late thread finds empty shares or another generation.
struct Share {
  static constexpr uint32_t kMaxChunks = 0xffff;
  alignas(64) std::atomic<uint64_t> word{0};

  static uint64_t pack(uint64_t generation, uint64_t next, uint64_t end) {
    return generation << 32 | next << 16 | end;
  }

  // Claims a chunk and returns its number, or -1 if none is left.
  int64_t claim(bool front) {
    uint64_t seen = word.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t next = seen >> 16 & 0xffff, end = seen & 0xffff;
      if (next == end) return -1;
      const uint64_t rest = front ? pack(seen >> 32, next + 1, end) : pack(seen >> 32, next, end - 1);
      if (word.compare_exchange_weak(seen, rest, std::memory_order_acq_rel)) {
        return int64_t(front ? next : end - 1);
      }
    }
  }
};

class Team {
 public:
  explicit Team(int size) : size_(size) {}

  void run(int64_t count, int64_t grain, ChunkBody body, void* context) {
    Lock turn(turn_);
    start_workers();
    body_ = body;
    context_ = context;
    count_ = count;
    grain_ = grain;
    publish(uint32_t(ceil_div(count, grain)));
    post_staged();
    work(0);
    wait_for_stragglers();
  }

  int size() const { return size_.load(std::memory_order_relaxed); }

  void resize(int size) {
    Lock turn(turn_);
    stop_workers();
    size_.store(size, std::memory_order_relaxed);
  }

  // See team.h. Staged reads are posted once.
  void stage(const Reads& reads) {
    staged_ = reads;
    is_staged_ = true;
  }
  void post_staged() {
    if (!is_staged_) return;
    is_staged_ = false;
    board_.post(staged_);
  }
  void program_begins() { programs_.fetch_add(1); }
  void program_ends() {
    programs_.fetch_sub(1);
    is_staged_ = false;  // the staged memory may be freed before the next loop begins
  }

  void hold() { turn_.lock(); }
  void release() { turn_.unlock(); }

 private:
  // Distributes the chunks and wakes the workers.
  void publish(uint32_t chunks) {
    unfinished_.store(chunks, std::memory_order_relaxed);
    const uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
    const int threads = size();
    for (int i = 0; i < threads; ++i) {
      const uint64_t begin = uint64_t(chunks) * i / threads;
      const uint64_t end = uint64_t(chunks) * (i + 1) / threads;
      shares_[i].word.store(Share::pack(generation, begin, end), std::memory_order_release);
    }
    generation_.store(generation);
    if (sleepers_.load() > 0) {
      Lock lock(sleep_);
      wake_.wake_all();
    }
  }

  // Runs the chunks of thread `me`, then chunks that other threads have not started. Reports the number of chunks
  // once, at the end: if all threads updated a counter after every chunk, its cache line would move between cores.
  void work(int me) {
    const int threads = size();
    uint32_t done = 0;
    for (int i = 0; i < threads; ++i) {
      const int owner = me + i < threads ? me + i : me + i - threads;
      for (;;) {
        const int64_t chunk = shares_[owner].claim(i == 0);
        if (chunk < 0) break;
        const int64_t begin = chunk * grain_;
        body_(context_, begin, begin + grain_ < count_ ? begin + grain_ : count_);
        ++done;
      }
    }
    if (done > 0 && unfinished_.fetch_sub(done) == done && caller_sleeps_.load()) {
      Lock lock(sleep_);
      finished_.wake_one();
    }
  }

  void wait_for_stragglers() {
    const auto finished = [this] { return unfinished_.load() == 0; };
    if (spin(0, own_ahead_, finished)) return;
    Lock lock(sleep_);
    caller_sleeps_.store(true);
    while (!finished()) finished_.wait(sleep_);
    caller_sleeps_.store(false);
  }

  template <class Ready>
  bool spin(int me, Ahead& ahead, Ready&& ready) {
    const auto limit = [this] {
      const bool program = programs_.load(std::memory_order_relaxed) > 0;
      return spin_ > 0 && program ? kProgramSpinNanoseconds : spin_;
    };
    const auto idle = [&] {
      if (!ahead.step(board_, me, size())) relax();
    };
    return spin_until(limit, idle, ready);
  }

  void worker(int me) {
    Ahead ahead;
    for (;;) {
      const uint32_t seen = generation_.load(std::memory_order_acquire);
      if (stopping_.load()) return;
      work(me);
      const auto changed = [&] { return generation_.load() != seen; };
      if (spin(me, ahead, changed)) continue;
      Lock lock(sleep_);
      sleepers_.fetch_add(1);
      while (!changed()) wake_.wait(sleep_);
      sleepers_.fetch_sub(1);
    }
  }

  void start_workers() {
    if (started_ >= 0) return;
    // With more threads than cores, spinning threads would take cores from working threads.
    const int cores = allowed_cores();
    spin_ = cores > 0 && size() > cores ? 0 : kSpinNanoseconds;
    for (started_ = 0; started_ < size() - 1; ++started_) {
      workers_[started_] = {this, started_ + 1, {}};
      const auto entry = [](void* worker) -> void* {
        inside_ = true;
        static_cast<Worker*>(worker)->team->worker(static_cast<Worker*>(worker)->index);
        return nullptr;
      };
      // If no more threads can be started, those that exist do all the work.
      Worker& worker = workers_[started_];
      if (!worker.thread.start(entry, &worker)) break;
    }
  }

  void stop_workers() {
    stopping_.store(true);
    publish(0);
    for (int i = 0; i < started_; ++i) workers_[i].thread.join();
    stopping_.store(false);
    started_ = -1;
  }

 public:
  static thread_local bool inside_;  // this thread is running a chunk

 private:
  static thread_local Reads staged_;
  static thread_local bool is_staged_;

  struct Worker {
    Team* team;
    int index;  // index of its share
    Thread thread;
  };

  alignas(128) std::atomic<uint32_t> generation_{0};
  Board board_;
  Ahead own_ahead_;  // of the calling thread
  std::atomic<int> programs_{0};
  alignas(128) std::atomic<uint32_t> unfinished_{0};
  std::atomic<bool> caller_sleeps_{false};
  alignas(128) ChunkBody body_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0, grain_ = 1;
  int64_t spin_ = 0;
  std::atomic<int> size_;
  int started_ = -1;  // workers running; -1 before the first loop, after a fork or a resize
  std::atomic<bool> stopping_{false};
  std::atomic<int> sleepers_{0};
  Mutex turn_;   // one loop at a time
  Mutex sleep_;  // guards the two conditions
  Condition wake_, finished_;
  Share shares_[kMaxThreads];
  Worker workers_[kMaxThreads];
};

thread_local bool Team::inside_ = false;
thread_local Reads Team::staged_;
thread_local bool Team::is_staged_ = false;

// The team is never destroyed: its workers may still be asleep in it when the process ends.
alignas(Team) unsigned char storage[sizeof(Team)];
Once once;

Team& team() {
  once.call([] {
    new (storage) Team(1);
    // Forks happen between loops. A child process has no workers: it gets a new team of the same size, whose
    // threads start with its first loop.
    at_forks([] { team().hold(); }, [] { team().release(); }, [] { new (storage) Team(team().size()); });
  });
  return *reinterpret_cast<Team*>(storage);
}

}  // namespace

void parallel_for(int64_t count, int64_t grain, ChunkBody body, void* context) {
  if (count <= 0) return;
  if (grain < 1) grain = 1;
  const int64_t least = ceil_div(count, Share::kMaxChunks);
  if (grain < least) grain = round_up(least, grain);
  if (Team::inside_ || count <= grain || team().size() == 1) {
    for (int64_t begin = 0; begin < count; begin += grain) {
      body(context, begin, begin + grain < count ? begin + grain : count);
    }
    return;
  }
  Team::inside_ = true;
  team().run(count, grain, body, context);
  Team::inside_ = false;
}

int num_threads() { return team().size(); }

void stage_reads(const Reads& reads) { team().stage(reads); }
void post_reads() { team().post_staged(); }

AwakeTeam::AwakeTeam() { team().program_begins(); }
AwakeTeam::~AwakeTeam() { team().program_ends(); }

}  // namespace onward

// Takes effect at once; loops in progress finish first. 1 … 256.
ONWARD_API int32_t onward_set_num_threads(int32_t count) {
  if (count < 1 || count > onward::kMaxThreads) return onward::kBadArgument;
  if (onward::Team::inside_) return onward::kBadArgument;
  if (count != onward::team().size()) onward::team().resize(count);
  return onward::kOk;
}

ONWARD_API int32_t onward_num_threads() { return onward::num_threads(); }
