// What does the body of an operator need? Its tensors as pointers, and the stream to launch on.
//
// Operators are bound through torch's stable ABI, without a header of CUDA. The same bindings are built twice: for CUDA
// in the namespace of the package, and with the emulator for the CPU in a namespace of its own, where each announced
// tensor is watched by the checker.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <exception>
#include <optional>

#ifdef MEGATRONISH_EMULATED
#include "emulator/checker.h"
#define MEGATRONISH_NAMESPACE megatronish_emulated
#define MEGATRONISH_DEVICE CPU
#else
#define MEGATRONISH_NAMESPACE megatronish
#define MEGATRONISH_DEVICE CUDA
// Part of torch's library for CUDA, which is not there to link to where torch was built without it.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
#endif

namespace megatronish {

using torch::stable::Tensor;

// One call of an operator: it lasts as long as its kernels are launched. Every tensor that they touch is made a pointer
// here, under the name that a finding of the checker will give it.
class Call {
 public:
#ifdef MEGATRONISH_EMULATED
  explicit Call(const Tensor&) { emulator::checker::open(); }
  ~Call() noexcept(false) {
    if (std::uncaught_exceptions() == 0) emulator::checker::close();  // throws if an output has not been written
  }
#else
  // On the device of `tensor`, in its current stream.
  explicit Call(const Tensor& tensor) : device_(tensor.get_device_index()), guard_(device_) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this build of torch has no CUDA");
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream_));
  }
#endif
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void* stream() const { return stream_; }

  template <typename T>
  const T* input(const char* name, const Tensor& tensor) {
    return static_cast<const T*>(announced(name, tensor, Use::kInput));
  }
  template <typename T>  // read and written
  T* updated(const char* name, const Tensor& tensor) {
    return static_cast<T*>(announced(name, tensor, Use::kUpdated));
  }
  template <typename T>  // all of it is written
  T* output(const char* name, const Tensor& tensor) {
    return static_cast<T*>(announced(name, tensor, Use::kOutput));
  }
  template <typename T>  // between the kernels of a call
  T* scratch(const char* name, const Tensor& tensor) {
    return static_cast<T*>(announced(name, tensor, Use::kScratch));
  }

 private:
#ifdef MEGATRONISH_EMULATED
  using Use = emulator::checker::Use;
  void* announced(const char* name, const Tensor& tensor, Use use) {
    int64_t last = 0;  // element: a tensor of strides may have holes, and repeat itself
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    const int64_t elements = tensor.numel() == 0 ? 0 : last + 1;
    emulator::checker::announce(name, tensor.data_ptr(), elements * tensor.element_size(), use);
    return tensor.data_ptr();
  }
#else
  enum class Use { kInput, kUpdated, kOutput, kScratch };
  void* announced(const char* name, const Tensor& tensor, Use) const {
    const bool is_here = tensor.is_cuda() && tensor.get_device_index() == device_;
    STD_TORCH_CHECK(is_here, name, " must be on cuda:", device_, ", where the first tensor of the operator is");
    return tensor.data_ptr();
  }
  torch::stable::accelerator::DeviceIndex device_;
  torch::stable::accelerator::DeviceGuard guard_;
#endif
  void* stream_ = nullptr;
};

// Calls `body` with a zero of the tensor's type: for_type(x, [&](auto zero) { using T = decltype(zero); ... }).
template <typename Body>
void for_type(const Tensor& tensor, Body body) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return body(float());
    case ScalarType::Half: return body(c10::Half());
    case ScalarType::BFloat16: return body(c10::BFloat16());
    default:
      STD_TORCH_CHECK(false, "megatronish's kernels take float32, float16 and bfloat16 alone; MEGATRONISH_KERNELS=0 "
                             "does without them");
  }
}

inline void check_like(const Tensor& a, const Tensor& b, const char* what) {
  bool same = a.scalar_type() == b.scalar_type() && a.dim() == b.dim();
  for (int64_t dim = 0; same && dim < a.dim(); ++dim) same = a.size(dim) == b.size(dim);
  STD_TORCH_CHECK(same, what);
}

}  // namespace megatronish
