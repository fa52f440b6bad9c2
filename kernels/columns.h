// How are the columns of many rows summed in fp32, without atomics and with the same bits every time?
//
// A thread keeps its columns for all rows that its team goes through, and sums them up in registers (ColumnSums). Each
// team, or the warp of several, leaves a part [kinds, size]; sum_parts then adds the parts, in an order that nothing
// but their number decides. Kinds are what is summed: the gradients of a weight and of a bias, say.
#pragma once

#include <algorithm>

#include "platform.h"
#include "rows.h"
#include "teams.h"

namespace megatronish {
namespace {

// kVectors of a row of T.
template <typename T, int kKinds, int kVectors>
struct ColumnSums {
  float sums[kKinds][kVectors][kWidth<T>] = {};

  // Adds up what teams of kLanes have within a warp: all its lanes must take part, the first kLanes store.
  template <int kLanes>
  __device__ __forceinline__ void join_teams() {
#pragma unroll
    for (int distance = kLanes; distance < kWarpSize; distance *= 2) {
#pragma unroll
      for (auto& kind : sums) {
#pragma unroll
        for (auto& vector : kind) {
#pragma unroll
          for (float& sum : vector) sum += __shfl_xor_sync(kFullMask, sum, distance);
        }
      }
    }
  }

  // To a part, by the team's first row or its only one.
  template <typename Team>
  __device__ __forceinline__ void store(float* part, int size) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) store_vector(part, v, Team::rank() + v * Team::size(), size);
  }

  // Vector number v of the thread, which is number `vector` of the row.
  __device__ __forceinline__ void store_vector(float* part, int v, int vector, int size) const {
    constexpr int kPieces = kWidth<T> / kWidth<float>;
#pragma unroll
    for (int kind = 0; kind < kKinds; ++kind) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        float values[kWidth<float>];
#pragma unroll
        for (int i = 0; i < kWidth<float>; ++i) values[i] = sums[kind][v][piece * kWidth<float> + i];
        float* row = part + static_cast<int64_t>(kind) * size;
        megatronish::store_vector(values, row, vector * kPieces + piece, size, size % kWidth<float> == 0);
      }
    }
  }
};

// [size], of T or of float.
struct ColumnGradient {
  void* values;
  bool is_float;
};

struct Parts {
  const float* values;  // [number, kinds, size]
  int64_t number;
  int size, kinds;
  ColumnGradient first, second;  // as many as there are kinds
};

constexpr int kColumnsAtOnce = 8;  // 32 bytes: what memory moves at least
constexpr int kSumThreads = 1024;  // at most

template <typename T>
__global__ void __launch_bounds__(kSumThreads) sum_parts(const Parts p) {
  __shared__ float of_warp[kSumThreads / kWarpSize][kColumnsAtOnce];
  const int thread = static_cast<int>(threadIdx.x), num_threads = static_cast<int>(blockDim.x);
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumnsAtOnce + thread % kColumnsAtOnce;
  const int64_t num_columns = static_cast<int64_t>(p.size) * p.kinds;
  float sum = 0.0f;
  if (column < num_columns) {
    for (int64_t part = thread / kColumnsAtOnce; part < p.number; part += num_threads / kColumnsAtOnce) {
      sum += p.values[part * num_columns + column];
    }
  }
#pragma unroll
  for (int distance = kColumnsAtOnce; distance < kWarpSize; distance *= 2) {
    sum += __shfl_xor_sync(kFullMask, sum, distance);
  }
  if (thread % kWarpSize < kColumnsAtOnce) of_warp[thread / kWarpSize][thread % kColumnsAtOnce] = sum;
  __syncthreads();
  if (thread >= kColumnsAtOnce || column >= num_columns) return;
  sum = 0.0f;
  for (int warp = 0; warp < num_threads / kWarpSize; ++warp) sum += of_warp[warp][thread];
  const bool is_first = column < p.size;
  const ColumnGradient gradient = is_first ? p.first : p.second;
  const int64_t at = is_first ? column : column - p.size;
  if (gradient.is_float) {
    static_cast<float*>(gradient.values)[at] = sum;
  } else {
    static_cast<T*>(gradient.values)[at] = static_cast<T>(sum);
  }
}

// Also of no parts: the gradients are zeros then.
template <typename T>
void launch_sum_parts(const Parts& p, Stream stream) {
  const int64_t columns = static_cast<int64_t>(p.size) * p.kinds;
  const int64_t warps = std::max<int64_t>(divide_up<int64_t>(p.number * kColumnsAtOnce, kWarpSize), 1);
  const auto threads = static_cast<unsigned>(std::min<int64_t>(warps * kWarpSize, kSumThreads));
  const auto blocks = static_cast<unsigned>(divide_up<int64_t>(columns, kColumnsAtOnce));
  launch<sum_parts<T>>({blocks, threads, stream}, p);
}

}  // namespace
}  // namespace megatronish
