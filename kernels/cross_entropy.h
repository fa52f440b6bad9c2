// What does the cross entropy family offer to its binding? T is float, Half or BFloat16.
#pragma once

#include <cstdint>

namespace megatronish {

// Contiguous logits [rows, columns]: column c is token first + c of the vocabulary, or padding from `num_true` on.
struct Logits {
  int64_t rows;
  int columns, num_true;
  int64_t first;
};

// maximum = max(logits), total = sum(exp(logits - maximum)), target = logits[label]: over the true columns, of which
// there may be none (-infinity, 0, 0); a label that is elsewhere has the target 0.
template <typename T>
void cross_entropy_statistics(const T* logits, const int64_t* labels, float* maximum, float* total, float* target,
                              const Logits& shape, void* stream);

// logits = exp(logits - maximum) * factor, less grad at the label; 0 in padding.
template <typename T>
void cross_entropy_gradient(T* logits, const int64_t* labels, const float* maximum, const float* factor,
                            const float* grad, const Logits& shape, void* stream);

}  // namespace megatronish
