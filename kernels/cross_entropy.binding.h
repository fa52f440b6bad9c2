// How do tensors become arguments of the cross entropy family? Included by bindings.cpp alone.
#pragma once

#include <tuple>

#include "cross_entropy.h"
#include "operator.h"

namespace megatronish {

inline Logits logits_of(const Tensor& logits, const Tensor& labels, int64_t first, int64_t num_true) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous(), "logits must be [tokens, columns], contiguous");
  STD_TORCH_CHECK(logits.size(1) <= 1 << 30, "a cross entropy over more than 2^30 columns");
  STD_TORCH_CHECK(num_true >= 0 && num_true <= logits.size(1), "num_true must be at most the number of columns");
  STD_TORCH_CHECK(labels.scalar_type() == ScalarType::Long && labels.dim() == 1 && labels.size(0) == logits.size(0),
                  "labels must be [tokens], int64");
  return {logits.size(0), static_cast<int>(logits.size(1)), static_cast<int>(num_true), first};
}

inline std::tuple<Tensor, Tensor, Tensor> statistics(Tensor logits, Tensor given_labels, int64_t first,
                                                     int64_t num_true) {
  const Logits shape = logits_of(logits, given_labels, first, num_true);
  const Tensor labels = torch::stable::contiguous(given_labels);
  const auto fp32 = torch::headeronly::ScalarType::Float;
  const auto make = [&] { return torch::stable::new_empty(logits, {shape.rows}, fp32); };
  const Tensor maximum = make(), total = make(), target = make();
  Call call(logits);
  for_type(logits, [&](auto zero) {
    using T = decltype(zero);
    cross_entropy_statistics<T>(call.input<T>("logits", logits), call.input<int64_t>("labels", labels),
                                call.output<float>("maximum", maximum), call.output<float>("total", total),
                                call.output<float>("target", target), shape, call.stream());
  });
  return {maximum, total, target};
}

inline void gradient_(Tensor logits, Tensor given_labels, Tensor given_maximum, Tensor given_factor, Tensor given_grad,
                      int64_t first, int64_t num_true) {
  const Logits shape = logits_of(logits, given_labels, first, num_true);
  for (const Tensor& x : {given_maximum, given_factor, given_grad}) {
    STD_TORCH_CHECK(x.scalar_type() == torch::headeronly::ScalarType::Float && x.dim() == 1 && x.size(0) == shape.rows,
                    "maximum, factor and grad must be [tokens], float32");
  }
  const Tensor labels = torch::stable::contiguous(given_labels), maximum = torch::stable::contiguous(given_maximum);
  const Tensor factor = torch::stable::contiguous(given_factor), grad = torch::stable::contiguous(given_grad);
  Call call(logits);
  for_type(logits, [&](auto zero) {
    using T = decltype(zero);
    cross_entropy_gradient<T>(call.updated<T>("logits", logits), call.input<int64_t>("labels", labels),
                              call.input<float>("maximum", maximum), call.input<float>("factor", factor),
                              call.input<float>("grad", grad), shape, call.stream());
  });
}

inline void bind_cross_entropy(torch::stable::detail::StableLibrary& library) {
  library.impl("cross_entropy_statistics", TORCH_BOX(&statistics));
  library.impl("cross_entropy_gradient_", TORCH_BOX(&gradient_));
}

}  // namespace megatronish
