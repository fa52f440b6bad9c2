// What do the parts of the emulator need to know of the launch that is running?
#pragma once

#include <string>

#include "cuda.h"

namespace emulator {

// Ends the launch: run() throws std::runtime_error with the finding, and with the kernel, block and thread at work.
[[noreturn]] void fail(const std::string& finding);

// In which order blocks, the warps of a block and the lanes of a warp take their turns.
enum class Order { kAscending, kDescending, kRandom };

std::string text(Place place);

}  // namespace emulator

// For tests, through ctypes: the order of the launches to come, and how many multiprocessors there seem to be.
extern "C" __attribute__((visibility("default"))) void emulator_set_order(int order, unsigned long long seed);
extern "C" __attribute__((visibility("default"))) void emulator_set_multiprocessors(int number);
