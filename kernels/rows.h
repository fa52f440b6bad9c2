// How is a row read and written at full width, wherever it begins?
//
// Memory moves best in aligned vectors of 16 bytes, many of them on their way at a time. So a thread first asks for all
// its vectors, without a branch, and then looks at them: a load whose elements are looked at inside of a branch is
// waited for there, and the next one begins when it has arrived.
//
// A row of 1025 halves begins at any multiple of two bytes. It can be cut at the 16-byte boundaries of memory (Cut):
// all its vectors are whole but the first and the last, of which the elements that belong to the row are moved one by
// one. Or, where a thread needs the same columns of every row, at multiples of its own elements (load_vector): whole
// vectors are moved where every row begins with one.
#pragma once

#include <cstring>

#include "platform.h"

namespace megatronish {

constexpr int kVectorBytes = 16;

template <typename T>
constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T, int kElements>
struct alignas(sizeof(T) * kElements) Vector {
  T element[kElements];
};

template <typename T>
using RowVector = Vector<T, kWidth<T>>;

template <typename T>
__device__ __forceinline__ RowVector<T> rounded(const float (&values)[kWidth<T>]) {
  RowVector<T> vector;
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) vector.element[i] = static_cast<T>(values[i]);
  return vector;
}

// A vector on its way. Of elements, the compiler would make registers of 16 bits as soon as it arrives.
struct alignas(kVectorBytes) Words {
  uint32_t word[kVectorBytes / sizeof(uint32_t)];
};

template <typename To, typename From>
__device__ __forceinline__ To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// One store of 16 bytes to global memory, which `at` is a multiple of. Left to itself, the compiler stores a vector of
// 16-bit elements in up to seven pieces, where the same elements are stored one by one in the other branch.
template <typename Whole>
__device__ __forceinline__ void store_at_once(void* at, const Whole& whole) {
#ifdef __CUDA_ARCH__
  const auto words = bits_as<Words>(whole);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(at)), "r"(words.word[0]),
               "r"(words.word[1]), "r"(words.word[2]), "r"(words.word[3])
               : "memory");
#else
  static_assert(sizeof(Whole) == kVectorBytes);
  *static_cast<Whole*>(at) = whole;
#endif
}

template <typename T>
__device__ __forceinline__ void to_floats(float (&values)[kWidth<T>], const Words& words) {
  const auto vector = bits_as<RowVector<T>>(words);
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) values[i] = static_cast<float>(vector.element[i]);
}

// Number `vector` of a row cut at multiples of its own elements; zeros beyond its end. `aligned`: every row begins at a
// multiple of 16 bytes and is whole vectors.
template <bool kAligned, typename T>
__device__ __forceinline__ Words load_vector(const T* row, int vector, int length) {
  const int at = vector * kWidth<T>;
  if constexpr (kAligned) {
    Words loaded{};
    if (at < length) loaded = *reinterpret_cast<const Words*>(row + at);
    return loaded;
  } else {
    RowVector<T> pieces{};
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      if (at + i < length) pieces.element[i] = row[at + i];
    }
    return bits_as<Words>(pieces);
  }
}

// What lies outside the row is left alone.
template <typename T>
__device__ __forceinline__ void store_vector(const float (&values)[kWidth<T>], T* row, int vector, int length,
                                             bool aligned) {
  const int at = vector * kWidth<T>;
  const RowVector<T> stored = rounded<T>(values);
  if (aligned) {
    if (at < length) store_at_once(row + at, stored);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      if (at + i < length) row[at + i] = stored.element[i];
    }
  }
}

// Elements that lie between a 16-byte boundary and `pointer`.
template <typename T>
__device__ __forceinline__ int shift_of(const T* pointer) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % kVectorBytes / sizeof(T));
}

// A row cut at boundaries of memory: vector number v has its elements [v * kWidth - shift, ... + kWidth).
template <typename T>
struct Cut {
  int length;  // of the row
  int shift;   // elements of the first vector that lie before it
  bool whole;  // false: the tensors of this row are cut at different places, so all moves are one by one

  // `others` are the same row of other tensors of T.
  template <typename... Others>
  __device__ __forceinline__ Cut(int length, const T* row, Others... others)
      : length(length), shift(shift_of(row)), whole(((shift_of<T>(others) == shift_of(row)) && ...)) {}

  __device__ __forceinline__ int begin(int vector) const { return vector * kWidth<T> - shift; }
  __device__ __forceinline__ int num_vectors() const { return divide_up(shift + length, kWidth<T>); }
  __device__ __forceinline__ bool has_all(int vector, int from, int to) const {
    return whole & (begin(vector) >= from) & (begin(vector) + kWidth<T> <= to);
  }

  // Elements outside [from, to) become `otherwise`, and are not read. A thread does this for all its vectors ...
  __device__ __forceinline__ void load_if_whole(Words& loaded, const T* row, int vector, int from, int to,
                                                T otherwise) const {
    loaded = all_are(otherwise);
    if (has_all(vector, from, to)) loaded = *reinterpret_cast<const Words*>(row + begin(vector));
  }
  // ... and then this, which seldom has anything to do.
  __device__ __forceinline__ void load_if_not(Words& loaded, const T* row, int vector, int from, int to,
                                              T otherwise) const {
    const int at = begin(vector);
    if (has_all(vector, from, to) | (at >= to) | (at + kWidth<T> <= from)) return;
    auto pieces = bits_as<RowVector<T>>(all_are(otherwise));
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      if (at + i >= from && at + i < to) pieces.element[i] = row[at + i];
    }
    loaded = bits_as<Words>(pieces);
  }

  // What lies outside the row is left alone.
  __device__ __forceinline__ void store(const float (&values)[kWidth<T>], T* row, int vector) const {
    const int at = begin(vector);
    const RowVector<T> stored = rounded<T>(values);
    if (has_all(vector, 0, length)) {
      store_at_once(row + at, stored);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        if (at + i >= 0 && at + i < length) row[at + i] = stored.element[i];
      }
    }
  }

 private:
  static __device__ __forceinline__ Words all_are(T x) {
    RowVector<T> vector;
#pragma unroll
    for (T& element : vector.element) element = x;
    return bits_as<Words>(vector);
  }
};

}  // namespace megatronish
