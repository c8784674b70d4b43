// Tells a CPU build of PyTorch that there is one CUDA device, so that it accepts tensors that say cuda:0. See simulated_cuda.py.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

// What PyTorch does around every operation: look up and set the current device and stream. There is nothing to set; streams and events are in Python.
struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, {c10::DeviceType::CUDA, 0}); }
  c10::Device getDevice() const override { return stream().device(); }
  c10::Device exchangeDevice(c10::Device) const override { return stream().device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}

namespace at {
struct CUDAHooks : CUDAHooksInterface {  // asked by autograd
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
