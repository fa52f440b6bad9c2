// How is a row read and written at full width, wherever it begins?
//
// Memory moves best in aligned vectors of 16 bytes, but a row of 1025 halves begins at any multiple of two bytes. So a
// row is cut at the 16-byte boundaries of memory, not at multiples of its own elements: all its vectors are whole but
// the first and the last, of which the elements that belong to the row are moved one by one. No length is special.
#pragma once

#include <type_traits>

#include "platform.h"

namespace megatronish {

constexpr int kVectorBytes = 16;

template <typename T>
constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T, int kElements>
struct alignas(sizeof(T) * kElements) Vector {
  T element[kElements];
};

// Elements that lie between a 16-byte boundary and `pointer`.
template <typename T>
__device__ __forceinline__ int shift_of(const T* pointer) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % kVectorBytes / sizeof(T));
}

// How a row lies in memory: vector number v has its elements [v * kWidth - shift, ... + kWidth).
template <typename T>
struct Cut {
  int length;  // of the row
  int shift;   // elements of the first vector that lie before it
  bool whole;  // false: the tensors of this row are cut at different places, so all moves are one by one

  // `others` are the same row of other tensors of T.
  template <typename... Others>
  __device__ __forceinline__ Cut(int length, const T* row, Others... others)
      : length(length), shift(shift_of(row)), whole(((shift_of<T>(others) == shift_of(row)) && ...)) {}

  // At multiples of its own elements, as long as every row begins a vector: a thread has the same columns of each.
  __device__ __forceinline__ Cut(int length, bool begins_a_vector) : length(length), shift(0), whole(begins_a_vector) {}

  __device__ __forceinline__ int begin(int vector) const { return vector * kWidth<T> - shift; }
  __device__ __forceinline__ int num_vectors() const { return divide_up(shift + length, kWidth<T>); }

  // Elements outside [from, to) become `otherwise`; they are not read, and neither are vectors without any inside.
  __device__ __forceinline__ void load(float (&values)[kWidth<T>], const T* row, int vector, int from, int to,
                                       float otherwise) const {
    const int at = begin(vector);
    if (whole && at >= from && at + kWidth<T> <= to) {
      const auto loaded = *reinterpret_cast<const Vector<T, kWidth<T>>*>(row + at);
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) values[i] = static_cast<float>(loaded.element[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        values[i] = at + i >= from && at + i < to ? static_cast<float>(row[at + i]) : otherwise;
      }
    }
  }

  // What lies outside the row is left alone.
  __device__ __forceinline__ void store(const float (&values)[kWidth<T>], T* row, int vector) const {
    const int at = begin(vector);
    if (whole && at >= 0 && at + kWidth<T> <= length) {
      Vector<T, kWidth<T>> stored;
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) stored.element[i] = static_cast<T>(values[i]);
      *reinterpret_cast<Vector<T, kWidth<T>>*>(row + at) = stored;
    } else {
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        if (at + i >= 0 && at + i < length) row[at + i] = static_cast<T>(values[i]);
      }
    }
  }
};

}  // namespace megatronish
