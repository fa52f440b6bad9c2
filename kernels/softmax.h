// What does the softmax family offer to its binding? T is float, Half or BFloat16.
#pragma once

#include <cstdint>

namespace megatronish {

// Contiguous [..., queries, keys].
struct Scores {
  int64_t rows;  // of all heads and samples
  int queries, keys;
};

// Which keys a query sees: those up to its own place, at most `window` of them, if `causal`; the last query stands at
// the last key. And those where `visible` is not 0, if there is one: [samples, heads, queries, keys] by its strides.
struct Sight {
  bool causal = false;
  int64_t window = INT64_MAX;
  const uint8_t* visible = nullptr;
  int heads = 1;
  int64_t sample_stride = 0, head_stride = 0, query_stride = 0;  // 0 where all see the same
};

// probabilities = softmax(scale * scores) over the keys that the query sees; 0 elsewhere, and where it sees none.
template <typename T>
void softmax_forward(const T* scores, T* probabilities, const Scores& shape, const Sight& sight, float scale,
                     void* stream);

// grad_scores = scale * probabilities * (grad - sum(probabilities * grad)). Probabilities are 0 where nothing is seen,
// so `visible` is not asked again.
template <typename T>
void softmax_backward(const T* grad, const T* probabilities, T* grad_scores, const Scores& shape, const Sight& sight,
                      float scale, void* stream);

}  // namespace megatronish
