// What does a kernel stand on? CUDA's runtime, or the emulator that runs the same sources on the CPU (emulator/).
//
// Kernels are plain CUDA, with two exceptions that both sides need: a kernel is launched by launch<kernel>(how, ...)
// instead of kernel<<<...>>>(...), and dynamic shared memory comes from MEGATRONISH_DYNAMIC_SHARED(type, name).
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#ifdef __CUDACC__
#include <cuda_runtime.h>

#define MEGATRONISH_DYNAMIC_SHARED(type, name)                      \
  extern __shared__ __align__(16) unsigned char megatronish_shared[]; \
  type* name = reinterpret_cast<type*>(megatronish_shared)
#else
#include "emulator/cuda.h"
#endif

namespace megatronish {

using Half = c10::Half;
using BFloat16 = c10::BFloat16;
using Stream = void*;  // a cudaStream_t, for those who must not include CUDA's headers

struct Launch {
  dim3 grid, block;
  Stream stream;
  size_t shared_bytes;
#ifdef __CUDACC__
  Launch(dim3 grid, dim3 block, Stream stream, size_t shared_bytes = 0)
      : grid(grid), block(block), stream(stream), shared_bytes(shared_bytes) {}
#else
  emulator::Place place;
  Launch(dim3 grid, dim3 block, Stream stream, size_t shared_bytes = 0, EMULATOR_CALLER)
      : grid(grid), block(block), stream(stream), shared_bytes(shared_bytes), place{file, line} {}
#endif
};

// launch<softmax_forward<float>>({grid, block, stream}, arguments...)
template <auto kernel, typename... Arguments>
void launch(const Launch& how, Arguments... arguments) {
#ifdef __CUDACC__
  kernel<<<how.grid, how.block, how.shared_bytes, static_cast<cudaStream_t>(how.stream)>>>(arguments...);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("a kernel could not be launched: ") + cudaGetErrorString(error) +
                             " (MEGATRONISH_KERNELS=0 does without the kernels)");
  }
#else
  const auto body = [=] { kernel(arguments...); };
  constexpr std::string_view here = __PRETTY_FUNCTION__;  // "... [with auto kernel = softmax_forward<float>; ..."
  constexpr size_t begin = here.find("kernel = ") + 9;
  constexpr std::string_view name = here.substr(begin, here.find(';', begin) - begin);
  const auto call = [](const void* parameters) { (*static_cast<const decltype(body)*>(parameters))(); };
  emulator::run({how.grid, how.block, how.shared_bytes, how.place}, name, call, &body, sizeof(body));
#endif
}

// Of the current device: for kernels whose blocks go through many rows. The emulator has as many as it is told.
inline int num_multiprocessors() {
#ifdef __CUDACC__
  int device = 0, number = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&number, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) throw std::runtime_error(std::string("the GPU is not found: ") + cudaGetErrorString(error));
  return number;
#else
  return emulator::num_multiprocessors();
#endif
}

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

template <typename Integer>
constexpr __host__ __device__ Integer divide_up(Integer a, Integer b) {
  return (a + b - 1) / b;
}

}  // namespace megatronish
