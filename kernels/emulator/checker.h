// What does a kernel do to memory that it must not? See checker.cpp.
#pragma once

#include <cstddef>

namespace emulator {

class Stacks;

namespace checker {

// What a kernel may do to a tensor.
enum class Use {
  kInput,    // read
  kUpdated,  // read and write
  kOutput,   // write, all of it, and read what is written
  kScratch,  // write, and read what is written
};

// A call of an operator: its tensors are announced, its kernels run, and at its end every output must be written.
// `close` throws std::runtime_error if one is not.
void open();
void announce(const char* name, void* data, size_t bytes, Use use);
void close();

struct Range {
  const void* data;
  size_t bytes;
};

// The scheduler tells what orders memory.
void begin_launch(Range parameters, Range dynamic_shared, const Stacks* stacks);
void begin_block();
void begin_turn(int thread);
void end_turn();
void order_block();
void order_warp(int warp);

}  // namespace checker
}  // namespace emulator
