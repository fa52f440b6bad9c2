// How do the threads that share a row put their numbers together?
//
// A team is some lanes of a warp, for short rows, or a whole block, for long ones. Kernels are written for either. All
// threads of a warp (of a block) must take part in every reduction, those without a row too.
#pragma once

#include "platform.h"

namespace megatronish {

struct Sum {
  static constexpr float kNeutral = 0.0f;
  static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};

struct Maximum {
  static constexpr float kNeutral = -INFINITY;
  static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

// Over groups of kLanes neighbours; all lanes of a group get the result.
template <typename Operation, int kLanes = kWarpSize>
__device__ __forceinline__ float warp_reduce(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x = Operation::of(x, __shfl_xor_sync(kFullMask, x, distance));
  }
  return x;
}

// kLanes neighbours of a warp have a row.
template <int kLanes>
struct WarpTeam {
  static constexpr int kThreads = 128;  // of a block
  static constexpr int kRows = kThreads / kLanes;

  static __device__ __forceinline__ int rank() { return threadIdx.x % kLanes; }
  static __device__ __forceinline__ int size() { return kLanes; }
  static __device__ __forceinline__ int64_t row() {
    return static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kLanes;
  }

  // `kSlot` means something to blocks alone.
  template <typename Operation, int kSlot>
  static __device__ __forceinline__ float reduce(float x) {
    return warp_reduce<Operation, kLanes>(x);
  }

  template <typename Operation, int kNumbers>
  static __device__ __forceinline__ void reduce_by_turns(float (&x)[kNumbers], int) {
#pragma unroll
    for (float& number : x) number = warp_reduce<Operation, kLanes>(number);
  }
};

// A block, of full warps, has a row.
struct BlockTeam {
  static constexpr int kThreads = 1024;  // at most
  static constexpr int kRows = 1;

  static __device__ __forceinline__ int rank() { return threadIdx.x; }
  static __device__ __forceinline__ int size() { return blockDim.x; }
  static __device__ __forceinline__ int64_t row() { return blockIdx.x; }

  // Each reduction of a kernel names a slot of its own, and so none has to wait until the one before it has been read.
  template <typename Operation, int kSlot>
  static __device__ __forceinline__ float reduce(float x) {
    __shared__ float of_warp[kWarpSize];
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    x = warp_reduce<Operation>(x);
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
    return warp_reduce<Operation>(lane < num_warps ? of_warp[lane] : Operation::kNeutral);
  }

  // For loops, several numbers at once: `turn` is 0 and 1 by turns, and so none has to wait here either.
  template <typename Operation, int kNumbers>
  static __device__ __forceinline__ void reduce_by_turns(float (&x)[kNumbers], int turn) {
    __shared__ float of_warp[2][kNumbers][kWarpSize];
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      x[i] = warp_reduce<Operation>(x[i]);
      if (lane == 0) of_warp[turn][i][warp] = x[i];
    }
    __syncthreads();
    const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      x[i] = warp_reduce<Operation>(lane < num_warps ? of_warp[turn][i][lane] : Operation::kNeutral);
    }
  }
};

}  // namespace megatronish
