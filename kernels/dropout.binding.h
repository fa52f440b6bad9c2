// How do tensors become arguments of the dropout family? Included by bindings.cpp alone.
#pragma once

#include <cmath>

#include "dropout.h"
#include "operator.h"

namespace megatronish {

inline void check_numbers(const Tensor& tensor, torch::headeronly::ScalarType type, int64_t size, const char* what) {
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == size && tensor.scalar_type() == type, what);
}

// As `drop_threshold` of streams.py; nearbyint rounds ties to even, as Python does.
inline Drop drop_of(Call& call, const Tensor& keys, double rate) {
  STD_TORCH_CHECK(rate >= 0 && rate < 1, "rate must be at least 0 and below 1");
  const double threshold = std::nearbyint(rate * 4294967296.0) - 2147483648.0;
  return {call.input<int32_t>("keys", keys), static_cast<int32_t>(std::fmin(threshold, INT32_MAX)),
          static_cast<float>(1.0 / (1.0 - rate))};
}

inline Tensor dropout_add_of(Tensor given, std::optional<Tensor> given_residual, Tensor given_keys,
                             Tensor given_samples, Tensor given_positions, double rate) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(given.dim() == 3, "x must be [positions, samples, columns]");
  if (given_residual.has_value()) check_like(*given_residual, given, "residual must be like x");
  check_numbers(given_keys, ScalarType::Int, 2, "keys must be int32 [2]");
  check_numbers(given_samples, ScalarType::Long, given.size(1), "samples must be int64 [samples]");
  check_numbers(given_positions, ScalarType::Long, given.size(0), "positions must be int64 [positions]");
  STD_TORCH_CHECK(given.size(1) <= INT32_MAX && given.size(2) <= INT32_MAX, "more than 2^31 - 1 samples or columns");
  const Tensor x = torch::stable::contiguous(given), keys = torch::stable::contiguous(given_keys);
  const Tensor samples = torch::stable::contiguous(given_samples);
  const Tensor positions = torch::stable::contiguous(given_positions);
  const std::optional<Tensor> residual = contiguous_if_any(given_residual);
  const Tensor out = torch::stable::empty_like(x);
  Call call(x);
  const HiddenRows shape{call.input<int64_t>("samples", samples), call.input<int64_t>("positions", positions),
                         x.size(0) * x.size(1), static_cast<int>(x.size(1)), static_cast<int>(x.size(2))};
  const Drop drop = drop_of(call, keys, rate);
  for_type(x, [&](auto zero) {
    using T = decltype(zero);
    dropout_add<T>(call.input<T>("x", x), residual ? call.input<T>("residual", *residual) : nullptr,
                   call.output<T>("out", out), shape, drop, call.stream());
  });
  return out;
}

// What the arguments after the first tensors say about a tile of scores.
struct TilePlace {
  Tensor keys, samples;
  std::optional<Tensor> documents, slopes;
  int64_t first_head, first_query, first_key;
  std::optional<int64_t> window;
  bool causal;
  double scale, rate;

  ScoreTile tile(Call& call, const Tensor& scores) const {
    ScoreTile tile{};
    tile.samples = call.input<int64_t>("samples", samples);
    if (documents) tile.documents = call.input<int64_t>("documents", *documents);
    if (slopes) tile.slopes = call.input<float>("slopes", *slopes);
    tile.heads = static_cast<int>(scores.size(1)), tile.queries = static_cast<int>(scores.size(2));
    tile.keys = static_cast<int>(scores.size(3));
    tile.num_rows = scores.size(0) * scores.size(1) * scores.size(2);
    tile.first_head = first_head, tile.first_query = first_query, tile.first_key = first_key;
    tile.window = window.value_or(INT32_MAX);
    tile.causal = causal;
    tile.seq_length = documents ? documents->size(1) : 0;
    tile.scale = static_cast<float>(scale);
    return tile;
  }
};

inline TilePlace place_of(const Tensor& scores, const Tensor& keys, const Tensor& samples,
                          const std::optional<Tensor>& documents, const std::optional<Tensor>& slopes,
                          int64_t first_head, int64_t first_query, int64_t first_key, std::optional<int64_t> window,
                          bool causal, double scale, double rate) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(scores.dim() == 4 && scores.scalar_type() == ScalarType::Float && scores.is_contiguous(),
                  "scores must be contiguous fp32 [samples, heads, queries, keys]");
  for (int64_t dim = 1; dim < 4; ++dim) STD_TORCH_CHECK(scores.size(dim) <= INT32_MAX, "more than 2^31 - 1 scores");
  STD_TORCH_CHECK(window.value_or(1) > 0, "window_size must be at least 1");
  STD_TORCH_CHECK(causal || !window, "a tile that is not causal has no window");
  check_numbers(keys, ScalarType::Int, 2, "keys must be int32 [2]");
  check_numbers(samples, ScalarType::Long, scores.size(0), "samples must be int64 [samples]");
  if (slopes) check_numbers(*slopes, ScalarType::Float, scores.size(1), "slopes must be fp32 [heads]");
  if (documents) {
    const int64_t last = std::max(first_query + scores.size(2), first_key + scores.size(3));
    STD_TORCH_CHECK(documents->dim() == 2 && documents->size(0) == scores.size(0) && documents->size(1) >= last &&
                        documents->scalar_type() == ScalarType::Long,
                    "documents must be int64 [samples, sequence], with all positions of the tile");
  }
  return {torch::stable::contiguous(keys), torch::stable::contiguous(samples), contiguous_if_any(documents),
          contiguous_if_any(slopes), first_head, first_query, first_key, window, causal, scale, rate};
}

inline void check_rows(const Tensor& rows, const Tensor& scores, const char* what) {
  bool fits = rows.dim() == 3 && rows.is_contiguous() && rows.scalar_type() == scores.scalar_type();
  for (int64_t dim = 0; fits && dim < 3; ++dim) fits = rows.size(dim) == scores.size(dim);
  STD_TORCH_CHECK(fits, what);
}

inline void softmax_dropout_of(Tensor scores, Tensor lse, Tensor keys, Tensor samples, std::optional<Tensor> documents,
                               std::optional<Tensor> slopes, int64_t first_head, int64_t first_query,
                               int64_t first_key, std::optional<int64_t> window, bool causal, double scale,
                               double rate) {
  const TilePlace place = place_of(scores, keys, samples, documents, slopes, first_head, first_query, first_key,
                                   window, causal, scale, rate);
  check_rows(lse, scores, "lse must be contiguous fp32 [samples, heads, queries]");
  Call call(scores);
  softmax_dropout(call.updated<float>("scores", scores), call.output<float>("lse", lse), place.tile(call, scores),
                  drop_of(call, place.keys, rate), call.stream());
}

inline void softmax_dropout_backward_of(Tensor scores, Tensor grads, Tensor lse, Tensor means, Tensor keys,
                                        Tensor samples, std::optional<Tensor> documents, std::optional<Tensor> slopes,
                                        int64_t first_head, int64_t first_query, int64_t first_key,
                                        std::optional<int64_t> window, bool causal, double scale, double rate) {
  const TilePlace place = place_of(scores, keys, samples, documents, slopes, first_head, first_query, first_key,
                                   window, causal, scale, rate);
  check_like(grads, scores, "grads must be like scores");
  STD_TORCH_CHECK(grads.is_contiguous(), "grads must be contiguous");
  check_rows(lse, scores, "lse must be contiguous fp32 [samples, heads, queries]");
  check_rows(means, scores, "means must be contiguous fp32 [samples, heads, queries]");
  Call call(scores);
  softmax_dropout_backward(call.updated<float>("scores", scores), call.updated<float>("grads", grads),
                           call.input<float>("lse", lse), call.input<float>("means", means), place.tile(call, scores),
                           drop_of(call, place.keys, rate), call.stream());
}

inline void bind_dropout(torch::stable::detail::StableLibrary& library) {
  library.impl("dropout_add", TORCH_BOX(&dropout_add_of));
  library.impl("softmax_dropout", TORCH_BOX(&softmax_dropout_of));
  library.impl("softmax_dropout_backward", TORCH_BOX(&softmax_dropout_backward_of));
}

}  // namespace megatronish
