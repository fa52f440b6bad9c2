// How likely is each label, by this rank's part of the vocabulary? Statistics of a cross entropy, and its gradient.
//
// A warp has a short row, a block a longer one, of any length; each thread has four vectors on their way at a time. For
// the statistics a row is read once: the maximum and the sum are found together, the sum corrected whenever the maximum
// grows (Milakov & Gimelshein 2018, arXiv:1805.02867). The gradient is written where its logit was read. Arithmetic is
// fp32. What padding holds is not read.
#include "cross_entropy.h"

#include <cmath>

#include "platform.h"
#include "rows.h"
#include "teams.h"

namespace megatronish {
namespace {

constexpr float kLog2E = static_cast<float>(M_LOG2E);  // exp(x) = exp2(kLog2E * x)
constexpr int kTogether = 4;                           // vectors of a row, on their way to a thread
constexpr int kMostThreads = 512;                      // of a block: of more, more idle at the end of a row

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

// A row as memory has it: single elements up to a 16-byte boundary, whole vectors, and single elements again. There are
// fewer singles than lanes in a warp, so each is a thread's own. Vectors are then read without a branch, and all loads
// of a turn are on their way before the first has arrived.
template <typename T>
struct Pieces {
  int head, tail;  // single elements
  int num_vectors;

  __device__ __forceinline__ Pieces(const T* row, int length) {
    const int before_boundary = (kWidth<T> - shift_of(row)) % kWidth<T>;
    head = length < before_boundary ? length : before_boundary;
    num_vectors = (length - head) / kWidth<T>;
    tail = (length - head) % kWidth<T>;
  }

  // The element that is this thread's own; -1 for none.
  __device__ __forceinline__ int single(int rank) const {
    if (rank < head) return rank;
    return rank < head + tail ? rank + num_vectors * kWidth<T> : -1;
  }

  // turn(vectors, first): of the vectors rank, rank + size, ... as many as there are up to kTogether at a time, each
  // size * kWidth elements after the one before it; `first` is the element that they begin with.
  template <typename Turn>
  __device__ __forceinline__ void for_vectors(const T* row, int rank, int size, Turn turn) const {
    int vector = rank;
    for (; vector + (kTogether - 1) * size < num_vectors; vector += kTogether * size) {
      take<kTogether>(row, vector, size, turn);
    }
    for (; vector < num_vectors; vector += size) take<1>(row, vector, size, turn);
  }

 private:
  template <int kVectors, typename Turn>
  __device__ __forceinline__ void take(const T* row, int vector, int size, Turn turn) const {
    const int first = head + vector * kWidth<T>;
    RowVector<T> x[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      x[v] = *reinterpret_cast<const RowVector<T>*>(row + first + v * size * kWidth<T>);
    }
    turn(x, first);
  }
};

// Of the elements so far: their maximum, and the sum of exponentials relative to it.
struct Online {
  float maximum = -INFINITY, total = 0.0f;

  template <typename T, int kColumns, int kVectors>
  __device__ __forceinline__ void take(const Vector<T, kColumns> (&vectors)[kVectors]) {
    float greater = maximum;
#pragma unroll
    for (const auto& vector : vectors) {
#pragma unroll
      for (T x : vector.element) greater = fmaxf(greater, static_cast<float>(x));
    }
    total *= exp2f((maximum - finite(greater)) * kLog2E);
#pragma unroll
    for (const auto& vector : vectors) {
#pragma unroll
      for (T x : vector.element) total += exp2f((static_cast<float>(x) - finite(greater)) * kLog2E);
    }
    maximum = greater;
  }
};

template <typename T, typename Team>
__global__ void __launch_bounds__(Team::kThreads) statistics_of_row(const Statistics<T> p) {
  const int64_t row = Team::row();
  const bool exists = row < p.shape.rows;
  const T* logits = p.logits + row * p.shape.columns;
  const Pieces<T> pieces(logits, exists ? p.shape.num_true : 0);
  Online online;
  if (const int own = pieces.single(Team::rank()); own >= 0) {
    online.maximum = static_cast<float>(logits[own]);
    online.total = exp2f(online.maximum - finite(online.maximum));  // 1, of numbers
  }
  pieces.for_vectors(logits, Team::rank(), Team::size(), [&](auto& x, int) { online.take(x); });
  const float maximum = Team::template reduce<Maximum, 0>(online.maximum);
  const float correction = exp2f((online.maximum - finite(maximum)) * kLog2E);
  const float total = Team::template reduce<Sum, 1>(online.total * correction);
  if (exists && Team::rank() == 0) {
    const int label = column_of(p.labels[row], p.shape);
    p.maximum[row] = maximum;
    p.total[row] = total;
    p.target[row] = label < 0 ? 0.0f : static_cast<float>(logits[label]);
  }
}

template <typename T, typename Team>
__global__ void __launch_bounds__(Team::kThreads) gradient_of_row(const Gradient<T> p) {
  const int64_t row = Team::row();
  if (row >= p.shape.rows) return;
  T* logits = p.logits + row * p.shape.columns;
  const Pieces<T> pieces(logits, p.shape.num_true);
  const int label = column_of(p.labels[row], p.shape);
  const float maximum = finite(p.maximum[row]), factor = p.factor[row], grad = p.grad[row];
  const auto gradient = [&](T x) { return exp2f((static_cast<float>(x) - maximum) * kLog2E) * factor; };
  const T zero = static_cast<T>(0.0f);
  if (const int own = pieces.single(Team::rank()); own >= 0) {
    logits[own] = static_cast<T>(gradient(logits[own]) - (own == label ? grad : 0.0f));
  }
  pieces.for_vectors(logits, Team::rank(), Team::size(), [&](auto& x, int first) {
#pragma unroll
    for (auto& vector : x) {
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        vector.element[i] = static_cast<T>(gradient(vector.element[i]) - (first + i == label ? grad : 0.0f));
      }
      store_at_once(logits + first, vector);
      first += Team::size() * kWidth<T>;
    }
  });
  for (int c = p.shape.num_true + Team::rank(); c < p.shape.columns; c += Team::size()) logits[c] = zero;
}

template <typename Team>
Launch over(int64_t rows, int threads, Stream stream) {
  const int64_t blocks = divide_up(rows, static_cast<int64_t>(Team::kRows));
  if (blocks > INT32_MAX) throw std::runtime_error("a cross entropy of " + std::to_string(rows) + " rows");
  return {static_cast<unsigned>(blocks), static_cast<unsigned>(threads), stream};
}

using Warp = WarpTeam<kWarpSize>;

// So many threads that a row is one turn of each, up to a block.
template <typename T>
int threads_for(int columns) {
  const int warps = divide_up(divide_up(columns, kWidth<T>), kTogether * kWarpSize);
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
