// What does a thread do with its vectors of a row that is normalised, forward and backward? For norm.cu alone.
#pragma once

#include <type_traits>

#include "columns.h"
#include "norm.h"
#include "platform.h"
#include "rows.h"

namespace megatronish {
namespace {

// All that a kernel is told. `aligned` is that of rows.h.
template <typename Arguments>
struct With : Arguments {
  bool aligned;
};

// load(std::bool_constant<kAligned>, v, vector) for the vectors of a thread: one branch for all of them.
template <typename Team, int kVectors, typename Load>
__device__ __forceinline__ void load_all(bool aligned, Load load) {
  if (aligned) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) load(std::true_type(), v, Team::rank() + v * Team::size());
  } else {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) load(std::false_type(), v, Team::rank() + v * Team::size());
  }
}

// A weight or bias at the columns of a vector; 0 beyond the last.
template <typename W, int kColumns>
__device__ __forceinline__ void load_columns(float (&values)[kColumns], const W* parameter, int at, int size) {
  if (at + kColumns <= size && reinterpret_cast<uintptr_t>(parameter) % kVectorBytes == 0) {
#pragma unroll
    for (int begin = 0; begin < kColumns; begin += kWidth<W>) {
      const auto loaded = *reinterpret_cast<const RowVector<W>*>(parameter + at + begin);
#pragma unroll
      for (int i = 0; i < kWidth<W>; ++i) values[begin + i] = static_cast<float>(loaded.element[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) values[i] = at + i < size ? static_cast<float>(parameter[at + i]) : 0.0f;
  }
}

template <typename T>
__device__ __forceinline__ void load_columns(float (&values)[kWidth<T>], const Parameter& parameter, int vector,
                                             int size) {
  if (std::is_same_v<T, float> || parameter.is_float) {
    load_columns(values, static_cast<const float*>(parameter.values), vector * kWidth<T>, size);
  } else {
    load_columns(values, static_cast<const T*>(parameter.values), vector * kWidth<T>, size);
  }
}

// A row on its way forward.
template <typename T, bool kCentred>
struct ForwardRow {
  const With<NormForward<T>>& p;
  int64_t row, offset;
  int length;  // 0 where there is no such row

  __device__ __forceinline__ ForwardRow(const With<NormForward<T>>& p, int64_t row)
      : p(p), row(row), offset(row * p.size), length(row < p.rows ? p.size : 0) {}

  template <bool kAligned>
  __device__ __forceinline__ void load(Words& x, Words& residual, int vector) const {
    x = load_vector<kAligned>(p.x + offset, vector, length);
    residual = load_vector<kAligned>(p.residual + offset, vector, p.residual == nullptr ? 0 : length);
  }

  // x + residual, rounded and put down, if there is a residual.
  __device__ __forceinline__ void add(float (&values)[kWidth<T>], const Words& x, const Words& residual,
                                      int vector) const {
    to_floats<T>(values, x);
    if (p.residual == nullptr) return;
    float others[kWidth<T>];
    to_floats<T>(others, residual);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) values[i] = static_cast<float>(static_cast<T>(values[i] + others[i]));
    store_vector(values, p.sum + offset, vector, length, p.aligned);
  }

  // One vector, of a row that is read several times.
  __device__ __forceinline__ void take(float (&values)[kWidth<T>], int vector) const {
    Words x, residual;
    p.aligned ? load<true>(x, residual, vector) : load<false>(x, residual, vector);
    add(values, x, residual, vector);
  }
  __device__ __forceinline__ void take_again(float (&values)[kWidth<T>], int vector) const {
    const T* from = (p.residual == nullptr ? p.x : p.sum) + offset;  // a thread has written itself what it reads here
    const auto x = p.aligned ? load_vector<true>(from, vector, length) : load_vector<false>(from, vector, length);
    to_floats<T>(values, x);
  }

  __device__ __forceinline__ void subtract(float (&values)[kWidth<T>], float mean, int vector) const {
    if constexpr (kCentred) {
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) values[i] = vector * kWidth<T> + i < length ? values[i] - mean : 0.0f;
    }
  }

  __device__ __forceinline__ float rstd_of(float squares) const { return rsqrtf(squares / p.size + p.epsilon); }

  __device__ __forceinline__ void store_statistics(float mean, float rstd) const {
    if (length == 0) return;
    if (kCentred) p.mean[row] = mean;
    p.rstd[row] = rstd;
  }

  // `values` are without their mean.
  __device__ __forceinline__ void store(float (&values)[kWidth<T>], float rstd, int vector) const {
    float weight[kWidth<T>], bias[kWidth<T>] = {};
    load_columns<T>(weight, p.weight, vector, length);
    if (kCentred) load_columns<T>(bias, p.bias, vector, length);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) values[i] = values[i] * rstd * (weight[i] + p.offset) + bias[i];
    store_vector(values, p.normalised + offset, vector, length, p.aligned);
  }
};

template <int kColumns>
__device__ __forceinline__ float sum_of(const float (&values)[kColumns]) {
  float sum = 0.0f;
#pragma unroll
  for (float value : values) sum += value;
  return sum;
}

template <int kColumns>
__device__ __forceinline__ float squares_of(const float (&values)[kColumns]) {
  float squares = 0.0f;
#pragma unroll
  for (float value : values) squares += value * value;
  return squares;
}

// Backward. With n the normalised x before weight and bias, and h = grad * (weight + offset), over the columns of a row
//   grad_x = rstd * (h - mean(h * n) * n - mean(h)) + grad_sum, where an RMS norm has no mean(h);
// over the rows, grad_weight = sum(grad * n) and grad_bias = sum(grad).
template <bool kCentred>
constexpr int kKinds = kCentred ? 2 : 1;  // of sums: over rows, and over columns

// A row on its way backward.
template <typename T, bool kCentred>
struct BackwardRow {
  const With<NormBackward<T>>& p;
  int64_t offset;
  int length;  // 0 where there is no such row
  float mean, rstd;

  __device__ __forceinline__ BackwardRow(const With<NormBackward<T>>& p, int64_t row)
      : p(p),
        offset(row * p.size),
        length(row < p.rows ? p.size : 0),
        mean(kCentred && length > 0 ? p.mean[row] : 0.0f),
        rstd(length > 0 ? p.rstd[row] : 0.0f) {}

  template <bool kAligned>
  __device__ __forceinline__ void load(Words& grad, Words& x, int vector) const {
    grad = load_vector<kAligned>(p.grad + offset, vector, length);
    x = load_vector<kAligned>(p.x + offset, vector, length);
  }
  template <bool kAligned>
  __device__ __forceinline__ void load(Words& grad_sum, int vector) const {
    grad_sum = load_vector<kAligned>(p.grad_sum + offset, vector, p.grad_sum == nullptr ? 0 : length);
  }
  template <typename... Vectors>
  __device__ __forceinline__ void load_one(int vector, Vectors&... vectors) const {
    p.aligned ? load<true>(vectors..., vector) : load<false>(vectors..., vector);
  }

  __device__ __forceinline__ void take(float (&grad)[kWidth<T>], float (&n)[kWidth<T>], const Words& given,
                                       const Words& x) const {
    to_floats<T>(grad, given);
    to_floats<T>(n, x);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) n[i] = (n[i] - mean) * rstd;
  }

  // grad becomes h: 0 beyond the row, as it is.
  __device__ __forceinline__ void weigh(float (&grad)[kWidth<T>], int vector) const {
    float weight[kWidth<T>];
    load_columns<T>(weight, p.weight, vector, length);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) grad[i] *= weight[i] + p.offset;
  }

  // `means` of h * n, and of h.
  __device__ __forceinline__ void store(float (&h)[kWidth<T>], const float (&n)[kWidth<T>],
                                        const float (&means)[kKinds<kCentred>], const Words& grad_sum,
                                        int vector) const {
    float others[kWidth<T>];
    to_floats<T>(others, grad_sum);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      float through = h[i] - means[0] * n[i];
      if constexpr (kCentred) through -= means[1];
      h[i] = rstd * through + others[i];
    }
    store_vector(h, p.grad_x + offset, vector, length, p.aligned);
  }
};

template <bool kCentred, int kColumns>
__device__ __forceinline__ void add_over_row(float (&sums)[kKinds<kCentred>], const float (&h)[kColumns],
                                             const float (&n)[kColumns]) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    sums[0] += h[i] * n[i];
    if constexpr (kCentred) sums[1] += h[i];
  }
}

// To the gradients of weight and bias.
template <typename T, bool kCentred, int kVectors>
__device__ __forceinline__ void add_over_columns(ColumnSums<T, kKinds<kCentred>, kVectors>& columns, int v,
                                                 const float (&grad)[kWidth<T>], const float (&n)[kWidth<T>]) {
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) {
    columns.sums[0][v][i] += grad[i] * n[i];
    if constexpr (kCentred) columns.sums[1][v][i] += grad[i];
  }
}

}  // namespace
}  // namespace megatronish
