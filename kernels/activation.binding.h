// How do tensors become arguments of the activation family? Included by bindings.cpp alone.
#pragma once

#include <tuple>
#include <vector>

#include "activation.h"
#include "operator.h"

namespace megatronish {

// Of the output, by the input.
inline Features features_of(Activation activation, const Tensor& x, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(x.dim() >= 1, "x must be [..., features]");
  const int64_t size = x.size(x.dim() - 1), columns = size / inputs_of(activation);
  STD_TORCH_CHECK(size <= INT32_MAX, "an activation of more than 2^31 - 1 features");
  STD_TORCH_CHECK(size == columns * inputs_of(activation), "SwiGLU takes an even number of features");
  if (bias.has_value()) {
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == size && bias->scalar_type() == x.scalar_type(),
                    "bias must be [features], like x");
  }
  return {size == 0 ? 0 : x.numel() / size, static_cast<int>(columns)};
}

inline std::optional<Tensor> contiguous_if_any(const std::optional<Tensor>& x) {
  return x.has_value() ? std::optional(torch::stable::contiguous(*x)) : std::nullopt;
}

inline Tensor activated(Activation activation, const Tensor& given, const std::optional<Tensor>& given_bias) {
  const Features shape = features_of(activation, given, given_bias);
  const Tensor x = torch::stable::contiguous(given);
  const std::optional<Tensor> bias = contiguous_if_any(given_bias);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = shape.columns;
  const Tensor y = torch::stable::new_empty(x, sizes);
  Call call(x);
  for_type(x, [&](auto zero) {
    using T = decltype(zero);
    activation_forward<T>(activation, call.input<T>("x", x), bias ? call.input<T>("bias", *bias) : nullptr,
                          call.output<T>("y", y), shape, call.stream());
  });
  return y;
}

// Without a bias its gradient has no element.
inline std::tuple<Tensor, Tensor> deactivated(Activation activation, const Tensor& given_grad, const Tensor& given,
                                              const std::optional<Tensor>& given_bias) {
  const Features shape = features_of(activation, given, given_bias);
  bool fits = given_grad.scalar_type() == given.scalar_type() && given_grad.dim() == given.dim() &&
              given_grad.size(given.dim() - 1) == shape.columns;
  for (int64_t dim = 0; fits && dim + 1 < given.dim(); ++dim) fits = given_grad.size(dim) == given.size(dim);
  STD_TORCH_CHECK(fits, "grad must be like the output");
  const Tensor grad = torch::stable::contiguous(given_grad), x = torch::stable::contiguous(given);
  const std::optional<Tensor> bias = contiguous_if_any(given_bias);
  const int64_t size = bias ? x.size(x.dim() - 1) : 0, parts = bias ? activation_parts(shape.rows) : 0;
  const Tensor grad_x = torch::stable::empty_like(x), grad_bias = torch::stable::new_empty(x, {size});
  const Tensor partial = torch::stable::new_empty(x, {parts, size}, torch::headeronly::ScalarType::Float);
  Call call(x);
  for_type(x, [&](auto zero) {
    using T = decltype(zero);
    const ActivationBackward<T> p{call.input<T>("grad", grad),
                                  call.input<T>("x", x),
                                  bias ? call.input<T>("bias", *bias) : nullptr,
                                  call.output<T>("grad_x", grad_x),
                                  call.output<T>("grad_bias", grad_bias),
                                  call.scratch<float>("partial", partial),
                                  shape};
    activation_backward<T>(activation, p, call.stream());
  });
  return {grad_x, grad_bias};
}

inline Activation gelu_of(bool tanh) { return tanh ? Activation::kTanhGelu : Activation::kGelu; }

inline Tensor bias_gelu(Tensor x, std::optional<Tensor> bias, bool tanh) { return activated(gelu_of(tanh), x, bias); }

inline std::tuple<Tensor, Tensor> bias_gelu_backward(Tensor grad, Tensor x, std::optional<Tensor> bias, bool tanh) {
  return deactivated(gelu_of(tanh), grad, x, bias);
}

inline Tensor bias_swiglu(Tensor x, std::optional<Tensor> bias) { return activated(Activation::kSwiglu, x, bias); }

inline std::tuple<Tensor, Tensor> bias_swiglu_backward(Tensor grad, Tensor x, std::optional<Tensor> bias) {
  return deactivated(Activation::kSwiglu, grad, x, bias);
}

inline void bind_activation(torch::stable::detail::StableLibrary& library) {
  library.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  library.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
  library.impl("bias_swiglu", TORCH_BOX(&bias_swiglu));
  library.impl("bias_swiglu_backward", TORCH_BOX(&bias_swiglu_backward));
}

}  // namespace megatronish
