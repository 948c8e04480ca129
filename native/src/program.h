// Programs: kernels as instructions of 64-bit words.
//
// ONWARD_INSTRUCTION(onward_…) after the definition of a kernel makes it callable from programs. Its arguments
// are read from words: integers, addresses, and the bits of floats and doubles (in the low bytes of a word).
#pragma once
#include <cstring>
#include <type_traits>
#include <utility>

#include "ahead.h"
#include "api.h"

namespace onward {

struct Instruction {
  const char* name;
  int64_t arguments;
  int32_t (*run)(const int64_t* words);
  Reads (*reads)(const int64_t* words);  // null: nothing worth prefetching
  Instruction* next;
};

// The list of all instructions, built when the library is loaded.
extern Instruction* instructions;

template <class T>
inline T from_word(int64_t word) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(static_cast<intptr_t>(word));
  } else if constexpr (std::is_floating_point_v<T>) {
    T value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  } else {
    return static_cast<T>(word);
  }
}

template <auto kKernel, auto kReads = nullptr>
struct Registered {
  template <class Result, class... T, size_t... I>
  static Result call(Result (*function)(T...), const int64_t* words, std::index_sequence<I...>) {
    return function(from_word<T>(words[I])...);
  }
  template <class... T>
  static constexpr int64_t arity(int32_t (*)(T...)) { return sizeof...(T); }

  static int32_t run(const int64_t* words) {
    return call(kKernel, words, std::make_index_sequence<arity(kKernel)>{});
  }

  static Reads reads(const int64_t* words) {
    if constexpr (std::is_null_pointer_v<decltype(kReads)>) {
      return {};
    } else {
      return call(kReads, words, std::make_index_sequence<arity(kKernel)>{});
    }
  }

  explicit Registered(const char* name)
      : entry{name, arity(kKernel), run,
              std::is_null_pointer_v<decltype(kReads)> ? nullptr : reads, instructions} {
    instructions = &entry;
  }
  Instruction entry;
};

#define ONWARD_INSTRUCTION(name) static const onward::Registered<name> registered_##name(#name)
// For a kernel that reads a lot of memory: reads(arguments) returns the memory to prefetch.
#define ONWARD_INSTRUCTION_READS(name, reads) \
  static const onward::Registered<name, reads> registered_##name(#name)

}  // namespace onward
