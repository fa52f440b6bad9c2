// Which mistakes must the emulator and its checker find? One in each kernel, at the line marked by its name: the test
// looks for the kind of the finding and for that line. Every kernel but the last is given 64 threads in each of two
// blocks, and tensors of 128 floats.
#include <cstring>
#include <string>
#include <string_view>

#include "emulator/checker.h"
#include "platform.h"
#include "rows.h"
#include "teams.h"

namespace megatronish {
namespace {

constexpr int kThreads = 64, kBlocks = 2, kElements = kThreads * kBlocks;

struct Tensors {
  const float* in;
  float* out;
  float* scratch;
};

__device__ int place() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

__global__ void no_bug(Tensors t) {
  __shared__ float shared[kThreads];
  shared[threadIdx.x] = t.in[place()];
  __syncthreads();
  const float neighbour = shared[(threadIdx.x + 1) % kThreads];
  t.scratch[place()] = warp_reduce<Sum>(neighbour);
  t.out[place()] = BlockTeam::reduce<Maximum, 0>(t.scratch[place()]);
}

__global__ void missing_barrier(Tensors t) {
  __shared__ float shared[kThreads];
  shared[threadIdx.x] = t.in[place()];
  __syncthreads();
  shared[threadIdx.x ^ 32] += 1.0f;
  t.out[place()] = shared[threadIdx.x];  // missing_barrier
}

__global__ void missing_barrier_before_reuse(Tensors t) {
  __shared__ float shared[kThreads];
  shared[threadIdx.x] = t.in[place()];
  __syncthreads();
  t.out[place()] = shared[threadIdx.x ^ 32];
  shared[threadIdx.x] = 0.0f;  // missing_barrier_before_reuse
}

__global__ void missing_warp_barrier(Tensors t) {
  __shared__ float shared[kThreads];
  shared[threadIdx.x] = t.in[place()];
  const float mine = __shfl_xor_sync(kFullMask, t.in[place()], 1);  // it orders no memory
  t.out[place()] = mine + shared[threadIdx.x ^ 1];  // missing_warp_barrier
}

__global__ void race_between_blocks(Tensors t) {
  t.out[place()] = t.in[place()];
  t.scratch[threadIdx.x] = t.in[place()];  // race_between_blocks
}

__global__ void off_by_one(Tensors t) {
  t.out[place()] = t.in[place() + 1];  // off_by_one
}

__global__ void off_by_one_below(Tensors t) {
  t.out[place() - 1] = t.in[place()];  // off_by_one_below
}

__global__ void shared_memory_too_small(Tensors t) {
  MEGATRONISH_DYNAMIC_SHARED(float, shared);
  shared[threadIdx.x] = t.in[place()];  // shared_memory_too_small
  __syncthreads();
  t.out[place()] = shared[threadIdx.x];
}

__global__ void too_much_shared_memory(Tensors t) { t.out[place()] = t.in[place()]; }

__global__ void unwritten_row(Tensors t) {
  if (blockIdx.x + 1 < gridDim.x) t.out[place()] = t.in[place()];
}

__global__ void misaligned_vector(Tensors t) {
  t.out[place()] = t.in[place()];
  using Four = Vector<float, 4>;
  const int begin = static_cast<int>(threadIdx.x) + 4;
  const Four loaded = *reinterpret_cast<const Four*>(t.in + begin);  // misaligned_vector
  t.out[place()] = loaded.element[0];
}

__global__ void uninitialised_shared(Tensors t) {
  __shared__ float shared[kThreads];
  if (threadIdx.x > 0) shared[threadIdx.x] = t.in[place()];
  __syncthreads();
  t.out[place()] = shared[kThreads - 1 - threadIdx.x];  // uninitialised_shared
}

__global__ void uninitialised_scratch(Tensors t) {
  t.out[place()] = t.scratch[place()];  // uninitialised_scratch
}

__global__ void write_to_an_input(Tensors t) {
  t.out[place()] = t.in[place()];
  const_cast<float*>(t.in)[place()] = 0.0f;  // write_to_an_input
}

__global__ void early_exit_before_a_barrier(Tensors t) {
  t.out[place()] = t.in[place()];
  if (threadIdx.x == 63) return;
  __syncthreads();  // early_exit_before_a_barrier
}

__global__ void early_exit_before_a_shuffle(Tensors t) {
  t.out[place()] = t.in[place()];
  if (threadIdx.x == 5) return;
  t.out[place()] = __shfl_xor_sync(kFullMask, 1.0f, 1);  // early_exit_before_a_shuffle
}

__global__ void divergent_shuffle(Tensors t) {
  t.out[place()] = t.in[place()];
  if (threadIdx.x % 2 == 0) {
    t.out[place()] = __shfl_xor_sync(kFullMask, 1.0f, 1);  // divergent_shuffle
  } else {
    t.out[place()] = __shfl_xor_sync(kFullMask, 1.0f, 1);
  }
}

__global__ void divergent_barrier(Tensors t) {
  t.out[place()] = t.in[place()];
  if (threadIdx.x < 32) {
    __syncthreads();  // divergent_barrier
  } else {
    __syncthreads();
  }
}

__global__ void deadlock(Tensors t) {
  t.out[place()] = t.in[place()];
  if (threadIdx.x == 0) {
    __syncthreads();
  } else {
    __syncwarp();  // deadlock
  }
}

__global__ void lane_outside_its_mask(Tensors t) {
  t.out[place()] = __shfl_xor_sync(0x0000ffffu, t.in[place()], 1);  // lane_outside_its_mask
}

__global__ void shuffle_from_outside_the_mask(Tensors t) {
  t.out[place()] = t.in[place()];
  if (threadIdx.x < 16) t.out[place()] = __shfl_xor_sync(0x0000ffffu, 1.0f, 16);  // shuffle_from_outside_the_mask
}

__global__ void too_many_threads(Tensors t) { t.out[place()] = t.in[place()]; }

// A causal row of 128 with the query's own key left out: no finding of the checker, but a result that is wrong.
__global__ void wrong_mask(Tensors t) {
  const int row = static_cast<int>(blockIdx.x * 2 + threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  t.out[row * 32 + lane] = lane < row ? t.in[row * 32 + lane] : 0.0f;
}

template <auto kernel>
void run(const Tensors& tensors, unsigned threads = kThreads, size_t shared_bytes = 0) {
  launch<kernel>({kBlocks, threads, nullptr, shared_bytes}, tensors);
}

struct Bug {
  std::string_view name;
  void (*run)(const Tensors&);
};

#define BUG(kernel) {#kernel, [](const Tensors& t) { run<kernel>(t); }}
constexpr Bug kBugs[] = {
    BUG(no_bug),
    BUG(missing_barrier),
    BUG(missing_barrier_before_reuse),
    BUG(missing_warp_barrier),
    BUG(race_between_blocks),
    BUG(off_by_one),
    BUG(off_by_one_below),
    {"shared_memory_too_small", [](const Tensors& t) { run<shared_memory_too_small>(t, kThreads, kThreads * 2); }},
    {"too_much_shared_memory", [](const Tensors& t) { run<too_much_shared_memory>(t, kThreads, 50'000); }},
    BUG(unwritten_row),
    BUG(misaligned_vector),
    BUG(uninitialised_shared),
    BUG(uninitialised_scratch),
    BUG(write_to_an_input),
    BUG(early_exit_before_a_barrier),
    BUG(early_exit_before_a_shuffle),
    BUG(divergent_shuffle),
    BUG(divergent_barrier),
    BUG(deadlock),
    BUG(lane_outside_its_mask),
    BUG(shuffle_from_outside_the_mask),
    {"too_many_threads", [](const Tensors& t) { run<too_many_threads>(t, 2048); }},
    BUG(wrong_mask),
};

}  // namespace

// The finding, or "" if there was none, in `finding`.
extern "C" __attribute__((visibility("default"))) void run_planted_bug(const char* name, float* in, float* out,
                                                                       float* scratch, char* finding, size_t size) {
  namespace checker = emulator::checker;
  std::string text = "there is no such bug";
  for (const Bug& bug : kBugs) {
    if (bug.name != name) continue;
    text.clear();
    checker::open();
    checker::announce("in", in, kElements * sizeof(float), checker::Use::kInput);
    checker::announce("out", out, kElements * sizeof(float), checker::Use::kOutput);
    checker::announce("scratch", scratch, kElements * sizeof(float), checker::Use::kScratch);
    try {
      bug.run({in, out, scratch});
      checker::close();
    } catch (const std::exception& error) {
      text = error.what();
    }
  }
  std::strncpy(finding, text.c_str(), size - 1);
}

}  // namespace megatronish
