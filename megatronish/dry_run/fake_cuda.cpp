// CUDA as torch's C++ asks for it, on a machine without a GPU: a device without memory and streams without work.
//
// Autograd asks a device guard for the current stream, and hooks whether there is a device at all; both come from the
// CUDA library, which a build for the CPU lacks. SDPA asks a function for the attention that a GPU would run. The hooks
// are asked once and their answer is kept, so this library is loaded before torch is imported (fake_cuda.py).
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <optional>

namespace {

thread_local c10::StreamId current_stream = 0;
const c10::Device the_device(c10::DeviceType::CUDA, 0);

// The only device is number 0; what is submitted to its streams is done at once.
struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device; }
  c10::Device getDevice() const override { return the_device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream stream(c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, the_device, id); }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(1); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(1); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = stream(current_stream);
    current_stream = next.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};

// SDPBackend of torch: 1 flash attention, of halves without a mask; 2 memory-efficient attention.
int64_t attention_of_a_gpu(
    const at::Tensor& query, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& mask, double, bool,
    std::optional<double>, bool) {
  const bool is_half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  return is_half && !mask ? 1 : 2;
}

// Never called: fake tensors answer before.
void no_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK(false, op.operator_name(), " has no kernel in a dry run");
}

}  // namespace

// What a build for CUDA computes in one operator and a build for the CPU, which has no such kernel, in several.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_fused_rms_norm", torch::CppFunction::makeFromBoxedFunction<&no_kernel>());
  library.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&no_kernel>());
}

namespace at {

struct FakeCUDAHooks final : CUDAHooksInterface {
  explicit FakeCUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

// A build for CUDA registers hooks of this name, too, when torch is imported: these are preferred.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, FakeCUDAHooks)

}  // namespace at

// Called once torch is imported: a build for CUDA has put its own guard and its own choice of attention there.
extern "C" void install_fake_cuda() {
  static const FakeGuard guard;
  c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, &guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_of_a_gpu);
}
