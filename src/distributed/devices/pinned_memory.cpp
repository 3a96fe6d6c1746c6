#include "distributed/devices/pinned_memory.h"

#include <dlfcn.h>

#include <cstdint>

#include "base/log.h"
#include "shm/memory/arena.h"

namespace paceline::distributed {
namespace {

// Functions of CUDA's runtime, which libtorch_cpu.so has loaded where LibTorch has CUDA.
template <typename Function>
Function* runtime_function(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

int pin(void* memory, std::size_t bytes) {
  auto* const host_register =
      runtime_function<int(void*, std::size_t, unsigned)>("cudaHostRegister");
  if (host_register == nullptr) return -1;
  const int error = host_register(memory, bytes, 0);
  if (auto* const last_error = runtime_function<int()>("cudaGetLastError")) last_error();
  return error;
}

}  // namespace

PinnedMemory::PinnedMemory(at::Tensor tensor) : tensor_(std::move(tensor)) {
  void* const memory = tensor_.data_ptr();
  if (tensor_.is_pinned() || reinterpret_cast<std::uintptr_t>(memory) % shm::kPage != 0) return;
  const int error = pin(memory, tensor_.nbytes());
  pinned_ = error == 0;
  if (pinned_) return;
  base::log(
      LogLevel::warning,
      "{} bytes of shared memory cannot be pinned for CUDA (error {}): copies to and from the "
      "device are slower; a limit on locked memory (ulimit -l) may be the cause",
      tensor_.nbytes(), error);
}

PinnedMemory::~PinnedMemory() {
  if (!pinned_) return;
  if (auto* const unregister = runtime_function<int(void*)>("cudaHostUnregister")) {
    unregister(tensor_.data_ptr());
  }
}

}  // namespace paceline::distributed
