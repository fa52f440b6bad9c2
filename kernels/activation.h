// What does the activation family offer to its binding? T is float, Half or BFloat16.
#pragma once

#include <cstdint>

namespace megatronish {

enum class Activation { kGelu, kTanhGelu, kSwiglu };

// Of the output: [rows, columns]. The input, its gradient and the bias have as many columns for each of the function's
// inputs, one input beside the other: SwiGLU has two.
struct Features {
  int64_t rows;
  int columns;
};

constexpr int inputs_of(Activation activation) { return activation == Activation::kSwiglu ? 2 : 1; }

// y = activation(x + bias); without a bias that is null.
template <typename T>
void activation_forward(Activation activation, const T* x, const T* bias, T* y, const Features& shape, void* stream);

// grad_x, and where there is a bias grad_bias, its sum over rows.
template <typename T>
struct ActivationBackward {
  const T *grad, *x, *bias;
  T *grad_x, *grad_bias;
  float* partial;  // scratch: [activation_parts(rows), inputs * columns]
  Features shape;
};

template <typename T>
void activation_backward(Activation activation, const ActivationBackward<T>& p, void* stream);

// How many partial sums a gradient of the bias is made of. It is a matter of the shape alone, so that its bits are too.
int64_t activation_parts(int64_t rows);

}  // namespace megatronish
