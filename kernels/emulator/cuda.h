// What does a kernel see of CUDA when it runs on the CPU?
//
// platform.h includes this file where no CUDA compiler is at work. It holds the part of the language that our kernels
// use, and no more: a kernel that needs another name of CUDA's adds it here. Every call that waits for other threads
// carries the file and line of its caller, so that the scheduler can say who waits for whom and where.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#define __global__ __attribute__((noinline))  // its own name in the places of findings
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
// All static shared arrays of a library lie side by side in its thread-local storage, which the scheduler poisons.
#define __shared__ static thread_local
#define MEGATRONISH_DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(::emulator::dynamic_shared_memory())

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// The scheduler sets them before each turn of a thread.
extern dim3 gridDim, blockDim, blockIdx, threadIdx;
constexpr int warpSize = 32;

namespace emulator {

struct Place {
  const char* file;
  int line;
};

// Defaults of parameters are those of the caller's line.
#define EMULATOR_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

enum class Call { kShuffle, kShuffleXor, kShuffleUp, kShuffleDown, kBallot, kSyncWarp, kSyncThreads };

// Waits until all lanes of the mask have made the same call. Shuffles return what the lane `source` brought along, a
// ballot one bit for each lane that brought something other than zero.
uint64_t meet_warp(Call call, unsigned mask, uint64_t brought, int source, Place place);
void meet_block(Place place);
int num_multiprocessors();
int lane();  // of this thread in its warp
void* dynamic_shared_memory();

struct Launch {
  dim3 grid, block;
  size_t shared_bytes;
  Place place;
};

using Body = void (*)(const void* parameters);

// Runs a kernel to its end. Throws std::runtime_error with what is wrong with it.
void run(const Launch& launch, std::string_view kernel, Body body, const void* parameters, size_t parameters_bytes);

template <typename T>
T shuffle(Call call, unsigned mask, T value, int source, Place place) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles 4 or 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = meet_warp(call, mask, bits, source, place);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// The lane itself where its source would lie outside its segment of `width` lanes.
inline int within(int source, int width) {
  const int first = lane() / width * width;
  return source >= first && source < first + width ? source : lane();
}

}  // namespace emulator

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_CALLER) {
  source = emulator::lane() / width * width + (source & (width - 1));
  return emulator::shuffle(emulator::Call::kShuffle, mask, value, source, {file, line});
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMULATOR_CALLER) {
  const int source = emulator::within(emulator::lane() ^ lane_mask, width);
  return emulator::shuffle(emulator::Call::kShuffleXor, mask, value, source, {file, line});
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_CALLER) {
  const int source = emulator::within(emulator::lane() - static_cast<int>(delta), width);
  return emulator::shuffle(emulator::Call::kShuffleUp, mask, value, source, {file, line});
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_CALLER) {
  const int source = emulator::within(emulator::lane() + static_cast<int>(delta), width);
  return emulator::shuffle(emulator::Call::kShuffleDown, mask, value, source, {file, line});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_CALLER) {
  return static_cast<unsigned>(emulator::meet_warp(emulator::Call::kBallot, mask, predicate != 0, 0, {file, line}));
}

inline int __any_sync(unsigned mask, int predicate, EMULATOR_CALLER) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}

inline int __all_sync(unsigned mask, int predicate, EMULATOR_CALLER) {
  return __ballot_sync(mask, predicate, file, line) == mask;
}

inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_CALLER) {
  emulator::meet_warp(emulator::Call::kSyncWarp, mask, 0, 0, {file, line});
}

inline void __syncthreads(EMULATOR_CALLER) { emulator::meet_block({file, line}); }

// Functions of CUDA's mathematics that <cmath> does not know.
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
