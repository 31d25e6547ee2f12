// What torch needs before tensors may be on a CUDA device: a guard, which selects a device and its
// streams, and hooks, which say that there is a GPU. Both do nothing. Load it before torch is
// imported: torch asks for the hooks once.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::Stream;

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  Stream getStream(Device d) const noexcept override { return Stream(Stream::DEFAULT, d); }
};

struct Hooks : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}
