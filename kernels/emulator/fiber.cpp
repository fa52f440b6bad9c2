// How is one fiber left for another? See fiber.h.
#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace emulator {

Stacks::Stacks() {
  void* memory = mmap(nullptr, kBytes * kCount, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
}

#ifdef EMULATOR_UCONTEXT

void Fiber::start(char* bottom, char* top, void (*entry)()) {
  getcontext(&context_);
  context_.uc_stack.ss_sp = bottom;
  context_.uc_stack.ss_size = static_cast<size_t>(top - bottom);
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
}

void Fiber::switch_to(Fiber& other) { swapcontext(&context_, &other.context_); }

#else

// Saves what the System V ABI lets a caller rely on, changes stacks, restores the same of the other fiber.
extern "C" __attribute__((visibility("hidden"))) void emulator_switch(void** save, void* load);
asm(R"(
.text
.hidden emulator_switch
.type emulator_switch, @function
.globl emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, . - emulator_switch
)");

void Fiber::start(char*, char* top, void (*entry)()) {
  // As the switch leaves a stack: six registers and the address to go on at. A function expects its stack 8 bytes off
  // a multiple of 16, as its own return address lies there.
  auto* slot = reinterpret_cast<uint64_t*>(top);
  *--slot = 0;
  *--slot = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < 6; ++i) *--slot = 0;
  stack_pointer_ = slot;
}

void Fiber::switch_to(Fiber& other) { emulator_switch(&stack_pointer_, other.stack_pointer_); }

#endif

}  // namespace emulator
