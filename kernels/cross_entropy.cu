// How likely is each label, by this rank's part of the vocabulary? Statistics of a cross entropy, and its gradient.
//
// A warp has a short row, a block a longer one, of any length; each thread has sixteen elements on their way at a time.
// For the statistics a row is read once: the maximum and the sum are found together, the sum corrected whenever the
// maximum grows (Milakov & Gimelshein 2018, arXiv:1805.02867). The gradient is written where its logit was read.
// Arithmetic is fp32. What padding holds is not read.
#include "cross_entropy.h"

#include <cmath>

#include "platform.h"
#include "rows.h"
#include "teams.h"

namespace megatronish {
namespace {

constexpr float kLog2E = static_cast<float>(M_LOG2E);  // exp(x) = exp2(kLog2E * x)
constexpr int kElements = 16;      // of a row, on their way to a thread
constexpr int kMostThreads = 512;  // of a block: with more, more of them idle at the end of a row

template <typename T>
constexpr int kTogether = kElements / kWidth<T>;  // vectors

// The threads of a block, where it has one row.
struct RowBlock : BlockTeam {
  static constexpr int kThreads = kMostThreads;
};

template <typename T>
struct Statistics {
  const T* logits;
  const int64_t* labels;
  float *maximum, *total, *target;
  Logits shape;
};

template <typename T>
struct Gradient {
  T* logits;
  const int64_t* labels;
  const float *maximum, *factor, *grad;
  Logits shape;
};

// The exponentials of a row without a true column are those of -infinity, not of -infinity + infinity.
__device__ __forceinline__ float finite(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

// Of a label among the true columns; -1 where it is not.
__device__ __forceinline__ int column_of(int64_t label, const Logits& shape) {
  const int64_t column = label - shape.first;
  return column >= 0 && column < shape.num_true ? static_cast<int>(column) : -1;
}

template <typename T, typename Team>
__global__ void __launch_bounds__(Team::kThreads) statistics_of_row(const Statistics<T> p) {
  const int64_t row = Team::row();
  const bool exists = row < p.shape.rows;
  const T* logits = p.logits + row * p.shape.columns;
  const Cut<T> cut(exists ? p.shape.num_true : 0, logits);
  const int num_vectors = cut.num_vectors();
  float maximum = -INFINITY, total = 0.0f;
  for (int first = Team::rank(); first < num_vectors; first += kTogether<T> * Team::size()) {
    float values[kTogether<T>][kWidth<T>];
#pragma unroll
    for (int v = 0; v < kTogether<T>; ++v) {
      cut.load(values[v], logits, first + v * Team::size(), 0, cut.length, -INFINITY);
    }
    float greater = maximum;
#pragma unroll
    for (int v = 0; v < kTogether<T>; ++v) {
#pragma unroll
      for (float value : values[v]) greater = fmaxf(greater, value);
    }
    total *= exp2f((maximum - finite(greater)) * kLog2E);
#pragma unroll
    for (int v = 0; v < kTogether<T>; ++v) {
#pragma unroll
      for (float value : values[v]) total += exp2f((value - finite(greater)) * kLog2E);
    }
    maximum = greater;
  }
  const float greatest = Team::template reduce<Maximum, 0>(maximum);
  total = Team::template reduce<Sum, 1>(total * exp2f((maximum - finite(greatest)) * kLog2E));
  if (exists && Team::rank() == 0) {
    const int label = column_of(p.labels[row], p.shape);
    p.maximum[row] = greatest;
    p.total[row] = total;
    p.target[row] = label < 0 ? 0.0f : static_cast<float>(logits[label]);
  }
}

template <typename T, typename Team>
__global__ void __launch_bounds__(Team::kThreads) gradient_of_row(const Gradient<T> p) {
  const int64_t row = Team::row();
  if (row >= p.shape.rows) return;
  T* logits = p.logits + row * p.shape.columns;
  const Cut<T> cut(p.shape.columns, logits);
  const int num_vectors = cut.num_vectors();
  const int label = column_of(p.labels[row], p.shape);
  const float maximum = finite(p.maximum[row]), factor = p.factor[row], grad = p.grad[row];
  for (int first = Team::rank(); first < num_vectors; first += kTogether<T> * Team::size()) {
    float values[kTogether<T>][kWidth<T>];
#pragma unroll
    for (int v = 0; v < kTogether<T>; ++v) {
      cut.load(values[v], logits, first + v * Team::size(), 0, p.shape.num_true, -INFINITY);
    }
#pragma unroll
    for (int v = 0; v < kTogether<T>; ++v) {
      const int vector = first + v * Team::size();
      const int at = cut.begin(vector);
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        const float probability = exp2f((values[v][i] - maximum) * kLog2E) * factor;
        values[v][i] = probability - (at + i == label ? grad : 0.0f);
      }
      if (vector < num_vectors) cut.store(values[v], logits, vector);
    }
  }
}

template <typename Team>
Launch over(int64_t rows, int threads, Stream stream) {
  const int64_t blocks = divide_up(rows, static_cast<int64_t>(Team::kRows));
  if (blocks > INT32_MAX) throw std::runtime_error("a cross entropy of " + std::to_string(rows) + " rows");
  return {static_cast<unsigned>(blocks), static_cast<unsigned>(threads), stream};
}

using Warp = WarpTeam<kWarpSize>;

// Threads of a row that give each of them what it has on its way at a time: up to a warp, or up to a block.
template <typename T>
int threads_for(int columns) {
  const int vectors = divide_up(columns + kWidth<T> - 1, kWidth<T>);  // that a row is cut into, at most
  const int warps = divide_up(divide_up(vectors, kTogether<T>), kWarpSize);
  return warps * kWarpSize < kMostThreads ? warps * kWarpSize : kMostThreads;
}

}  // namespace

template <typename T>
void cross_entropy_statistics(const T* logits, const int64_t* labels, float* maximum, float* total, float* target,
                              const Logits& shape, Stream stream) {
  if (shape.rows == 0) return;
  const Statistics<T> p{logits, labels, maximum, total, target, shape};
  const int threads = threads_for<T>(shape.columns);
  if (threads <= kWarpSize) {
    launch<statistics_of_row<T, Warp>>(over<Warp>(shape.rows, Warp::kThreads, stream), p);
  } else {
    launch<statistics_of_row<T, RowBlock>>(over<RowBlock>(shape.rows, threads, stream), p);
  }
}

template <typename T>
void cross_entropy_gradient(T* logits, const int64_t* labels, const float* maximum, const float* factor,
                            const float* grad, const Logits& shape, Stream stream) {
  if (shape.rows == 0) return;
  const Gradient<T> p{logits, labels, maximum, factor, grad, shape};
  const int threads = threads_for<T>(shape.columns);
  if (threads <= kWarpSize) {
    launch<gradient_of_row<T, Warp>>(over<Warp>(shape.rows, Warp::kThreads, stream), p);
  } else {
    launch<gradient_of_row<T, RowBlock>>(over<RowBlock>(shape.rows, threads, stream), p);
  }
}

#define INSTANTIATE(T)                                                                                                \
  template void cross_entropy_statistics<T>(const T*, const int64_t*, float*, float*, float*, const Logits&, Stream); \
  template void cross_entropy_gradient<T>(T*, const int64_t*, const float*, const float*, const float*,               \
                                          const Logits&, Stream);
INSTANTIATE(float)
INSTANTIATE(Half)
INSTANTIATE(BFloat16)

}  // namespace megatronish
