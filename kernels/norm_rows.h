// What does a thread do with its vectors of a row that is normalised, forward and backward? For norm.cu alone.
#pragma once

#include "columns.h"
#include "norm.h"
#include "platform.h"
#include "rows.h"

namespace megatronish {
namespace {

// All that a kernel is told. `aligned`: every vector of every row begins at a multiple of 16 bytes.
template <typename Arguments>
struct With : Arguments {
  bool aligned;
};

// A weight or bias at the columns of a vector; 0 beyond the last.
template <typename W, int kColumns>
__device__ __forceinline__ void load_columns(float (&values)[kColumns], const W* parameter, int at, int size) {
  if (at + kColumns <= size && reinterpret_cast<uintptr_t>(parameter) % kVectorBytes == 0) {
#pragma unroll
    for (int begin = 0; begin < kColumns; begin += kWidth<W>) {
      const auto loaded = *reinterpret_cast<const Vector<W, kWidth<W>>*>(parameter + at + begin);
#pragma unroll
      for (int i = 0; i < kWidth<W>; ++i) values[begin + i] = static_cast<float>(loaded.element[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) values[i] = at + i < size ? static_cast<float>(parameter[at + i]) : 0.0f;
  }
}

template <typename T>
__device__ __forceinline__ void load_columns(float (&values)[kWidth<T>], const Parameter& parameter, int at, int size) {
  if (parameter.is_float) {
    load_columns(values, static_cast<const float*>(parameter.values), at, size);
  } else {
    load_columns(values, static_cast<const T*>(parameter.values), at, size);
  }
}

// A row on its way forward.
template <typename T, bool kCentred>
struct ForwardRow {
  const With<NormForward<T>>& p;
  int64_t row, offset;
  Cut<T> cut;

  __device__ __forceinline__ ForwardRow(const With<NormForward<T>>& p, int64_t row)
      : p(p), row(row), offset(row * p.size), cut(row < p.rows ? p.size : 0, p.aligned) {}

  // What is to be normalised; 0 beyond the row. The residual is added on the way.
  __device__ __forceinline__ void load(float (&values)[kWidth<T>], int vector) const {
    cut.load(values, p.x + offset, vector, 0, cut.length, 0.0f);
    if (p.residual == nullptr) return;
    float residual[kWidth<T>];
    cut.load(residual, p.residual + offset, vector, 0, cut.length, 0.0f);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) values[i] = static_cast<float>(static_cast<T>(values[i] + residual[i]));
    cut.store(values, p.sum + offset, vector);
  }

  __device__ __forceinline__ void load_again(float (&values)[kWidth<T>], int vector) const {
    const T* from = p.residual == nullptr ? p.x : p.sum;  // each thread has written what it reads here
    cut.load(values, from + offset, vector, 0, cut.length, 0.0f);
  }

  __device__ __forceinline__ void subtract(float (&values)[kWidth<T>], float mean, int vector) const {
    if constexpr (kCentred) {
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) values[i] = cut.begin(vector) + i < cut.length ? values[i] - mean : 0.0f;
    }
  }

  __device__ __forceinline__ float rstd_of(float squares) const { return rsqrtf(squares / p.size + p.epsilon); }

  __device__ __forceinline__ void store_statistics(float mean, float rstd) const {
    if (row >= p.rows) return;
    if (kCentred) p.mean[row] = mean;
    p.rstd[row] = rstd;
  }

  // `values` without their mean.
  __device__ __forceinline__ void store(float (&values)[kWidth<T>], float rstd, int vector) const {
    float weight[kWidth<T>], bias[kWidth<T>] = {};
    load_columns<T>(weight, p.weight, cut.begin(vector), cut.length);
    if (kCentred) load_columns<T>(bias, p.bias, cut.begin(vector), cut.length);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) values[i] = values[i] * rstd * (weight[i] + p.offset) + bias[i];
    cut.store(values, p.normalised + offset, vector);
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
  Cut<T> cut;
  float mean, rstd;

  __device__ __forceinline__ BackwardRow(const With<NormBackward<T>>& p, int64_t row)
      : p(p),
        offset(row * p.size),
        cut(row < p.rows ? p.size : 0, p.aligned),
        mean(kCentred && row < p.rows ? p.mean[row] : 0.0f),
        rstd(row < p.rows ? p.rstd[row] : 0.0f) {}

  // Beyond the row grad is 0, and so is all that it multiplies.
  __device__ __forceinline__ void load(float (&grad)[kWidth<T>], float (&x)[kWidth<T>], int vector) const {
    cut.load(grad, p.grad + offset, vector, 0, cut.length, 0.0f);
    cut.load(x, p.x + offset, vector, 0, cut.length, 0.0f);
  }

  __device__ __forceinline__ void normalise(float (&x)[kWidth<T>]) const {
#pragma unroll
    for (float& value : x) value = (value - mean) * rstd;
  }

  // grad becomes h.
  __device__ __forceinline__ void weigh(float (&grad)[kWidth<T>], int vector) const {
    float weight[kWidth<T>];
    load_columns<T>(weight, p.weight, cut.begin(vector), cut.length);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) grad[i] *= weight[i] + p.offset;
  }

  // `means` of h * n, and of h.
  __device__ __forceinline__ void store(float (&h)[kWidth<T>], const float (&n)[kWidth<T>],
                                        const float (&means)[kKinds<kCentred>], int vector) const {
    float grad_sum[kWidth<T>] = {};
    if (p.grad_sum != nullptr) cut.load(grad_sum, p.grad_sum + offset, vector, 0, cut.length, 0.0f);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      float through = h[i] - means[0] * n[i];
      if constexpr (kCentred) through -= means[1];
      h[i] = rstd * through + grad_sum[i];
    }
    cut.store(h, p.grad_x + offset, vector);
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
