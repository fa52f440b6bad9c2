// What is left of a row without its mean and its scale? LayerNorm and RMSNorm, forward and backward.
//
// Every row is read once and written once: the threads of its team hold it in registers, sixteen elements each. Longer
// rows are read again by the same block, and so from its caches: forward beyond 16,384 elements, backward beyond 8,192.
// Backward, a block has sums of 16,384 columns at most (of two kinds, 12,288), so the longest rows are read again by
// another kernel, and from memory. Statistics are fp32; the variance is that of the differences to the mean, so a mean
// that is large beside it does no harm.
//
// Rows are cut at multiples of their own elements, not of memory's: backward, a thread keeps its columns for all rows
// that its team goes through, and adds up in registers what they give to the gradients of weight and bias. A second
// kernel adds these parts (columns.h). There are no atomics, and the bits are the same every time.
#include "norm.h"

#include <algorithm>

#include "columns.h"
#include "norm_rows.h"
#include "platform.h"
#include "rows.h"
#include "teams.h"

namespace megatronish {
namespace {

constexpr int kElements = 16;          // of a row, in a thread's registers
constexpr int kShortTeam = 8;          // lanes
constexpr int kBackwardThreads = 512;  // of a block, at most: the sums of columns take registers
constexpr int kColumnThreads = 256;    // of a block of gradients_of_columns

template <typename T>
constexpr int kHeld = kElements / kWidth<T>;  // vectors

using Short = WarpTeam<kShortTeam>;
using Warp = WarpTeam<kWarpSize>;

template <typename T, typename Team, bool kCentred>
__global__ void __launch_bounds__(Team::kThreads) normalise_once(const With<NormForward<T>> p) {
  const ForwardRow<T, kCentred> row(p, Team::row());
  Words x[kHeld<T>], residual[kHeld<T>];
  load_all<Team, kHeld<T>>(p.aligned, [&](auto aligned, int v, int vector) {
    row.template load<decltype(aligned)::value>(x[v], residual[v], vector);
  });
  float values[kHeld<T>][kWidth<T>];
#pragma unroll
  for (int v = 0; v < kHeld<T>; ++v) row.add(values[v], x[v], residual[v], Team::rank() + v * Team::size());
  float mean = 0.0f, squares = 0.0f;
  if (kCentred) {
#pragma unroll
    for (int v = 0; v < kHeld<T>; ++v) mean += sum_of(values[v]);
    mean = Team::template reduce<Sum, 0>(mean) / p.size;
  }
#pragma unroll
  for (int v = 0; v < kHeld<T>; ++v) {
    row.subtract(values[v], mean, Team::rank() + v * Team::size());
    squares += squares_of(values[v]);
  }
  const float rstd = row.rstd_of(Team::template reduce<Sum, 1>(squares));
  if (Team::rank() == 0) row.store_statistics(mean, rstd);
#pragma unroll
  for (int v = 0; v < kHeld<T>; ++v) row.store(values[v], rstd, Team::rank() + v * Team::size());
}

template <typename T, bool kCentred>
__global__ void __launch_bounds__(BlockTeam::kThreads) normalise_again(const With<NormForward<T>> p) {
  const ForwardRow<T, kCentred> row(p, BlockTeam::row());
  const int num_vectors = divide_up(row.length, kWidth<T>);
  float values[kWidth<T>];
  float mean = 0.0f, squares = 0.0f;
  for (int vector = BlockTeam::rank(); vector < num_vectors; vector += BlockTeam::size()) {
    row.take(values, vector);
    kCentred ? mean += sum_of(values) : squares += squares_of(values);
  }
  if (kCentred) {
    mean = BlockTeam::reduce<Sum, 0>(mean) / p.size;
    for (int vector = BlockTeam::rank(); vector < num_vectors; vector += BlockTeam::size()) {
      row.take_again(values, vector);
      row.subtract(values, mean, vector);
      squares += squares_of(values);
    }
  }
  const float rstd = row.rstd_of(BlockTeam::reduce<Sum, 1>(squares));
  if (BlockTeam::rank() == 0) row.store_statistics(mean, rstd);
  for (int vector = BlockTeam::rank(); vector < num_vectors; vector += BlockTeam::size()) {
    row.take_again(values, vector);
    row.subtract(values, mean, vector);
    row.store(values, rstd, vector);
  }
}

// A block leaves a part, or each of its warps one, if warps have rows of their own.
template <typename Team>
constexpr int kParts = Team::kRows > 1 ? Team::kThreads / kWarpSize : 1;

template <typename T, typename Team, bool kCentred>
__global__ void __launch_bounds__(std::min(Team::kThreads, kBackwardThreads)) gradients_once(
    const With<NormBackward<T>> p) {
  constexpr bool kSumLater = std::is_same_v<T, float>;  // all at once would take too many registers
  ColumnSums<T, kKinds<kCentred>, kHeld<T>> columns;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * Team::kRows;
  int turn = 0;
  // `first` is the same for all of a block, and so is how often they reduce.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * Team::kRows; first < p.rows; first += stride, turn ^= 1) {
    const BackwardRow<T, kCentred> row(p, first + Team::row() % Team::kRows);
    Words grad[kHeld<T>], x[kHeld<T>], grad_sum[kHeld<T>];
    load_all<Team, kHeld<T>>(p.aligned, [&](auto aligned, int v, int vector) {
      row.template load<decltype(aligned)::value>(grad[v], x[v], vector);
      if (!kSumLater) row.template load<decltype(aligned)::value>(grad_sum[v], vector);
    });
    float h[kHeld<T>][kWidth<T>], n[kHeld<T>][kWidth<T>], means[kKinds<kCentred>] = {};
#pragma unroll
    for (int v = 0; v < kHeld<T>; ++v) {
      row.take(h[v], n[v], grad[v], x[v]);
      add_over_columns<T, kCentred>(columns, v, h[v], n[v]);
      row.weigh(h[v], Team::rank() + v * Team::size());
      add_over_row<kCentred>(means, h[v], n[v]);
    }
    load_all<Team, kSumLater ? kHeld<T> : 0>(p.aligned, [&](auto aligned, int v, int vector) {
      row.template load<decltype(aligned)::value>(grad_sum[v], vector);
    });
    Team::template reduce_by_turns<Sum>(means, turn);
#pragma unroll
    for (float& mean : means) mean /= p.size;
#pragma unroll
    for (int v = 0; v < kHeld<T>; ++v) row.store(h[v], n[v], means, grad_sum[v], Team::rank() + v * Team::size());
  }
  constexpr int kLanes = Team::kRows > 1 ? Team::kThreads / Team::kRows : kWarpSize;
  columns.template join_teams<kLanes>();
  if (threadIdx.x % kWarpSize >= kLanes) return;
  const int64_t part = blockIdx.x * kParts<Team> + (kParts<Team> > 1 ? threadIdx.x / kWarpSize : 0);
  columns.template store<Team>(p.scratch + part * kKinds<kCentred> * p.size, p.size);
}

// A row that no block holds: its numbers come a second time from the caches, so registers are left for the sums of more
// columns.
template <bool kCentred>
constexpr int kSummed = kCentred ? 24 : 32;  // columns of a thread

template <typename T, bool kCentred>
__global__ void __launch_bounds__(kBackwardThreads) gradients_again(const With<NormBackward<T>> p) {
  constexpr int kVectors = kSummed<kCentred> / kWidth<T>;
  constexpr int kTogether = sizeof(T) == 2 ? kVectors : kCentred ? 1 : 2;  // on their way: what registers are left for
  ColumnSums<T, kKinds<kCentred>, kVectors> columns;
  int turn = 0;
  for (int64_t number = blockIdx.x; number < p.rows; number += gridDim.x, turn ^= 1) {
    const BackwardRow<T, kCentred> row(p, number);
    float h[kWidth<T>], n[kWidth<T>], means[kKinds<kCentred>] = {};
#pragma unroll
    for (int first = 0; first < kVectors; first += kTogether) {
      Words grad[kTogether], x[kTogether];
      const auto vector_of = [&](int v) { return BlockTeam::rank() + (first + v) * BlockTeam::size(); };
#pragma unroll
      for (int v = 0; v < kTogether; ++v) row.load_one(vector_of(v), grad[v], x[v]);
#pragma unroll
      for (int v = 0; v < kTogether; ++v) {
        row.take(h, n, grad[v], x[v]);
        row.weigh(h, vector_of(v));
        add_over_row<kCentred>(means, h, n);
      }
    }
    BlockTeam::reduce_by_turns<Sum>(means, turn);
#pragma unroll
    for (float& mean : means) mean /= p.size;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int vector = BlockTeam::rank() + v * BlockTeam::size();
      Words grad, x, grad_sum;
      row.load_one(vector, grad, x);
      row.load_one(vector, grad_sum);
      row.take(h, n, grad, x);
      add_over_columns<T, kCentred>(columns, v, h, n);
      row.weigh(h, vector);
      row.store(h, n, means, grad_sum, vector);
    }
  }
  columns.template store<BlockTeam>(p.scratch + blockIdx.x * int64_t{kKinds<kCentred>} * p.size, p.size);
}

// For rows longer still: first mean(h * n) and mean(h) of each ...
template <typename T, bool kCentred>
__global__ void __launch_bounds__(BlockTeam::kThreads) means_of_rows(const With<NormBackward<T>> p, float* row_means) {
  const BackwardRow<T, kCentred> row(p, BlockTeam::row());
  const int num_vectors = divide_up(row.length, kWidth<T>);
  float h[kWidth<T>], n[kWidth<T>], means[kKinds<kCentred>] = {};
  for (int vector = BlockTeam::rank(); vector < num_vectors; vector += BlockTeam::size()) {
    Words grad, x;
    row.load_one(vector, grad, x);
    row.take(h, n, grad, x);
    row.weigh(h, vector);
    add_over_row<kCentred>(means, h, n);
  }
  BlockTeam::reduce_by_turns<Sum>(means, 0);
  if (BlockTeam::rank() > 0) return;
#pragma unroll
  for (int kind = 0; kind < kKinds<kCentred>; ++kind) {
    row_means[BlockTeam::row() * kKinds<kCentred> + kind] = means[kind] / p.size;
  }
}

// ... then a vector of columns for each thread, through every gridDim.y-th row.
template <typename T, bool kCentred>
__global__ void __launch_bounds__(kColumnThreads) gradients_of_columns(const With<NormBackward<T>> p,
                                                                       const float* row_means) {
  const int vector = static_cast<int>(blockIdx.x) * kColumnThreads + static_cast<int>(threadIdx.x);
  if (vector * kWidth<T> >= p.size) return;
  ColumnSums<T, kKinds<kCentred>, 1> columns;
  for (int64_t number = blockIdx.y; number < p.rows; number += gridDim.y) {
    const BackwardRow<T, kCentred> row(p, number);
    float h[kWidth<T>], n[kWidth<T>], means[kKinds<kCentred>];
    Words grad, x, grad_sum;
    row.load_one(vector, grad, x);
    row.load_one(vector, grad_sum);
    row.take(h, n, grad, x);
    add_over_columns<T, kCentred>(columns, 0, h, n);
    row.weigh(h, vector);
#pragma unroll
    for (int kind = 0; kind < kKinds<kCentred>; ++kind) means[kind] = row_means[number * kKinds<kCentred> + kind];
    row.store(h, n, means, grad_sum, vector);
  }
  columns.store_vector(p.scratch + static_cast<int64_t>(blockIdx.y) * kKinds<kCentred> * p.size, 0, vector, p.size);
}

template <typename T, typename... Tensors>
bool vectors_are_aligned(int size, Tensors*... tensors) {
  return size % kWidth<T> == 0 && ((reinterpret_cast<uintptr_t>(tensors) % kVectorBytes == 0) && ...);
}

unsigned grid_of(int64_t blocks) {
  if (blocks > INT32_MAX) throw std::runtime_error("a norm of " + std::to_string(blocks) + " blocks of rows");
  return static_cast<unsigned>(blocks);
}

template <typename Team>
unsigned blocks_for(int64_t rows) {
  return grid_of(divide_up(rows, static_cast<int64_t>(Team::kRows)));
}

// Of a block for a row of so many vectors, `held` of them in a thread.
unsigned threads_for(int vectors, int held) {
  return static_cast<unsigned>(divide_up(divide_up(vectors, held), kWarpSize) * kWarpSize);
}

template <typename T, bool kCentred>
void forward(const NormForward<T>& given, Stream stream) {
  const bool aligned = vectors_are_aligned<T>(given.size, given.x, given.residual, given.normalised, given.sum);
  const With<NormForward<T>> p{given, aligned};
  const int vectors = divide_up(p.size, kWidth<T>);
  if (vectors <= kShortTeam * kHeld<T>) {
    launch<normalise_once<T, Short, kCentred>>({blocks_for<Short>(p.rows), Short::kThreads, stream}, p);
  } else if (vectors <= kWarpSize * kHeld<T>) {
    launch<normalise_once<T, Warp, kCentred>>({blocks_for<Warp>(p.rows), Warp::kThreads, stream}, p);
  } else if (vectors <= BlockTeam::kThreads * kHeld<T>) {
    const unsigned threads = threads_for(vectors, kHeld<T>);
    launch<normalise_once<T, BlockTeam, kCentred>>({blocks_for<BlockTeam>(p.rows), threads, stream}, p);
  } else {
    launch<normalise_again<T, kCentred>>({blocks_for<BlockTeam>(p.rows), BlockTeam::kThreads, stream}, p);
  }
}

// How many blocks go through the rows, and how many parts they leave.
template <typename T>
struct Plan {
  int vectors, summed;  // of a row; of those, in a thread of gradients_again
  int64_t blocks, parts;
  unsigned threads, slices = 1;  // that a row is cut into, each for a block

  Plan(int64_t rows, int size, bool has_mean)
      : vectors(divide_up(size, kWidth<T>)), summed((has_mean ? kSummed<true> : kSummed<false>) / kWidth<T>) {
    int64_t rows_of_block = 1, parts_of_block = 1, resident_threads = 512;  // of a multiprocessor: registers are few
    if (is_cut()) {
      threads = kColumnThreads, resident_threads = 1024;
      slices = static_cast<unsigned>(divide_up(vectors, kColumnThreads));
    } else if (is_of_block()) {
      threads = threads_for(vectors, is_read_again() ? summed : kHeld<T>);
    } else {
      threads = Warp::kThreads;
      rows_of_block = is_short() ? Short::kRows : Warp::kRows;
      parts_of_block = kParts<Warp>;
    }
    const int64_t most = std::max<int64_t>(num_multiprocessors() * (resident_threads / threads) / slices, 1);
    blocks = std::min(divide_up(rows, rows_of_block), most);
    parts = blocks * parts_of_block;
  }

  bool is_short() const { return vectors <= kShortTeam * kHeld<T>; }
  bool is_of_block() const { return vectors > kWarpSize * kHeld<T>; }
  bool is_read_again() const { return vectors > kBackwardThreads * kHeld<T>; }
  bool is_cut() const { return vectors > kBackwardThreads * summed; }
};

template <typename T, bool kCentred>
void leave_parts(const NormBackward<T>& given, const Plan<T>& plan, Stream stream) {
  const bool aligned = vectors_are_aligned<T>(given.size, given.grad, given.grad_sum, given.x, given.grad_x);
  const With<NormBackward<T>> p{given, aligned};
  const Launch how(static_cast<unsigned>(plan.blocks), plan.threads, stream);
  if (plan.is_short()) {
    launch<gradients_once<T, Short, kCentred>>(how, p);
  } else if (!plan.is_of_block()) {
    launch<gradients_once<T, Warp, kCentred>>(how, p);
  } else if (!plan.is_read_again()) {
    launch<gradients_once<T, BlockTeam, kCentred>>(how, p);
  } else if (!plan.is_cut()) {
    launch<gradients_again<T, kCentred>>(how, p);
  } else {
    float* means = p.scratch + plan.parts * kKinds<kCentred> * p.size;
    launch<means_of_rows<T, kCentred>>({blocks_for<BlockTeam>(p.rows), BlockTeam::kThreads, stream}, p, means);
    const dim3 grid(plan.slices, static_cast<unsigned>(plan.blocks));
    launch<gradients_of_columns<T, kCentred>>({grid, kColumnThreads, stream}, p, static_cast<const float*>(means));
  }
}

template <typename T, bool kCentred>
void backward(const NormBackward<T>& p, Stream stream) {
  const Plan<T> plan(p.rows, p.size, kCentred);
  if (p.rows > 0) leave_parts<T, kCentred>(p, plan, stream);
  const ColumnGradient weight{p.grad_weight, p.weight.is_float}, bias{p.grad_bias, p.weight.is_float};
  launch_sum_parts<T>({p.scratch, plan.parts, p.size, kKinds<kCentred>, weight, bias}, stream);
}

}  // namespace

template <typename T>
void norm_forward(const NormForward<T>& p, Stream stream) {
  if (p.rows == 0) return;
  p.has_mean ? forward<T, true>(p, stream) : forward<T, false>(p, stream);
}

template <typename T>
void norm_backward(const NormBackward<T>& p, Stream stream) {
  p.has_mean ? backward<T, true>(p, stream) : backward<T, false>(p, stream);
}

template <typename T>
int64_t norm_scratch(int64_t rows, int size, bool has_mean) {
  const Plan<T> plan(rows, size, has_mean);
  const int kinds = has_mean ? kKinds<true> : kKinds<false>;
  return (plan.parts * size + (plan.is_cut() ? rows : 0)) * kinds;
}

#define INSTANTIATE(T)                                                \
  template void norm_forward<T>(const NormForward<T>&, Stream);       \
  template void norm_backward<T>(const NormBackward<T>&, Stream);     \
  template int64_t norm_scratch<T>(int64_t rows, int size, bool has_mean);
INSTANTIATE(float)
INSTANTIATE(Half)
INSTANTIATE(BFloat16)

}  // namespace megatronish
