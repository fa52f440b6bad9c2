// How do the threads of a block take turns on one thread of the CPU?
//
// Each has a stack of its own, and a switch exchanges the registers that a function call must keep. In assembly that
// takes a few nanoseconds; where we have none for the processor, POSIX contexts do the same, some ten times slower.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) || defined(EMULATOR_PORTABLE_FIBERS)
#include <ucontext.h>
#define EMULATOR_UCONTEXT
#endif

namespace emulator {

class Fiber {
 public:
  // The next switch to it calls `entry` on the stack that ends at `top`. `entry` must never return.
  void start(char* bottom, char* top, void (*entry)());

  // Leaves this fiber, which must be the one at work, for another. Returns when some fiber switches back.
  void switch_to(Fiber& other);

 private:
#ifdef EMULATOR_UCONTEXT
  ucontext_t context_;
#else
  void* stack_pointer_ = nullptr;
#endif
};

// One stack for each thread of the largest block. Pages that no thread touches take no memory.
class Stacks {
 public:
  static constexpr size_t kBytes = 64 * 1024;
  static constexpr size_t kCount = 1024;

  Stacks();
  char* bottom(size_t number) const { return memory_ + number * kBytes; }
  bool contain(const void* address) const {
    return static_cast<size_t>(static_cast<const char*>(address) - memory_) < kBytes * kCount;
  }

 private:
  char* memory_;
};

}  // namespace emulator
