// How do tensors become arguments of the norm family? Included by bindings.cpp alone.
//
// An RMS norm has no bias and no mean, and only a sum has a residual: what there is none of is an empty optional here,
// and null for the kernels.
#pragma once

#include <tuple>
#include <vector>

#include "norm.h"
#include "operator.h"

namespace megatronish {

using Maybe = std::optional<Tensor>;

constexpr auto kStatistics = torch::headeronly::ScalarType::Float;

inline Maybe contiguous(const Maybe& x) {
  return x.has_value() ? Maybe(torch::stable::contiguous(*x)) : Maybe();
}

inline Parameter parameter(Call& call, const char* name, const Maybe& x) {
  if (!x.has_value()) return {};
  return {call.input<void>(name, *x), x->scalar_type() == torch::headeronly::ScalarType::Float};
}

inline void check_norm(const Tensor& x, const Tensor& weight) {
  const int64_t size = x.dim() > 0 ? x.size(x.dim() - 1) : 0;
  STD_TORCH_CHECK(size >= 1 && size <= INT32_MAX / 2, "a norm is over 1 to 2^30 columns");
  STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == size, "weight must be [size], that of the last dim of x");
  const bool known = weight.scalar_type() == torch::headeronly::ScalarType::Float ||
                     weight.scalar_type() == x.scalar_type();
  STD_TORCH_CHECK(known, "weight must have the dtype of x, or float32");
}

struct Normalised {
  Tensor values;
  Maybe sum, mean;
  Tensor rstd;
};

inline Normalised norm(const Tensor& given, const Maybe& given_residual, const Tensor& given_weight,
                       const Maybe& given_bias, double epsilon, bool one_plus) {
  check_norm(given, given_weight);
  if (given_residual.has_value()) check_like(*given_residual, given, "residual must be like x");
  if (given_bias.has_value()) check_like(*given_bias, given_weight, "bias must be like weight");
  const Tensor x = torch::stable::contiguous(given), weight = torch::stable::contiguous(given_weight);
  const Maybe residual = contiguous(given_residual), bias = contiguous(given_bias);
  std::vector<int64_t> of_rows(x.sizes().begin(), x.sizes().end());
  of_rows.back() = 1;
  const auto make_statistics = [&] { return torch::stable::new_empty(x, of_rows, kStatistics); };
  Normalised made{torch::stable::empty_like(x), {}, {}, make_statistics()};
  if (residual.has_value()) made.sum = torch::stable::empty_like(x);
  if (bias.has_value()) made.mean = make_statistics();
  Call call(x);
  for_type(x, [&](auto zero) {
    using T = decltype(zero);
    NormForward<T> p{};
    p.has_mean = made.mean.has_value();
    p.rows = made.rstd.numel(), p.size = static_cast<int>(weight.numel());
    p.x = call.input<T>("x", x);
    if (residual.has_value()) p.residual = call.input<T>("residual", *residual);
    p.weight = parameter(call, "weight", weight), p.bias = parameter(call, "bias", bias);
    p.offset = one_plus ? 1.0f : 0.0f, p.epsilon = static_cast<float>(epsilon);
    p.normalised = call.output<T>("normalised", made.values);
    if (made.sum.has_value()) p.sum = call.output<T>("sum", *made.sum);
    if (made.mean.has_value()) p.mean = call.output<float>("mean", *made.mean);
    p.rstd = call.output<float>("rstd", made.rstd);
    norm_forward<T>(p, call.stream());
  });
  return made;
}

struct NormGradients {
  Tensor x, weight;
  Maybe bias;
};

inline NormGradients norm_backward(const Tensor& given_grad, const Maybe& given_grad_sum, const Tensor& given_x,
                                   const Tensor& given_weight, const Maybe& given_mean, const Tensor& given_rstd,
                                   bool one_plus) {
  check_norm(given_x, given_weight);
  check_like(given_grad, given_x, "grad must be like x");
  if (given_grad_sum.has_value()) check_like(*given_grad_sum, given_x, "grad_sum must be like x");
  const int64_t size = given_weight.numel(), rows = given_x.numel() / size;
  for (const Maybe& x : {given_mean, Maybe(given_rstd)}) {
    const bool fits = !x.has_value() || (x->scalar_type() == kStatistics && x->numel() == rows);
    STD_TORCH_CHECK(fits, "mean and rstd must be [..., 1], float32");
  }
  const Tensor grad = torch::stable::contiguous(given_grad), x = torch::stable::contiguous(given_x);
  const Tensor weight = torch::stable::contiguous(given_weight), rstd = torch::stable::contiguous(given_rstd);
  const Maybe grad_sum = contiguous(given_grad_sum), mean = contiguous(given_mean);
  NormGradients made{torch::stable::empty_like(x), torch::stable::empty_like(weight), {}};
  if (mean.has_value()) made.bias = torch::stable::empty_like(weight);
  Call call(x);
  for_type(x, [&](auto zero) {
    using T = decltype(zero);
    NormBackward<T> p{};
    p.has_mean = mean.has_value();
    p.rows = rows, p.size = static_cast<int>(size);
    const int64_t floats = norm_scratch<T>(p.rows, p.size, p.has_mean);
    const Tensor scratch = torch::stable::new_empty(x, {floats}, kStatistics);
    p.grad = call.input<T>("grad", grad);
    if (grad_sum.has_value()) p.grad_sum = call.input<T>("grad_sum", *grad_sum);
    p.x = call.input<T>("x", x);
    p.weight = parameter(call, "weight", weight), p.offset = one_plus ? 1.0f : 0.0f;
    if (mean.has_value()) p.mean = call.input<float>("mean", *mean);
    p.rstd = call.input<float>("rstd", rstd);
    p.grad_x = call.output<T>("grad_x", made.x);
    p.grad_weight = call.output<void>("grad_weight", made.weight);
    if (made.bias.has_value()) p.grad_bias = call.output<void>("grad_bias", *made.bias);
    p.scratch = call.scratch<float>("scratch", scratch);
    norm_backward<T>(p, call.stream());
  });
  return made;
}

inline std::tuple<Tensor, Tensor, Tensor> layer_norm(Tensor x, Tensor weight, Tensor bias, double epsilon,
                                                     bool one_plus) {
  const Normalised made = norm(x, {}, weight, bias, epsilon, one_plus);
  return {made.values, *made.mean, made.rstd};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias,
                                                                 double epsilon, bool one_plus) {
  const Normalised made = norm(x, residual, weight, bias, epsilon, one_plus);
  return {made.values, *made.sum, *made.mean, made.rstd};
}

inline std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(Tensor grad, Maybe grad_sum, Tensor x, Tensor weight,
                                                              Tensor mean, Tensor rstd, bool one_plus) {
  const NormGradients made = norm_backward(grad, grad_sum, x, weight, mean, rstd, one_plus);
  return {made.x, made.weight, *made.bias};
}

inline std::tuple<Tensor, Tensor> rms_norm(Tensor x, Tensor weight, double epsilon, bool one_plus) {
  const Normalised made = norm(x, {}, weight, {}, epsilon, one_plus);
  return {made.values, made.rstd};
}

inline std::tuple<Tensor, Tensor, Tensor> add_rms_norm(Tensor x, Tensor residual, Tensor weight, double epsilon,
                                                       bool one_plus) {
  const Normalised made = norm(x, residual, weight, {}, epsilon, one_plus);
  return {made.values, *made.sum, made.rstd};
}

inline std::tuple<Tensor, Tensor> rms_norm_backward(Tensor grad, Maybe grad_sum, Tensor x, Tensor weight, Tensor rstd,
                                                    bool one_plus) {
  const NormGradients made = norm_backward(grad, grad_sum, x, weight, {}, rstd, one_plus);
  return {made.x, made.weight};
}

inline void bind_norm(torch::stable::detail::StableLibrary& library) {
  library.impl("layer_norm", TORCH_BOX(&layer_norm));
  library.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  library.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  library.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}

}  // namespace megatronish
