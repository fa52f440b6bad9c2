// How likely is each key, by its score? Scaled masked and scaled causal softmax, forward and backward.
//
// Every row is read once and written once: the threads of its team hold it in registers, sixteen elements each. A short
// row has eight lanes or a warp, a longer one a block, up to 16,384 elements; beyond that a block goes over its row
// twice. Arithmetic is fp32. Keys outside a causal window are not read.
#include "softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "platform.h"
#include "rows.h"
#include "teams.h"

namespace megatronish {
namespace {

constexpr int kElements = 16;  // of a row, in a thread's registers
constexpr int kShortTeam = 8;  // lanes

template <typename T>
constexpr int kHeld = kElements / kWidth<T>;  // vectors

template <typename T>
struct Forward {
  const T* scores;
  T* probabilities;
  Scores shape;
  Sight sight;
  float sign, exponent_scale;  // exp(scale * x) = exp2(exponent_scale * sign * x), with an exponent_scale above 0
};

template <typename T>
struct Backward {
  const T *grad, *probabilities;
  T* grad_scores;
  Scores shape;
  Sight sight;
  float scale;
};

// a / b and a % b, a at least 0 and b above. A GPU divides 64 bits by a subroutine, and 32 bits, all that rows of less
// than 2^32 need, in a fraction of its instructions: a short row has few others.
struct Division {
  int64_t quotient;
  int remainder;

  __device__ __forceinline__ Division(int64_t a, int b) {
    if (a >> 32 == 0) {
      const uint32_t low = static_cast<uint32_t>(a), divisor = static_cast<uint32_t>(b), times = low / divisor;
      quotient = times;
      remainder = static_cast<int>(low - times * divisor);
    } else {
      quotient = a / b;
      remainder = static_cast<int>(a - quotient * b);
    }
  }
};

// Keys [from, to) that order lets the query of a row see.
struct Span {
  int from, to;

  // `query` is the row's place among the queries of its head.
  __device__ __forceinline__ Span(const Scores& shape, const Sight& sight, int64_t row, int query)
      : from(0), to(shape.keys) {
    if (row >= shape.rows) {
      to = 0;
    } else if (sight.causal) {
      const int64_t end = static_cast<int64_t>(query) + 1 + shape.keys - shape.queries;
      to = static_cast<int>(end > 0 ? end : 0);
      from = end > sight.window ? static_cast<int>(end - sight.window) : 0;
    }
  }
};

// The scores of a row, and who is seen.
template <typename T, bool kMasked>
struct ScoresRow {
  int64_t offset;
  Division place;  // the head of all samples, and the query
  Span span;
  Cut<T> cut;
  const T* scores;
  const uint8_t* visible;
  float sign;

  __device__ __forceinline__ ScoresRow(const Forward<T>& p, int64_t row)
      : offset(row * p.shape.keys),
        place(row, p.shape.queries),
        span(p.shape, p.sight, row, place.remainder),
        cut(row < p.shape.rows ? p.shape.keys : 0, p.scores + offset, p.probabilities + offset),
        scores(p.scores + offset),
        visible(p.sight.visible),
        sign(p.sign) {
    if constexpr (kMasked) {
      const Division head(place.quotient, p.sight.heads);
      visible += head.quotient * p.sight.sample_stride + head.remainder * p.sight.head_stride +
                 place.remainder * p.sight.query_stride;
    }
  }

  // sign * score where the query sees the key, else -infinity: of vectors first, first + step, ...
  template <int kVectors>
  __device__ __forceinline__ void load(float (&values)[kVectors][kWidth<T>], int first, int step) const {
    Words loaded[kVectors];
    Seen seen[kVectors];
    const T unseen = static_cast<T>(-INFINITY * sign);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      cut.load_if_whole(loaded[v], scores, first + v * step, span.from, span.to, unseen);
      if constexpr (kMasked) look_if_whole(seen[v], first + v * step);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      cut.load_if_not(loaded[v], scores, first + v * step, span.from, span.to, unseen);
      if constexpr (kMasked) look_if_not(seen[v], first + v * step);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      to_floats<T>(values[v], loaded[v]);
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        values[v][i] = !kMasked || (seen[v] >> 8 * i & 0xff) != 0 ? values[v][i] * sign : -INFINITY;
      }
    }
  }

 private:
  // A byte for each key of a vector. Rows of `visible` need not begin where those of scores do.
  using Seen = std::conditional_t<kWidth<T> == 8, uint64_t, uint32_t>;

  __device__ __forceinline__ bool has_all_seen(int vector) const {
    const int at = cut.begin(vector);
    const bool begins_one = reinterpret_cast<uintptr_t>(visible + at) % sizeof(Seen) == 0;
    return begins_one & (at >= 0) & (at + kWidth<T> <= cut.length);
  }
  __device__ __forceinline__ void look_if_whole(Seen& seen, int vector) const {
    seen = 0;
    if (has_all_seen(vector)) seen = *reinterpret_cast<const Seen*>(visible + cut.begin(vector));
  }
  __device__ __forceinline__ void look_if_not(Seen& seen, int vector) const {
    if (has_all_seen(vector)) return;
    const int at = cut.begin(vector);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      if (at + i >= 0 && at + i < cut.length) seen |= static_cast<Seen>(visible[at + i]) << 8 * i;
    }
  }
};

__device__ __forceinline__ float finite(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }
__device__ __forceinline__ float inverse(float total) { return total == 0.0f ? 0.0f : 1.0f / total; }

template <typename T, typename Team, int kVectors, bool kMasked>
__global__ void __launch_bounds__(Team::kThreads) forward_once(const Forward<T> p) {
  const ScoresRow<T, kMasked> row(p, Team::row());
  const int num_vectors = row.cut.num_vectors();
  float values[kVectors][kWidth<T>];
  float maximum = -INFINITY;
  row.load(values, Team::rank(), Team::size());
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (float value : values[v]) maximum = fmaxf(maximum, value);
  }
  maximum = finite(Team::template reduce<Maximum, 0>(maximum));
  float total = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (float& value : values[v]) total += value = exp2f((value - maximum) * p.exponent_scale);
  }
  const float factor = inverse(Team::template reduce<Sum, 1>(total));
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int vector = Team::rank() + v * Team::size();
    if (vector >= num_vectors) break;
#pragma unroll
    for (float& value : values[v]) value *= factor;
    row.cut.store(values[v], p.probabilities + row.offset, vector);
  }
}

// The maximum and the sum are found together, the sum corrected whenever the maximum grows (Milakov & Gimelshein 2018).
template <typename T, bool kMasked>
__global__ void __launch_bounds__(BlockTeam::kThreads) forward_twice(const Forward<T> p) {
  const ScoresRow<T, kMasked> row(p, BlockTeam::row());
  const int num_vectors = row.cut.num_vectors();
  float values[1][kWidth<T>];
  float maximum = -INFINITY, total = 0.0f;
  for (int vector = BlockTeam::rank(); vector < num_vectors; vector += BlockTeam::size()) {
    row.load(values, vector, 0);
    float greater = maximum;
#pragma unroll
    for (float value : values[0]) greater = fmaxf(greater, value);
    total *= exp2f((maximum - finite(greater)) * p.exponent_scale);
#pragma unroll
    for (float value : values[0]) total += exp2f((value - finite(greater)) * p.exponent_scale);
    maximum = greater;
  }
  const float greatest = finite(BlockTeam::reduce<Maximum, 0>(maximum));
  total *= exp2f((maximum - greatest) * p.exponent_scale);
  const float factor = inverse(BlockTeam::reduce<Sum, 1>(total));
  for (int vector = BlockTeam::rank(); vector < num_vectors; vector += BlockTeam::size()) {
    row.load(values, vector, 0);
#pragma unroll
    for (float& value : values[0]) value = exp2f((value - greatest) * p.exponent_scale) * factor;
    row.cut.store(values[0], p.probabilities + row.offset, vector);
  }
}

// Of a row of gradients and one of probabilities.
template <typename T>
struct GradRow {
  int64_t offset;
  Span span;
  Cut<T> cut;
  const T *grad, *probabilities;

  __device__ __forceinline__ GradRow(const Backward<T>& p, int64_t row)
      : offset(row * p.shape.keys),
        span(p.shape, p.sight, row, p.sight.causal ? Division(row, p.shape.queries).remainder : 0),
        cut(row < p.shape.rows ? p.shape.keys : 0, p.grad + offset, p.probabilities + offset, p.grad_scores + offset),
        grad(p.grad + offset),
        probabilities(p.probabilities + offset) {}

  // Vectors first, first + step, ...
  template <int kVectors>
  __device__ __forceinline__ void load(float (&g)[kVectors][kWidth<T>], float (&y)[kVectors][kWidth<T>], int first,
                                       int step) const {
    Words of_grad[kVectors], of_probabilities[kVectors];
    const T zero = static_cast<T>(0.0f);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      cut.load_if_whole(of_grad[v], grad, first + v * step, span.from, span.to, zero);
      cut.load_if_whole(of_probabilities[v], probabilities, first + v * step, span.from, span.to, zero);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      cut.load_if_not(of_grad[v], grad, first + v * step, span.from, span.to, zero);
      cut.load_if_not(of_probabilities[v], probabilities, first + v * step, span.from, span.to, zero);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      to_floats<T>(g[v], of_grad[v]);
      to_floats<T>(y[v], of_probabilities[v]);
    }
  }
};

template <typename T, typename Team, int kVectors>
__global__ void __launch_bounds__(Team::kThreads) backward_once(const Backward<T> p) {
  const GradRow<T> row(p, Team::row());
  const int num_vectors = row.cut.num_vectors();
  float g[kVectors][kWidth<T>], y[kVectors][kWidth<T>];
  float dot = 0.0f;
  row.load(g, y, Team::rank(), Team::size());
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) dot += g[v][i] * y[v][i];
  }
  dot = Team::template reduce<Sum, 0>(dot);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int vector = Team::rank() + v * Team::size();
    if (vector >= num_vectors) break;
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) g[v][i] = p.scale * (y[v][i] * (g[v][i] - dot));
    row.cut.store(g[v], p.grad_scores + row.offset, vector);
  }
}

template <typename T>
__global__ void __launch_bounds__(BlockTeam::kThreads) backward_twice(const Backward<T> p) {
  const GradRow<T> row(p, BlockTeam::row());
  const int num_vectors = row.cut.num_vectors();
  float g[1][kWidth<T>], y[1][kWidth<T>];
  float dot = 0.0f;
  for (int vector = BlockTeam::rank(); vector < num_vectors; vector += BlockTeam::size()) {
    row.load(g, y, vector, 0);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) dot += g[0][i] * y[0][i];
  }
  dot = BlockTeam::reduce<Sum, 0>(dot);
  for (int vector = BlockTeam::rank(); vector < num_vectors; vector += BlockTeam::size()) {
    row.load(g, y, vector, 0);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) g[0][i] = p.scale * (y[0][i] * (g[0][i] - dot));
    row.cut.store(g[0], p.grad_scores + row.offset, vector);
  }
}

// The most vectors that a row is cut into.
template <typename T, typename... Tensors>
int most_vectors(int keys, const T* first, Tensors... others) {
  const auto begins_a_vector = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kVectorBytes == 0; };
  const bool aligned = keys % kWidth<T> == 0 && begins_a_vector(first) && (begins_a_vector(others) && ...);
  return divide_up(keys + (aligned ? 0 : kWidth<T> - 1), kWidth<T>);
}

template <typename Team>
Launch over(int64_t rows, int threads, Stream stream) {
  const int64_t blocks = divide_up(rows, static_cast<int64_t>(Team::kRows));
  if (blocks > INT32_MAX) throw std::runtime_error("a softmax of " + std::to_string(rows) + " rows");
  return {static_cast<unsigned>(blocks), static_cast<unsigned>(threads), stream};
}

// Threads of a block for a row of so many vectors.
template <typename T>
int threads_for(int vectors) {
  return divide_up(divide_up(vectors, kHeld<T>), kWarpSize) * kWarpSize;
}

using Short = WarpTeam<kShortTeam>;
using Warp = WarpTeam<kWarpSize>;

template <typename T, bool kMasked>
void launch_forward(const Forward<T>& p, Stream stream) {
  const int64_t rows = p.shape.rows;
  const int vectors = most_vectors(p.shape.keys, p.scores, p.probabilities);
  if (vectors <= kShortTeam) {
    launch<forward_once<T, Short, 1, kMasked>>(over<Short>(rows, Short::kThreads, stream), p);
  } else if (vectors <= kWarpSize * kHeld<T>) {
    launch<forward_once<T, Warp, kHeld<T>, kMasked>>(over<Warp>(rows, Warp::kThreads, stream), p);
  } else if (vectors <= BlockTeam::kThreads * kHeld<T>) {
    launch<forward_once<T, BlockTeam, kHeld<T>, kMasked>>(over<BlockTeam>(rows, threads_for<T>(vectors), stream), p);
  } else {
    launch<forward_twice<T, kMasked>>(over<BlockTeam>(rows, BlockTeam::kThreads, stream), p);
  }
}

template <typename T>
void launch_backward(const Backward<T>& p, Stream stream) {
  const int64_t rows = p.shape.rows;
  const int vectors = most_vectors(p.shape.keys, p.grad, p.probabilities, p.grad_scores);
  if (vectors <= kShortTeam) {
    launch<backward_once<T, Short, 1>>(over<Short>(rows, Short::kThreads, stream), p);
  } else if (vectors <= kWarpSize * kHeld<T>) {
    launch<backward_once<T, Warp, kHeld<T>>>(over<Warp>(rows, Warp::kThreads, stream), p);
  } else if (vectors <= BlockTeam::kThreads * kHeld<T>) {
    launch<backward_once<T, BlockTeam, kHeld<T>>>(over<BlockTeam>(rows, threads_for<T>(vectors), stream), p);
  } else {
    launch<backward_twice<T>>(over<BlockTeam>(rows, BlockTeam::kThreads, stream), p);
  }
}

}  // namespace

template <typename T>
void softmax_forward(const T* scores, T* probabilities, const Scores& shape, const Sight& sight, float scale,
                     Stream stream) {
  if (shape.rows == 0 || shape.keys == 0) return;
  const float sign = scale < 0 ? -1.0f : 1.0f;
  // By a scale of 0, what is not seen would be 0 * infinity. This one makes scores as much alike.
  constexpr float kLeast = std::numeric_limits<float>::min();
  const float exponent_scale = std::max(sign * scale * static_cast<float>(M_LOG2E), kLeast);
  const Forward<T> p{scores, probabilities, shape, sight, sign, exponent_scale};
  sight.visible != nullptr ? launch_forward<T, true>(p, stream) : launch_forward<T, false>(p, stream);
}

template <typename T>
void softmax_backward(const T* grad, const T* probabilities, T* grad_scores, const Scores& shape, const Sight& sight,
                      float scale, Stream stream) {
  if (shape.rows == 0 || shape.keys == 0) return;
  launch_backward<T>({grad, probabilities, grad_scores, shape, sight, scale}, stream);
}

#define INSTANTIATE(T)                                                                                \
  template void softmax_forward<T>(const T*, T*, const Scores&, const Sight&, float, Stream);         \
  template void softmax_backward<T>(const T*, const T*, T*, const Scores&, const Sight&, float, Stream);
INSTANTIATE(float)
INSTANTIATE(Half)
INSTANTIATE(BFloat16)

}  // namespace megatronish
