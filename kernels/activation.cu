// What does a feature become? GELU, exact and by tanh, and SwiGLU, each of x + bias, forward and backward.
//
// A block has a tile: the columns of a warp's vectors, and 64 rows, which its warps take in turn. So a thread keeps its
// columns and what belongs to them: the bias, and its gradient. That is summed in two stages, without atomics, always
// in the same order: the rows of a tile in registers and shared memory, then the tiles (columns.h). The backward
// computes all of it again from x. Arithmetic is fp32.
#include "activation.h"

#include <cmath>

#include "columns.h"
#include "platform.h"
#include "rows.h"

namespace megatronish {
namespace {

constexpr int kWarps = 8;  // of a block
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kRowsOfWarp = 8;
constexpr int kRows = kWarps * kRowsOfWarp;  // of a tile
constexpr int kTogether = 4;                 // vectors on their way to a thread

constexpr float kLog2E = static_cast<float>(M_LOG2E);  // exp(x) = exp2(kLog2E * x)

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + exp2f(-kLog2E * x)); }

// y = forward(x); x becomes the gradient, of which `grad` is that of y.

struct Gelu {
  static constexpr int kInputs = 1;

  static __device__ __forceinline__ float forward(const float (&x)[1]) { return x[0] * cumulative(x[0]); }

  static __device__ __forceinline__ void backward(float (&x)[1], float grad) {
    constexpr float kDensityAtZero = static_cast<float>(0.5 * M_2_SQRTPI * M_SQRT1_2);
    const float density = kDensityAtZero * exp2f(-0.5f * kLog2E * x[0] * x[0]);
    x[0] = grad * (cumulative(x[0]) + x[0] * density);
  }

  // Of the normal distribution.
  static __device__ __forceinline__ float cumulative(float x) {
    return 0.5f + 0.5f * erff(x * static_cast<float>(M_SQRT1_2));
  }
};

// 0.5 * (1 + tanh(z / 2)) = sigmoid(z).
struct TanhGelu {
  static constexpr int kInputs = 1;
  static constexpr float kSlope = static_cast<float>(M_2_SQRTPI * M_SQRT2);  // of z at 0
  static constexpr float kCubic = 0.044715f;

  static __device__ __forceinline__ float forward(const float (&x)[1]) {
    return x[0] * sigmoid(kSlope * x[0] * (1.0f + kCubic * x[0] * x[0]));
  }

  static __device__ __forceinline__ void backward(float (&x)[1], float grad) {
    const float square = x[0] * x[0];
    const float y = sigmoid(kSlope * x[0] * (1.0f + kCubic * square));
    const float slope = y * (1.0f - y);  // reaches 0 long before `square` overflows
    const float inner = kSlope * (1.0f + 3.0f * kCubic * square);
    x[0] = grad * (slope == 0.0f ? y : y + x[0] * slope * inner);
  }
};

// Gate, then up.
struct Swiglu {
  static constexpr int kInputs = 2;

  static __device__ __forceinline__ float forward(const float (&x)[2]) { return x[0] * sigmoid(x[0]) * x[1]; }

  static __device__ __forceinline__ void backward(float (&x)[2], float grad) {
    const float gate = x[0], up = x[1], y = sigmoid(gate);
    x[0] = grad * (up * (y * (1.0f + gate * (1.0f - y))));
    x[1] = grad * (gate * y);
  }
};

// Where a thread is: its vector of kColumns columns, and the first of the rows that its warp takes.
template <int kColumns>
struct Tile {
  static constexpr int kWide = kWarpSize * kColumns;

  int first_column, lane, warp;
  int64_t number;  // of the tile, among those of the same columns

  __device__ __forceinline__ explicit Tile(int columns)
      : lane(static_cast<int>(threadIdx.x) % kWarpSize), warp(static_cast<int>(threadIdx.x) / kWarpSize) {
    const unsigned across = divide_up(columns, kWide);
    first_column = static_cast<int>(blockIdx.x % across) * kWide;
    number = blockIdx.x / across;
  }

  __device__ __forceinline__ int column() const { return first_column + lane * kColumns; }
  __device__ __forceinline__ int64_t row(int i) const { return number * kRows + i * kWarps + warp; }
};

// A thread's columns of one row, for all inputs of a function.
template <typename T, int kColumns, int kInputs>
struct Piece {
  Vector<T, kColumns> part[kInputs];

  __device__ __forceinline__ void load(const T* x, int64_t row, int columns, int column) {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      part[k] = *reinterpret_cast<const Vector<T, kColumns>*>(x + (row * kInputs + k) * columns + column);
    }
  }

  __device__ __forceinline__ void store(T* x, int64_t row, int columns, int column) const {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      T* at = x + (row * kInputs + k) * columns + column;
      if constexpr (kColumns == kWidth<T>) {
        store_at_once(at, part[k]);
      } else {
        *reinterpret_cast<Vector<T, kColumns>*>(at) = part[k];
      }
    }
  }

  // What the function is given at column i: x + bias.
  __device__ __forceinline__ void add(float (&values)[kInputs], const Piece& bias, bool has_bias, int i) const {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      values[k] = static_cast<float>(part[k].element[i]);
      if (has_bias) values[k] += static_cast<float>(bias.part[k].element[i]);
    }
  }
};

template <typename T>
struct Forward {
  const T *x, *bias;
  T* y;
  Features shape;
};

// Beyond the last row a thread computes the last row again, and throws it away.
template <typename Function, typename T, int kColumns>
__global__ void __launch_bounds__(kThreads) forward(const Forward<T> p) {
  constexpr int kInputs = Function::kInputs, kAtOnce = kTogether / kInputs;
  using Inputs = Piece<T, kColumns, kInputs>;
  const Tile<kColumns> tile(p.shape.columns);
  const int column = tile.column();
  if (column >= p.shape.columns) return;
  const bool has_bias = p.bias != nullptr;
  Inputs bias;
  bias.load(has_bias ? p.bias : p.x, 0, p.shape.columns, column);
#pragma unroll 1
  for (int i = 0; i < kRowsOfWarp && tile.row(i) < p.shape.rows; i += kAtOnce) {
    Inputs x[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int64_t row = tile.row(i + j);
      x[j].load(p.x, row < p.shape.rows ? row : p.shape.rows - 1, p.shape.columns, column);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      Piece<T, kColumns, 1> y;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float values[kInputs];
        x[j].add(values, bias, has_bias, c);
        y.part[0].element[c] = static_cast<T>(Function::forward(values));
      }
      const int64_t row = tile.row(i + j);
      if (row < p.shape.rows) y.store(p.y, row, p.shape.columns, column);
    }
  }
}

// Registers must suffice for 512 threads of a multiprocessor. Without a number the compiler for SM 100 counts on 1024, and
// spills.
template <typename Function, typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, 512 / kThreads) backward(const ActivationBackward<T> p) {
  constexpr int kInputs = Function::kInputs, kAtOnce = kTogether / (kInputs + 1);
  using Inputs = Piece<T, kColumns, kInputs>;
  const Tile<kColumns> tile(p.shape.columns);
  const int column = tile.column();
  const bool has_bias = p.bias != nullptr;
  float sum[kInputs][kColumns] = {};
  if (column < p.shape.columns) {
    Inputs bias;
    bias.load(has_bias ? p.bias : p.x, 0, p.shape.columns, column);
#pragma unroll 1
    for (int i = 0; i < kRowsOfWarp && tile.row(i) < p.shape.rows; i += kAtOnce) {
      Inputs x[kAtOnce];
      Piece<T, kColumns, 1> grad[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int64_t row = tile.row(i + j), existing = row < p.shape.rows ? row : p.shape.rows - 1;
        x[j].load(p.x, existing, p.shape.columns, column);
        grad[j].load(p.grad, existing, p.shape.columns, column);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int64_t row = tile.row(i + j);
        if (row >= p.shape.rows) break;
        Inputs grad_x;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          float values[kInputs];
          x[j].add(values, bias, has_bias, c);
          Function::backward(values, static_cast<float>(grad[j].part[0].element[c]));
#pragma unroll
          for (int k = 0; k < kInputs; ++k) {
            grad_x.part[k].element[c] = static_cast<T>(values[k]);
            sum[k][c] += values[k];
          }
        }
        grad_x.store(p.grad_x, row, p.shape.columns, column);
      }
    }
  }
  if (!has_bias) return;
  // Column c of a lane lies at c * kStride + lane: 32 lanes that store one c, and 32 threads that read neighbouring
  // columns, each meet all 32 banks of shared memory.
  constexpr int kWide = Tile<kColumns>::kWide, kStride = kWarpSize + (kColumns > 1 ? kWarpSize / kColumns : 0);
  __shared__ float of_warp[kWarps][kInputs][kColumns * kStride];
#pragma unroll
  for (int k = 0; k < kInputs; ++k) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) of_warp[tile.warp][k][c * kStride + tile.lane] = sum[k][c];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kInputs * kWide; i += kThreads) {
    const int input = i / kWide, inside = i % kWide, at = tile.first_column + inside;
    if (at >= p.shape.columns) continue;
    const int place = inside % kColumns * kStride + inside / kColumns;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += of_warp[warp][input][place];
    p.partial[(tile.number * kInputs + input) * p.shape.columns + at] = total;
  }
}

Launch over(int64_t blocks, Stream stream) {
  if (blocks > INT32_MAX) throw std::runtime_error("an activation of " + std::to_string(blocks) + " tiles");
  return {static_cast<unsigned>(blocks), kThreads, stream};
}

template <int kColumns>
int64_t tiles_of(const Features& shape) {
  return activation_parts(shape.rows) * divide_up(shape.columns, Tile<kColumns>::kWide);
}

// Whether all rows of all inputs begin at a multiple of 16 bytes. If not, a thread has one column.
template <typename T, typename... Tensors>
bool aligned(const Features& shape, Tensors... tensors) {
  return shape.columns % kWidth<T> == 0 && ((reinterpret_cast<uintptr_t>(tensors) % kVectorBytes == 0) && ...);
}

template <typename Function, typename T>
void launch_forward(const Forward<T>& p, Stream stream) {
  if (aligned<T>(p.shape, p.x, p.bias, p.y)) {
    launch<forward<Function, T, kWidth<T>>>(over(tiles_of<kWidth<T>>(p.shape), stream), p);
  } else {
    launch<forward<Function, T, 1>>(over(tiles_of<1>(p.shape), stream), p);
  }
}

template <typename Function, typename T>
void launch_backward(const ActivationBackward<T>& p, Stream stream) {
  if (aligned<T>(p.shape, p.grad, p.x, p.bias, p.grad_x)) {
    launch<backward<Function, T, kWidth<T>>>(over(tiles_of<kWidth<T>>(p.shape), stream), p);
  } else {
    launch<backward<Function, T, 1>>(over(tiles_of<1>(p.shape), stream), p);
  }
}

}  // namespace

int64_t activation_parts(int64_t rows) { return divide_up(rows, static_cast<int64_t>(kRows)); }

template <typename T>
void activation_forward(Activation activation, const T* x, const T* bias, T* y, const Features& shape, Stream stream) {
  if (shape.rows == 0 || shape.columns == 0) return;
  const Forward<T> p{x, bias, y, shape};
  switch (activation) {
    case Activation::kGelu: return launch_forward<Gelu>(p, stream);
    case Activation::kTanhGelu: return launch_forward<TanhGelu>(p, stream);
    case Activation::kSwiglu: return launch_forward<Swiglu>(p, stream);
  }
}

template <typename T>
void activation_backward(Activation activation, const ActivationBackward<T>& p, Stream stream) {
  if (p.shape.columns == 0) return;
  if (p.shape.rows > 0) {
    switch (activation) {
      case Activation::kGelu: launch_backward<Gelu>(p, stream); break;
      case Activation::kTanhGelu: launch_backward<TanhGelu>(p, stream); break;
      case Activation::kSwiglu: launch_backward<Swiglu>(p, stream); break;
    }
  }
  if (p.bias == nullptr) return;
  const int size = inputs_of(activation) * p.shape.columns;
  launch_sum_parts<T>({p.partial, activation_parts(p.shape.rows), size, 1, {p.grad_bias, false}, {}}, stream);
}

#define INSTANTIATE(T)                                                                             \
  template void activation_forward<T>(Activation, const T*, const T*, T*, const Features&, Stream); \
  template void activation_backward<T>(Activation, const ActivationBackward<T>&, Stream);
INSTANTIATE(float)
INSTANTIATE(Half)
INSTANTIATE(BFloat16)

}  // namespace megatronish
