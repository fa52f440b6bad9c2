// Which elements are dropped? Dropout with the residual addition, and the softmax of a tile of attention with dropout.
//
// A mask is a hash of an element's global place, to the bit that of megatronish/parallel/streams.py, computed where it is used:
// a row's hash by every thread of its team, an element's by two multiplications. Nothing but x and the residual is read
// from memory. Arithmetic is fp32; what two operators would round is rounded here too, so a product is never fused with
// the addition after it (__fmul_rn).
#include "dropout.h"

#include <cmath>
#include <stdexcept>
#include <string>

#include "platform.h"
#include "rows.h"
#include "teams.h"

namespace megatronish {
namespace {

__device__ __forceinline__ uint32_t mixed(uint32_t bits) {
  bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
  bits = (bits ^ (bits >> 15)) * 0x846CA68Bu;
  return bits ^ (bits >> 16);
}

__device__ __forceinline__ uint32_t mixed_with(uint32_t hash, int64_t number) {
  return mixed(hash ^ static_cast<uint32_t>(number));
}

__device__ __forceinline__ bool keeps(const Drop& drop, uint32_t row, int64_t column) {
  return static_cast<int32_t>(mixed(row + static_cast<uint32_t>(column) * 0x9E3779B9u)) >= drop.threshold;
}

template <typename T>
struct Hidden {
  const T *x, *residual;
  T* out;
  HiddenRows shape;
  Drop drop;
};

using RowTeam = WarpTeam<kWarpSize>;

template <typename T, bool kAdds>
__global__ void __launch_bounds__(RowTeam::kThreads) add_rows(const Hidden<T> p) {
  const int64_t r = RowTeam::row();
  if (r >= p.shape.num_rows) return;
  // Rows are below 2^32 (`over`): a GPU divides 64 bits by a subroutine.
  const uint32_t number = static_cast<uint32_t>(r), position = number / static_cast<uint32_t>(p.shape.num_samples);
  const uint32_t sample = number - position * static_cast<uint32_t>(p.shape.num_samples);
  uint32_t row = mixed_with(static_cast<uint32_t>(p.drop.keys[0]), p.shape.samples[sample]);
  row = mixed_with(mixed_with(row, p.shape.positions[position]), p.drop.keys[1]);
  const int columns = p.shape.columns;
  const T *x = p.x + r * columns, *residual = kAdds ? p.residual + r * columns : x;
  T* out = p.out + r * columns;
  const Cut<T> cut(columns, x, residual, out);
  const T zero = static_cast<T>(0.0f);
  for (int vector = RowTeam::rank(); vector < cut.num_vectors(); vector += RowTeam::size()) {
    Words of_x, of_residual;
    cut.load_if_whole(of_x, x, vector, 0, columns, zero);
    if constexpr (kAdds) cut.load_if_whole(of_residual, residual, vector, 0, columns, zero);
    cut.load_if_not(of_x, x, vector, 0, columns, zero);
    if constexpr (kAdds) cut.load_if_not(of_residual, residual, vector, 0, columns, zero);
    float values[kWidth<T>], others[kWidth<T>] = {};
    to_floats<T>(values, of_x);
    if constexpr (kAdds) to_floats<T>(others, of_residual);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      const float scaled = static_cast<float>(static_cast<T>(__fmul_rn(values[i], p.drop.factor)));
      values[i] = keeps(p.drop, row, cut.begin(vector) + i) ? scaled : 0.0f;
      if constexpr (kAdds) values[i] = values[i] + others[i];
    }
    cut.store(values, out, vector);
  }
}

// A row of scores: its hash, and the keys [from, to) that its query may see by order.
struct ScoreRow {
  uint32_t hash;
  int from, to;
  int64_t query, mine;
  const int64_t* documents;  // of the keys, or null
  float slope;

  __device__ __forceinline__ ScoreRow(const ScoreTile& p, const Drop& drop, int64_t row) {
    // A team without a row takes part in its reductions, with no key.
    const bool exists = row < p.num_rows;
    const uint32_t r = exists ? static_cast<uint32_t>(row) : 0, queries = static_cast<uint32_t>(p.queries);
    const uint32_t heads = static_cast<uint32_t>(p.heads), of_head = r / queries;
    const uint32_t sample = of_head / heads, head = of_head - sample * heads;
    query = p.first_query + (r - of_head * queries);
    hash = mixed_with(static_cast<uint32_t>(drop.keys[0]), p.samples[sample]);
    hash = mixed_with(mixed_with(mixed_with(hash, p.first_head + head), query), drop.keys[1]);
    const int64_t end = query + 1 - p.first_key;
    const int by_order = p.causal ? static_cast<int>(end < 0 ? 0 : end < p.keys ? end : p.keys) : p.keys;
    to = exists ? by_order : 0;
    from = p.causal ? static_cast<int>(end - p.window < 0 ? 0 : end - p.window < to ? end - p.window : to) : 0;
    const int64_t* of_sample = p.documents == nullptr ? nullptr : p.documents + int64_t{sample} * p.seq_length;
    mine = of_sample == nullptr ? 0 : of_sample[query];
    documents = of_sample == nullptr ? nullptr : of_sample + p.first_key;
    slope = p.slopes == nullptr ? 0.0f : p.slopes[head];
  }

  __device__ __forceinline__ bool has(int key) const { return key >= from && key < to; }

  // -infinity where the key is of another document; for keys that the row has.
  __device__ __forceinline__ float logit(const ScoreTile& p, float score, int key) const {
    if (documents != nullptr && documents[key] != mine) return -INFINITY;
    return score * p.scale - slope * static_cast<float>(query - p.first_key - key);
  }
};

// Blocks of a multiprocessor that registers must suffice for: 1536 threads of short rows. Without a number the compiler
// for SM 100 counts on all 2048, and spills.
template <typename Team>
constexpr int kBlocks = Team::kThreads < 1024 ? 1536 / Team::kThreads : 1;

// Three times over a row, which is in a cache after the first; a thread has the same keys each time.
template <typename Team>
__global__ void __launch_bounds__(Team::kThreads, kBlocks<Team>) forward(float* all_scores, float* lse,
                                                                         const ScoreTile p, const Drop drop) {
  const int64_t r = Team::row();
  const ScoreRow row(p, drop, r);
  float* scores = all_scores + r * p.keys;
  float maximum = -INFINITY;
  for (int key = Team::rank(); key < row.to; key += Team::size()) {
    if (key >= row.from) maximum = fmaxf(maximum, row.logit(p, scores[key], key));
  }
  maximum = Team::template reduce<Maximum, 0>(maximum);
  const float shift = maximum == -INFINITY ? 0.0f : maximum;
  float total = 0.0f;
  for (int key = Team::rank(); key < row.to; key += Team::size()) {
    if (key >= row.from) total += expf(row.logit(p, scores[key], key) - shift);
  }
  total = Team::template reduce<Sum, 1>(total);
  if (r >= p.num_rows) return;
  const float factor = total == 0.0f ? 0.0f : drop.factor / total;
  for (int key = Team::rank(); key < p.keys; key += Team::size()) {
    float dropped = 0.0f;
    if (row.has(key) && keeps(drop, row.hash, p.first_key + key)) {
      dropped = expf(row.logit(p, scores[key], key) - shift) * factor;
    }
    scores[key] = dropped;
  }
  if (Team::rank() == 0) lse[r] = total == 0.0f ? -INFINITY : shift + logf(total);
}

template <typename Team>
__global__ void __launch_bounds__(Team::kThreads, kBlocks<Team>) backward(float* all_scores, float* all_grads,
                                                                          const float* lse, const float* means,
                                                                          const ScoreTile p, const Drop drop) {
  const int64_t r = Team::row();
  if (r >= p.num_rows) return;
  const ScoreRow row(p, drop, r);
  float *scores = all_scores + r * p.keys, *grads = all_grads + r * p.keys;
  const float total = lse[r], mean = means[r];
  for (int key = Team::rank(); key < p.keys; key += Team::size()) {
    float dropped = 0.0f, grad = 0.0f;
    if (row.has(key)) {
      const float probability = expf(row.logit(p, scores[key], key) - total);
      const float factor = keeps(drop, row.hash, p.first_key + key) ? drop.factor : 0.0f;
      dropped = probability * factor;
      grad = probability * (grads[key] * factor - mean) * p.scale;
    }
    scores[key] = dropped;
    grads[key] = grad;
  }
}

template <typename Team>
Launch over(int64_t rows, int threads, Stream stream) {
  const int64_t blocks = divide_up(rows, static_cast<int64_t>(Team::kRows));
  if (rows > INT32_MAX) throw std::runtime_error("dropout of " + std::to_string(rows) + " rows");
  return {static_cast<unsigned>(blocks), static_cast<unsigned>(threads), stream};
}

constexpr int kWarpKeys = 1024;  // of a row that a warp has
constexpr int kBlockThreads = 256;

}  // namespace

template <typename T>
void dropout_add(const T* x, const T* residual, T* out, const HiddenRows& shape, const Drop& drop, Stream stream) {
  if (shape.num_rows == 0 || shape.columns == 0) return;
  const Hidden<T> p{x, residual, out, shape, drop};
  const Launch how = over<RowTeam>(shape.num_rows, RowTeam::kThreads, stream);
  residual != nullptr ? launch<add_rows<T, true>>(how, p) : launch<add_rows<T, false>>(how, p);
}

void softmax_dropout(float* scores, float* lse, const ScoreTile& tile, const Drop& drop, Stream stream) {
  if (tile.num_rows == 0) return;
  if (tile.keys <= kWarpKeys) {
    launch<forward<RowTeam>>(over<RowTeam>(tile.num_rows, RowTeam::kThreads, stream), scores, lse, tile, drop);
  } else {
    launch<forward<BlockTeam>>(over<BlockTeam>(tile.num_rows, kBlockThreads, stream), scores, lse, tile, drop);
  }
}

void softmax_dropout_backward(float* scores, float* grads, const float* lse, const float* means, const ScoreTile& tile,
                              const Drop& drop, Stream stream) {
  if (tile.num_rows == 0) return;
  if (tile.keys <= kWarpKeys) {
    launch<backward<RowTeam>>(over<RowTeam>(tile.num_rows, RowTeam::kThreads, stream), scores, grads, lse, means, tile,
                              drop);
  } else {
    launch<backward<BlockTeam>>(over<BlockTeam>(tile.num_rows, kBlockThreads, stream), scores, grads, lse, means, tile,
                                drop);
  }
}

#define INSTANTIATE(T) \
  template void dropout_add<T>(const T*, const T*, T*, const HiddenRows&, const Drop&, Stream);
INSTANTIATE(float)
INSTANTIATE(Half)
INSTANTIATE(BFloat16)

}  // namespace megatronish
