// Attention in a sliding window on the CPU, in blocks of queries whose scores never leave the cache (windowed.py).
//
// Built by native.py where it is first needed, and called through ctypes: plain C++, without a header of torch. A block
// of queries [b, H] sees the keys of its own places and those of one window before it. All products of a block are made
// of one small one, `tile`: some rows by some vectors of columns, with the sums in registers. What no query of a tile
// sees is not computed. Sums are in the order of blocks and keys: equal inputs give equal bits.
//
// Keys and values of a head are copied once, so that a tile reads what lies together: rows [S, H], and "panels"
// [S / 16, H, 16], whose columns are 16 keys next to each other. Zeros fill S and H up to multiples of 16.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "floats.h"

namespace {

constexpr int64_t kPanel = 16;   // keys of a panel
constexpr int64_t kRows = 6;     // rows of a tile: with 16 columns their sums just fill the registers of AVX2
constexpr int64_t kBlock = 48;   // queries of a block
constexpr int64_t kChunk = 64;   // keys whose values stay in the first cache

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kVectors = kPanel / kLanes;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

inline void store(Lanes lanes, float* to) { std::memcpy(to, &lanes, sizeof(lanes)); }

// A factor of a product: element (row, column) is at data[row * by_row + column * by_column].
struct Factor {
  const float* data;
  int64_t by_row, by_column;
};

// sums[R, 16] (+)= a[R, depth] b[depth, 16], where a row of b is `by_row` further, and one of the sums `width`.
template <int R>
void tile(Factor a, const float* b, int64_t by_row, int64_t depth, float* sums, int64_t width, bool adds) {
  Lanes sum[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) sum[r][v] = adds ? load(sums + r * width + v * kLanes) : Lanes{};
  for (int64_t k = 0; k < depth; ++k) {
    Lanes row[kVectors];
    for (int v = 0; v < kVectors; ++v) row[v] = load(b + k * by_row + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const float factor = a.data[r * a.by_row + k * a.by_column];
      for (int v = 0; v < kVectors; ++v) sum[r][v] += factor * row[v];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) store(sum[r][v], sums + r * width + v * kLanes);
}

void tile_of(int64_t rows, Factor a, const float* b, int64_t by_row, int64_t depth, float* sums, int64_t width,
             bool adds) {
  switch (rows) {
    case 1: return tile<1>(a, b, by_row, depth, sums, width, adds);
    case 2: return tile<2>(a, b, by_row, depth, sums, width, adds);
    case 3: return tile<3>(a, b, by_row, depth, sums, width, adds);
    case 4: return tile<4>(a, b, by_row, depth, sums, width, adds);
    case 5: return tile<5>(a, b, by_row, depth, sums, width, adds);
    default: return tile<6>(a, b, by_row, depth, sums, width, adds);
  }
}

// A block of queries [begin, end), and the keys [first, last) that it sees, from a panel's begin to a panel's end.
struct Block {
  int64_t begin, end, first, last, window, size;

  int64_t rows() const { return end - begin; }
  int64_t width() const { return last - first; }
  // Keys that the query at this row sees, counted from `first`.
  int64_t from(int64_t row) const { return std::max<int64_t>(0, begin + row - window + 1) - first; }
  int64_t to(int64_t row) const { return begin + row + 1 - first; }

  // out[rows, width] = x[rows, H] times panels: of each tile only the panels that its rows see.
  void scores(const float* x, const float* panels, float* out) const {
    for (int64_t key = 0; key < width(); key += kPanel)
      for (int64_t row = 0; row < rows(); row += kRows) {
        const int64_t count = std::min(kRows, rows() - row);
        if (key >= to(row + count - 1) || key + kPanel <= from(row)) continue;
        tile_of(count, {x + row * size, size, 1}, panels + (first + key) * size, kPanel, size,
                out + row * width() + key, width(), false);
      }
  }

  // out[rows, H] = weights[rows, width] times values[S, H].
  void mix(const float* weights, const float* values, float* out) const {
    for (int64_t chunk = 0; chunk < width(); chunk += kChunk)
      for (int64_t column = 0; column < size; column += kPanel)
        for (int64_t row = 0; row < rows(); row += kRows) {
          const int64_t count = std::min(kRows, rows() - row), earliest = from(row);
          const int64_t key = std::max(chunk, earliest);
          const int64_t depth = std::min(chunk + kChunk, to(row + count - 1)) - key;
          if (depth <= 0) continue;
          tile_of(count, {weights + row * width() + key, width(), 1}, values + (first + key) * size + column, size,
                  depth, out + row * size + column, size, key > earliest);
        }
  }

  // sums[S, H] += transposed weights[rows, width] times x[rows, H].
  void spread(const float* weights, const float* x, float* sums) const {
    for (int64_t key = 0; key < width(); key += kRows) {
      const int64_t count = std::min(kRows, width() - key), last_key = first + key + count - 1;
      const int64_t row = std::max<int64_t>(0, first + key - begin);
      const int64_t depth = std::min(rows(), last_key + window - begin) - row;
      if (depth <= 0) continue;
      for (int64_t column = 0; column < size; column += kPanel)
        tile_of(count, {weights + row * width() + key, 1, width()}, x + row * size + column, size, depth,
                sums + (first + key) * size + column, size, true);
    }
  }

  // Hide what a row does not see.
  void hide(float* row_of_scores, int64_t row, float with) const {
    std::fill(row_of_scores, row_of_scores + from(row), with);
    std::fill(row_of_scores + to(row), row_of_scores + width(), with);
  }
};

Block block_at(int64_t begin, int64_t length, int64_t window, int64_t size) {
  const int64_t end = std::min(length, begin + kBlock);
  const int64_t first = std::max<int64_t>(0, begin - window + 1) / kPanel * kPanel;
  return {begin, end, first, (end + kPanel - 1) / kPanel * kPanel, window, size};
}

int64_t widest(int64_t window) { return (kBlock + window) / kPanel * kPanel + 2 * kPanel; }

float largest(const float* x, int64_t count) {  // of a multiple of 16
  float most[kPanel];
  std::copy(x, x + kPanel, most);
  for (int64_t n = kPanel; n < count; n += kPanel)
    for (int64_t lane = 0; lane < kPanel; ++lane) most[lane] = most[lane] < x[n + lane] ? x[n + lane] : most[lane];
  return *std::max_element(most, most + kPanel);
}

// x = exp(x - most); returns the sum.
float exponentials(float* x, int64_t count, float most) {
  float sums[kPanel] = {};
  for (int64_t n = 0; n < count; n += kPanel)
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      x[n + lane] = exponential(x[n + lane] - most);
      sums[lane] += x[n + lane];
    }
  float sum = 0.0f;
  for (float each : sums) sum += each;
  return sum;
}

int64_t filled(int64_t count) { return (count + kPanel - 1) / kPanel * kPanel; }

// The struct `_Heads` of windowed.py: a tensor [S, B, heads, H], whose last dim lies together.
struct Heads {
  void* data;
  int64_t by_place, by_sample, by_head;
};

// One head of one sample of such a tensor, [S, H].
template <typename T>
struct Head {
  T* data;
  int64_t by_place, size;

  Head(const Heads& all, int64_t sample, int64_t head, int64_t size)
      : data(static_cast<T*>(all.data) + sample * all.by_sample + head * all.by_head),
        by_place(all.by_place),
        size(size) {}

  // rows[end - begin, filled(H)] = the rows of these places, times a factor.
  void read(int64_t begin, int64_t end, float factor, float* rows) const {
    for (int64_t place = begin; place < end; ++place, rows += filled(size)) {
      for (int64_t n = 0; n < size; ++n) rows[n] = factor * wide(data[place * by_place + n]);
      std::fill(rows + size, rows + filled(size), 0.0f);
    }
  }

  // The inverse.
  void write(int64_t begin, int64_t end, float factor, const float* rows) const {
    for (int64_t place = begin; place < end; ++place, rows += filled(size))
      for (int64_t n = 0; n < size; ++n) narrow(factor * rows[n], data[place * by_place + n]);
  }
};

// Panels [S / 16, H, 16] of rows [S, H], both of whole panels.
void to_panels(const float* rows, int64_t length, int64_t size, float* panels) {
  for (int64_t first = 0; first < length; first += kPanel)
    for (int64_t n = 0; n < size; ++n)
      for (int64_t key = 0; key < kPanel; ++key)
        panels[first * size + n * kPanel + key] = rows[(first + key) * size + n];
}

// The struct `_Window` of windowed.py.
struct Window {
  int64_t samples, heads, kv_heads, length, size, window;
  float scale;
  int32_t threads;
};

// Queries, keys, values -> out, and lse [B, heads, S], the logarithm of the sum of exponentials of each query.
template <typename T>
void forward(const Window& w, const Heads* all, float* lse) {
  const int64_t length = filled(w.length), size = filled(w.size), shared = w.heads / w.kv_heads;
#pragma omp parallel for num_threads(w.threads) schedule(static)
  for (int64_t both = 0; both < w.samples * w.kv_heads; ++both) {
    const int64_t sample = both / w.kv_heads, kv_head = both % w.kv_heads;
    std::vector<float> values(length * size), panels(length * size), scores(kBlock * widest(w.window));
    std::vector<float> queries(kBlock * size), mixed(kBlock * size);
    Head<T>(all[1], sample, kv_head, w.size).read(0, w.length, 1.0f, values.data());
    to_panels(values.data(), length, size, panels.data());
    Head<T>(all[2], sample, kv_head, w.size).read(0, w.length, 1.0f, values.data());
    for (int64_t head = kv_head * shared; head < (kv_head + 1) * shared; ++head) {
      const Head<T> q(all[0], sample, head, w.size), out(all[3], sample, head, w.size);
      for (int64_t begin = 0; begin < w.length; begin += kBlock) {
        const Block block = block_at(begin, w.length, w.window, size);
        q.read(begin, block.end, w.scale, queries.data());
        block.scores(queries.data(), panels.data(), scores.data());
        for (int64_t row = 0; row < block.rows(); ++row) {
          float* p = scores.data() + row * block.width();
          block.hide(p, row, -INFINITY);
          const float most = largest(p, block.width());
          const float sum = exponentials(p, block.width(), most);
          lse[(sample * w.heads + head) * w.length + begin + row] = most + std::log(sum);
          const float factor = 1.0f / sum;
          for (int64_t n = 0; n < block.width(); ++n) p[n] *= factor;
        }
        block.mix(scores.data(), values.data(), mixed.data());
        out.write(begin, block.end, 1.0f, mixed.data());
      }
    }
  }
}

// Queries, keys, values, out, its gradient and lse -> gradients of queries, keys and values.
template <typename T>
void backward(const Window& w, const Heads* all, const float* lse) {
  const int64_t length = filled(w.length), size = filled(w.size), shared = w.heads / w.kv_heads;
#pragma omp parallel for num_threads(w.threads) schedule(static)
  for (int64_t both = 0; both < w.samples * w.kv_heads; ++both) {
    const int64_t sample = both / w.kv_heads, kv_head = both % w.kv_heads;
    std::vector<float> keys(length * size), panels(length * size), value_panels(length * size);
    std::vector<float> dkeys(length * size), dvalues(length * size);
    std::vector<float> scores(kBlock * widest(w.window)), grads(kBlock * widest(w.window));
    std::vector<float> queries(kBlock * size), outs(kBlock * size), douts(kBlock * size);
    Head<T>(all[2], sample, kv_head, w.size).read(0, w.length, 1.0f, keys.data());
    to_panels(keys.data(), length, size, value_panels.data());
    Head<T>(all[1], sample, kv_head, w.size).read(0, w.length, 1.0f, keys.data());
    to_panels(keys.data(), length, size, panels.data());
    for (int64_t head = kv_head * shared; head < (kv_head + 1) * shared; ++head) {
      const Head<T> q(all[0], sample, head, w.size), out(all[3], sample, head, w.size);
      const Head<T> dout(all[4], sample, head, w.size), dq(all[5], sample, head, w.size);
      for (int64_t begin = 0; begin < w.length; begin += kBlock) {
        const Block block = block_at(begin, w.length, w.window, size);
        q.read(begin, block.end, w.scale, queries.data());
        out.read(begin, block.end, 1.0f, outs.data());
        dout.read(begin, block.end, 1.0f, douts.data());
        block.scores(queries.data(), panels.data(), scores.data());
        block.scores(douts.data(), value_panels.data(), grads.data());
        for (int64_t row = 0; row < block.rows(); ++row) {
          float *p = scores.data() + row * block.width(), *d = grads.data() + row * block.width();
          block.hide(p, row, -INFINITY);
          block.hide(d, row, 0.0f);
          const float total = lse[(sample * w.heads + head) * w.length + begin + row];
          float mean = 0.0f;  // of the gradients of this row of probabilities, weighted by them
          for (int64_t n = 0; n < size; ++n) mean += douts[row * size + n] * outs[row * size + n];
          for (int64_t n = 0; n < block.width(); ++n) {
            p[n] = exponential(p[n] - total);
            d[n] = p[n] * (d[n] - mean);
          }
        }
        block.spread(scores.data(), douts.data(), dvalues.data());
        block.spread(grads.data(), queries.data(), dkeys.data());
        block.mix(grads.data(), keys.data(), outs.data());
        dq.write(begin, block.end, w.scale, outs.data());
      }
    }
    Head<T>(all[6], sample, kv_head, w.size).write(0, w.length, 1.0f, dkeys.data());
    Head<T>(all[7], sample, kv_head, w.size).write(0, w.length, 1.0f, dvalues.data());
  }
}

}  // namespace

extern "C" {

// `all`: q, k, v, out.
void windowed_forward_float(const Window* w, const Heads* all, float* lse) { forward<float>(*w, all, lse); }
void windowed_forward_bfloat16(const Window* w, const Heads* all, float* lse) { forward<BFloat16>(*w, all, lse); }

// `all`: q, k, v, out, dout, dq, dk, dv.
void windowed_backward_float(const Window* w, const Heads* all, const float* lse) { backward<float>(*w, all, lse); }
void windowed_backward_bfloat16(const Window* w, const Heads* all, const float* lse) {
  backward<BFloat16>(*w, all, lse);
}

}  // extern "C"
