// All system calls of the kernels, that is everything that is not in C++17, are in this file and platform.cpp. POSIX is
// enough. Code for Linux or a processor is marked, and ONWARD_PORTABLE_PLATFORM leaves it out.
#pragma once
#include <pthread.h>

#include <cstdint>

namespace onward {

int allowed_cores();            // cores that this process may run on
int64_t now_in_nanoseconds();   // monotonic clock
void yield_core();              // lets another thread run on this core
void* allocate(int64_t bytes);  // whole pages of 4096 bytes, to be freed with std::free; null if out of memory

// Whether the processor has a feature, by the compiler's name for it, and the system saves its registers.
#if defined(__x86_64__)
#define ONWARD_ASK_PROCESSOR() __builtin_cpu_init()
#define ONWARD_PROCESSOR_HAS(feature) __builtin_cpu_supports(feature)
#else
bool processor_has(const char* feature);
#define ONWARD_ASK_PROCESSOR()
#define ONWARD_PROCESSOR_HAS(feature) onward::processor_has(feature)
#endif

// A pause in a spin loop, which lets the core's other hardware thread run.
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
  // Runs body(argument) on a new thread; false if the system cannot start one.
  bool start(void* (*body)(void*), void* argument) {
    return pthread_create(&thread_, nullptr, body, argument) == 0;
  }
  void join() { pthread_join(thread_, nullptr); }

 private:
  pthread_t thread_ = {};
};

// Runs `first` exactly once: every call returns after it has finished.
class Once {
 public:
  void call(void (*first)()) { pthread_once(&once_, first); }

 private:
  pthread_once_t once_ = PTHREAD_ONCE_INIT;
};

// At every fork, calls `before` before it, and `in_parent` and `in_child` after it.
inline void at_forks(void (*before)(), void (*in_parent)(), void (*in_child)()) {
  pthread_atfork(before, in_parent, in_child);
}

}  // namespace onward
