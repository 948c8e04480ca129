// Runs a program, a flat list of kernel calls, in one call.
//
// The code is an array of 64-bit words. An instruction is the address of its Instruction, the number of its
// arguments, and the arguments in the order of the kernel's parameters.
#include "program.h"

#include "platform.h"
#include "team.h"

namespace onward {

Instruction* instructions = nullptr;

namespace {

// Whether the instruction at `at` has all its arguments.
bool fits(const Instruction& instruction, const int64_t* code, int64_t at, int64_t words) {
  return code[at + 1] == instruction.arguments && at + 2 + code[at + 1] <= words;
}

// Announces to the team the memory that the next kernel with `reads` will read.
class LookAhead {
 public:
  LookAhead(const int64_t* code, int64_t words) : code_(code), words_(words) {}

  void stage(int64_t at) {
    if (at <= reader_) return;
    for (; at < words_; at += 2 + code_[at + 1]) {
      const auto* instruction = from_word<const Instruction*>(code_[at]);
      if (!fits(*instruction, code_, at, words_)) break;
      if (instruction->reads == nullptr) continue;
      reader_ = at;
      return stage_reads(instruction->reads(code_ + at + 2));
    }
    reader_ = words_;
  }

 private:
  const int64_t* code_;
  int64_t words_;
  int64_t reader_ = -1;  // the last announced instruction
};

}  // namespace
}  // namespace onward

// The first word of an instruction that calls the kernel `name`; 0 if programs cannot call it.
ONWARD_API int64_t onward_program_instruction(const char* name) {
  for (const onward::Instruction* i = onward::instructions; i != nullptr; i = i->next) {
    if (std::strcmp(i->name, name) == 0) return int64_t(reinterpret_cast<intptr_t>(i));
  }
  return 0;
}

// Runs code[0 … words - 1]. Stops at the first instruction that fails and stores its index in code in `failed`,
// else -1. If `nanoseconds` is not null, adds the time of instruction i to nanoseconds[i].
ONWARD_API int32_t onward_program_run(const int64_t* code, int64_t words, int64_t* failed,
                                      int64_t* nanoseconds) {
  using namespace onward;
  *failed = -1;
  const AwakeTeam awake;
  LookAhead ahead(code, words);
  ahead.stage(0);
  post_reads();
  int64_t before = nanoseconds != nullptr ? now_in_nanoseconds() : 0;
  for (int64_t at = 0, i = 0; at < words; at += 2 + code[at + 1], ++i) {
    const Instruction* instruction = from_word<const Instruction*>(code[at]);
    if (!fits(*instruction, code, at, words)) {
      *failed = at;
      return kBadArgument;
    }
    ahead.stage(at + 2 + code[at + 1]);
    const int32_t status = instruction->run(code + at + 2);
    if (instruction->reads != nullptr) post_reads();
    if (status != kOk) {
      *failed = at;
      return status;
    }
    if (nanoseconds != nullptr) {
      const int64_t now = now_in_nanoseconds();
      nanoseconds[i] += now - before;
      before = now;
    }
  }
  return kOk;
}
