// Everything that the kernels ask of a system: all calls that C++17 does not have stand in these two files. POSIX is
// enough; what Linux or a processor does better is marked, and ONWARD_PORTABLE_PLATFORM leaves it out.
#pragma once
#include <pthread.h>

#include <cstdint>

namespace onward {

int allowed_cores();            // that this process may run on
int64_t now_in_nanoseconds();   // of a clock that never goes back
void yield_core();              // to another thread that waits for one
void* allocate(int64_t bytes);  // of whole pages of 4096 bytes, for std::free; null when there are none

// Whether the processor has instructions, by the compiler's name of them, and the system saves their registers.
#if defined(__x86_64__)
#define ONWARD_ASK_PROCESSOR() __builtin_cpu_init()
#define ONWARD_PROCESSOR_HAS(feature) __builtin_cpu_supports(feature)
#else
bool processor_has(const char* feature);
#define ONWARD_ASK_PROCESSOR()
#define ONWARD_PROCESSOR_HAS(feature) onward::processor_has(feature)
#endif

// A step of a loop that waits: lets the other thread of the core go ahead.
inline void relax() {
#if defined(__x86_64__) && !defined(ONWARD_PORTABLE_PLATFORM)
  __builtin_ia32_pause();
#elif defined(__aarch64__) && !defined(ONWARD_PORTABLE_PLATFORM)
  asm volatile("yield");
#endif
}

class Mutex {
 public:
  void lock() { pthread_mutex_lock(&mutex_); }
  void unlock() { pthread_mutex_unlock(&mutex_); }

 private:
  friend class Condition;
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

struct Lock {
  explicit Lock(Mutex& m) : mutex(m) { mutex.lock(); }
  ~Lock() { mutex.unlock(); }
  Mutex& mutex;
};

class Condition {
 public:
  void wait(Mutex& locked) { pthread_cond_wait(&condition_, &locked.mutex_); }
  void wake_one() { pthread_cond_signal(&condition_); }
  void wake_all() { pthread_cond_broadcast(&condition_); }

 private:
  pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

class Thread {
 public:
  // Runs body(argument) on a new thread; false when the system has none left.
  bool start(void* (*body)(void*), void* argument) {
    return pthread_create(&thread_, nullptr, body, argument) == 0;
  }
  void join() { pthread_join(thread_, nullptr); }

 private:
  pthread_t thread_ = {};
};

// Calls `first` before the first call with this `once` returns, and never again.
class Once {
 public:
  void call(void (*first)()) { pthread_once(&once_, first); }

 private:
  pthread_once_t once_ = PTHREAD_ONCE_INIT;
};

// At every fork: `before` it, and after it `in_parent` and `in_child`.
inline void at_forks(void (*before)(), void (*in_parent)(), void (*in_child)()) {
  pthread_atfork(before, in_parent, in_child);
}

}  // namespace onward
