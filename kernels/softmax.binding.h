// How do tensors become arguments of the softmax family? Included by bindings.cpp alone.
#pragma once

#include "operator.h"
#include "softmax.h"

namespace megatronish {

inline Scores scores_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() >= 2, "scores must be [..., queries, keys]");
  const int64_t queries = x.size(x.dim() - 2), keys = x.size(x.dim() - 1);
  STD_TORCH_CHECK(queries <= INT32_MAX && keys <= INT32_MAX, "a softmax of more than 2^31 - 1 queries or keys");
  return {keys == 0 ? 0 : x.numel() / keys, static_cast<int>(queries), static_cast<int>(keys)};
}

inline Sight causal_sight(std::optional<int64_t> window_size) {
  STD_TORCH_CHECK(window_size.value_or(1) > 0, "window_size must be at least 1");
  Sight sight;
  sight.causal = true;
  if (window_size.has_value()) sight.window = *window_size;
  return sight;
}

inline Tensor forward(const Tensor& given, const std::optional<Tensor>& visible, Sight sight, double scale) {
  const Tensor scores = torch::stable::contiguous(given);
  const Scores shape = scores_of(scores);
  Tensor probabilities = torch::stable::empty_like(scores);
  Call call(scores);
  if (visible.has_value()) sight.visible = call.input<uint8_t>("visible", *visible);
  for_type(scores, [&](auto zero) {
    using T = decltype(zero);
    softmax_forward<T>(call.input<T>("scores", scores), call.output<T>("probabilities", probabilities), shape, sight,
                       static_cast<float>(scale), call.stream());
  });
  return probabilities;
}

inline Tensor backward(const Tensor& given_grad, const Tensor& given, const Sight& sight, double scale) {
  check_like(given_grad, given, "grad must be like probabilities");
  const Tensor grad = torch::stable::contiguous(given_grad), probabilities = torch::stable::contiguous(given);
  Tensor grad_scores = torch::stable::empty_like(grad);
  Call call(grad);
  for_type(grad, [&](auto zero) {
    using T = decltype(zero);
    softmax_backward<T>(call.input<T>("grad", grad), call.input<T>("probabilities", probabilities),
                        call.output<T>("grad_scores", grad_scores), scores_of(grad), sight, static_cast<float>(scale),
                        call.stream());
  });
  return grad_scores;
}

inline Tensor scaled_causal_softmax(Tensor scores, double scale, std::optional<int64_t> window_size) {
  return forward(scores, std::nullopt, causal_sight(window_size), scale);
}

inline Tensor scaled_causal_softmax_backward(Tensor grad, Tensor probabilities, double scale,
                                             std::optional<int64_t> window_size) {
  return backward(grad, probabilities, causal_sight(window_size), scale);
}

inline Tensor scaled_masked_softmax(Tensor scores, std::optional<Tensor> visible, double scale) {
  if (!visible.has_value()) return forward(scores, visible, {}, scale);
  STD_TORCH_CHECK(scores.dim() == 4 && visible->dim() == 4, "scores and visible must be [B, n, q, k]");
  STD_TORCH_CHECK(visible->scalar_type() == torch::headeronly::ScalarType::Bool, "visible must be bool");
  for (int64_t dim = 0; dim < 4; ++dim) {
    const bool fits = visible->size(dim) == scores.size(dim) || (dim < 3 && visible->size(dim) == 1);
    STD_TORCH_CHECK(fits, "visible must be [1 or B, 1 or n, 1 or q, k]");
  }
  if (visible->stride(3) != 1) visible = torch::stable::contiguous(*visible);
  const auto stride = [&](int64_t dim) { return visible->size(dim) == 1 ? 0 : visible->stride(dim); };
  Sight sight;
  sight.heads = static_cast<int>(scores.size(1));
  sight.sample_stride = stride(0), sight.head_stride = stride(1), sight.query_stride = stride(2);
  return forward(scores, visible, sight, scale);
}

inline Tensor scaled_masked_softmax_backward(Tensor grad, Tensor probabilities, double scale) {
  return backward(grad, probabilities, {}, scale);
}

inline void bind_softmax(torch::stable::detail::StableLibrary& library) {
  library.impl("scaled_causal_softmax", TORCH_BOX(&scaled_causal_softmax));
  library.impl("scaled_causal_softmax_backward", TORCH_BOX(&scaled_causal_softmax_backward));
  library.impl("scaled_masked_softmax", TORCH_BOX(&scaled_masked_softmax));
  library.impl("scaled_masked_softmax_backward", TORCH_BOX(&scaled_masked_softmax_backward));
}

}  // namespace megatronish
