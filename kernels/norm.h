// What does the norm family offer to its binding? T is float, Half or BFloat16.
#pragma once

#include <cstdint>

namespace megatronish {

// A weight or a bias [size]: of T, or of float.
struct Parameter {
  const void* values = nullptr;
  bool is_float = false;
};

// normalised = (x - mean) * rstd * (weight + offset) + bias of every row, with rstd = 1 / sqrt(variance + epsilon). An
// RMS norm has no mean and no bias; its rstd is 1 / sqrt(mean square + epsilon). With a residual, `x + residual` is
// rounded to T, written to `sum` and normalised. What there is none of is null (so may be what has no rows).
template <typename T>
struct NormForward {
  bool has_mean;
  int64_t rows;
  int size;
  const T *x, *residual;
  Parameter weight, bias;
  float offset, epsilon;
  T *normalised, *sum;
  float *mean, *rstd;
};

// grad_x is that of the normalised, through the norm, plus `grad_sum` if there is one. The gradients of weight and bias
// have the weight's type. x is what has been normalised: with a residual, the sum.
template <typename T>
struct NormBackward {
  bool has_mean;
  int64_t rows;
  int size;
  const T *grad, *grad_sum, *x;
  Parameter weight;
  float offset;
  const float *mean, *rstd;
  T* grad_x;
  void *grad_weight, *grad_bias;
  float* scratch;  // of norm_scratch
};

template <typename T>
void norm_forward(const NormForward<T>& p, void* stream);

template <typename T>
void norm_backward(const NormBackward<T>& p, void* stream);

// How many floats a backward puts down between its kernels.
template <typename T>
int64_t norm_scratch(int64_t rows, int size, bool has_mean);

}  // namespace megatronish
