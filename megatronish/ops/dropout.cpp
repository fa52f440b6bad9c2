// Dropout on the CPU: hidden states with the residual, and attention probabilities of a tile, masks computed in place.
//
// Built by native.py where it is first needed, and called through ctypes: plain C++, without a header of torch. A mask
// is a hash of an element's global place, bit for bit that of streams.py. The result of `dropout_add` is torch's to the
// bit, too: a product is rounded before it is added (-ffp-contract=off), in bf16 to bf16.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "floats.h"

namespace {

inline uint32_t mixed(uint32_t bits) {
  bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
  bits = (bits ^ (bits >> 15)) * 0x846CA68Bu;
  return bits ^ (bits >> 16);
}

inline bool keeps(uint32_t row, int64_t column, int32_t threshold) {
  return static_cast<int32_t>(mixed(row + static_cast<uint32_t>(column) * 0x9E3779B9u)) >= threshold;
}

template <typename T>
inline float rounded(float x) {
  T to;
  narrow(x, to);
  return wide(to);
}

struct Hidden {
  const int32_t* keys;       // [2]
  const int64_t* samples;    // [num_samples]
  const int64_t* positions;  // [num_positions]
  int64_t num_positions, num_samples, columns;
  int32_t threshold;
  float factor;
  int32_t threads;
};

inline uint32_t hash_of(const Hidden& p, int64_t r) {
  uint32_t row = mixed(static_cast<uint32_t>(p.keys[0]) ^ static_cast<uint32_t>(p.samples[r % p.num_samples]));
  row = mixed(row ^ static_cast<uint32_t>(p.positions[r / p.num_samples]));
  return mixed(row ^ static_cast<uint32_t>(p.keys[1]));
}

template <typename T, bool kAdds>
inline void add_row(uint32_t row, int64_t columns, int32_t threshold, float factor, const T* __restrict x,
                    const T* __restrict residual, T* __restrict out) {
#pragma omp simd
  for (int64_t j = 0; j < columns; ++j) {
    const float scaled = rounded<T>(wide(x[j]) * factor);
    float kept = keeps(row, j, threshold) ? scaled : 0.0f;
    if constexpr (kAdds) kept += wide(residual[j]);
    narrow(kept, out[j]);
  }
}

// x, residual (or null) and out are [num_positions, num_samples, columns].
template <typename T>
void add_rows(const Hidden& p, const T* x, const T* residual, T* out) {
#pragma omp parallel for num_threads(p.threads)
  for (int64_t r = 0; r < p.num_positions * p.num_samples; ++r) {
    const int64_t at = r * p.columns;
    if (residual == nullptr) {
      add_row<T, false>(hash_of(p, r), p.columns, p.threshold, p.factor, x + at, nullptr, out + at);
    } else {
      add_row<T, true>(hash_of(p, r), p.columns, p.threshold, p.factor, x + at, residual + at, out + at);
    }
  }
}

struct Tile {
  const int32_t* keys;       // [2]
  const int64_t* samples;    // [num_samples]
  const int64_t* documents;  // [num_samples, seq_length], or null
  const float* slopes;       // [heads], or null
  int64_t num_samples, heads, num_queries, num_keys;
  int64_t first_head, first_query, first_key, window, seq_length, causal;
  float scale;
  int32_t threshold;
  float factor;
  int32_t threads;
};

// A row of scores: its hash, and the keys [from, to) that its query may see by order.
struct Row {
  uint32_t hash;
  int64_t from, to, query;
  float slope;
  const int64_t* documents;
};

inline Row row_of(const Tile& p, int64_t r) {
  const int64_t query = p.first_query + r % p.num_queries, head = r / p.num_queries % p.heads;
  const int64_t sample = r / p.num_queries / p.heads;
  uint32_t hash = mixed(static_cast<uint32_t>(p.keys[0]) ^ static_cast<uint32_t>(p.samples[sample]));
  hash = mixed(hash ^ static_cast<uint32_t>(p.first_head + head));
  hash = mixed(hash ^ static_cast<uint32_t>(query));
  hash = mixed(hash ^ static_cast<uint32_t>(p.keys[1]));
  const int64_t to = p.causal ? std::clamp<int64_t>(query + 1 - p.first_key, 0, p.num_keys) : p.num_keys;
  const int64_t from = p.causal ? std::clamp<int64_t>(query + 1 - p.first_key - p.window, 0, to) : 0;
  const int64_t* documents = p.documents == nullptr ? nullptr : p.documents + sample * p.seq_length;
  return {hash, from, to, query, p.slopes == nullptr ? 0.0f : p.slopes[head], documents};
}

// Scores become logits: scaled, with ALiBi, and -infinity where the key is of another document.
inline void make_logits(const Tile& p, const Row& row, float* scores) {
  const float distance = static_cast<float>(row.query - p.first_key);
#pragma omp simd
  for (int64_t j = row.from; j < row.to; ++j) {
    scores[j] = scores[j] * p.scale - row.slope * (distance - static_cast<float>(j));
  }
  if (row.documents == nullptr) return;
  const int64_t mine = row.documents[row.query];
  for (int64_t j = row.from; j < row.to; ++j) {
    if (row.documents[p.first_key + j] != mine) scores[j] = -INFINITY;
  }
}

inline void clear_outside(const Tile& p, const Row& row, float* values) {
  std::fill(values, values + row.from, 0.0f);
  std::fill(values + row.to, values + p.num_keys, 0.0f);
}

}  // namespace

extern "C" {

void dropout_add_float(const Hidden* p, const float* x, const float* residual, float* out) {
  add_rows(*p, x, residual, out);
}

void dropout_add_bfloat16(const Hidden* p, const BFloat16* x, const BFloat16* residual, BFloat16* out) {
  add_rows(*p, x, residual, out);
}

// Scores become dropped probabilities; `lse` their log-sum-exp, -infinity where a query sees nothing.
void softmax_dropout(const Tile* tile, float* all_scores, float* lse) {
  const Tile& p = *tile;
#pragma omp parallel for num_threads(p.threads)
  for (int64_t r = 0; r < p.num_samples * p.heads * p.num_queries; ++r) {
    const Row row = row_of(p, r);
    float* scores = all_scores + r * p.num_keys;
    make_logits(p, row, scores);
    float maximum = -INFINITY;
#pragma omp simd reduction(max : maximum)
    for (int64_t j = row.from; j < row.to; ++j) maximum = scores[j] > maximum ? scores[j] : maximum;
    const float shift = maximum == -INFINITY ? 0.0f : maximum;
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t j = row.from; j < row.to; ++j) {
      scores[j] = exponential(scores[j] - shift);
      total += scores[j];
    }
    lse[r] = total == 0.0f ? -INFINITY : shift + std::log(total);
    const float factor = total == 0.0f ? 0.0f : p.factor / total;
#pragma omp simd
    for (int64_t j = row.from; j < row.to; ++j) {
      scores[j] = keeps(row.hash, p.first_key + j, p.threshold) ? scores[j] * factor : 0.0f;
    }
    clear_outside(p, row, scores);
  }
}

// Scores become dropped probabilities, gradients of these become gradients of the products q k^T. `means` [rows] are
// the sums of dout * out.
void softmax_dropout_backward(const Tile* tile, float* all_scores, float* all_grads, const float* lse,
                              const float* means) {
  const Tile& p = *tile;
#pragma omp parallel for num_threads(p.threads)
  for (int64_t r = 0; r < p.num_samples * p.heads * p.num_queries; ++r) {
    const Row row = row_of(p, r);
    float *scores = all_scores + r * p.num_keys, *grads = all_grads + r * p.num_keys;
    make_logits(p, row, scores);
    const float total = lse[r], mean = means[r];
#pragma omp simd
    for (int64_t j = row.from; j < row.to; ++j) {
      const float probability = exponential(scores[j] - total);
      const float factor = keeps(row.hash, p.first_key + j, p.threshold) ? p.factor : 0.0f;
      scores[j] = probability * factor;
      grads[j] = probability * (grads[j] * factor - mean) * p.scale;
    }
    clear_outside(p, row, scores);
    clear_outside(p, row, grads);
  }
}

}  // extern "C"
