// Tells torch's CPU build, which decides at compile time that it has no accelerator, that it has CUDA.
// The dynamic linker takes this definition where the library is loaded, globally, before torch.

#include <c10/core/DeviceType.h>

#include <optional>

namespace at::accelerator {

__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) {
  return c10::DeviceType::CUDA;
}

}  // namespace at::accelerator
