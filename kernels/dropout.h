// What does the dropout family offer to its binding? T is float, Half or BFloat16.
#pragma once

#include <cstdint>

namespace megatronish {

// An element is dropped where the hash of its place is below `threshold`; the others are multiplied by `factor`.
struct Drop {
  const int32_t* keys;  // [2], of the hash
  int32_t threshold;
  float factor;
};

// Contiguous [positions, samples, columns], with the global numbers of the rows.
struct HiddenRows {
  const int64_t *samples, *positions;
  int64_t num_rows;  // positions times samples
  int num_samples, columns;
};

// out = residual + dropped x; `residual` may be null.
template <typename T>
void dropout_add(const T* x, const T* residual, T* out, const HiddenRows& shape, const Drop& drop, void* stream);

// A tile of scores, contiguous [samples, heads, queries, keys], with the global numbers of its first row and column.
// A query sees keys up to its own place if `causal`, at most `window` of them, else all; of its own document if there
// are `documents` [samples, seq_length]. With `slopes` [heads] a score falls by slope times distance.
struct ScoreTile {
  const int64_t* samples;
  const int64_t* documents;
  const float* slopes;
  int64_t num_rows;  // samples times heads times queries
  int heads, queries, keys;
  int64_t first_head, first_query, first_key, window, seq_length;
  bool causal;
  float scale;
};

// Scores become dropped probabilities, lse [num_rows] their log-sum-exp, -infinity where a query sees nothing.
void softmax_dropout(float* scores, float* lse, const ScoreTile& tile, const Drop& drop, void* stream);

// Scores become dropped probabilities, and gradients of these gradients of the products of queries and keys. `lse` and
// `means`, the sums of dout * out, are [num_rows].
void softmax_dropout_backward(float* scores, float* grads, const float* lse, const float* means, const ScoreTile& tile,
                              const Drop& drop, void* stream);

}  // namespace megatronish
