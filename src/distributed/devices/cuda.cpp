#include "distributed/devices/cuda.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <exception>
#include <filesystem>

namespace paceline::distributed {
namespace {

constexpr const char* kLibrary = "libtorch_cuda.so";

// The result of a function of the driver or of the runtime; -1 if the library lacks it.
template <typename... Args>
int call(void* library, const char* name, Args... args) {
  const auto function = reinterpret_cast<int (*)(Args...)>(::dlsym(library, name));
  return function == nullptr ? -1 : function(args...);
}

std::string describe_version(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

// Why the driver has no device for this process; empty if it has one.
std::string check_driver() {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver == nullptr) {
    return "there is no NVIDIA driver: libcuda.so.1 is not among this machine's libraries";
  }
  constexpr int kNoDevice = 100;
  const int error = call(driver, "cuInit", 0U);
  int devices = 0;
  if (error == 0) call(driver, "cuDeviceGetCount", &devices);
  if (error == kNoDevice || (error == 0 && devices == 0)) {
    const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
    if (visible == nullptr) return "the NVIDIA driver finds no device";
    return fmt::format("the NVIDIA driver finds no device with CUDA_VISIBLE_DEVICES={}", visible);
  }
  if (error != 0) {
    return fmt::format("the NVIDIA driver fails to start with error {}: nvidia-smi may say more",
                       error);
  }
  // Versions with one major number run each other's programs.
  int has = 0;
  int wants = 0;
  call(driver, "cuDriverGetVersion", &has);
  call(RTLD_DEFAULT, "cudaRuntimeGetVersion", &wants);
  if (has / 1000 >= wants / 1000) return {};
  return fmt::format(
      "the NVIDIA driver is for CUDA {} and LibTorch for CUDA {}: install a newer driver, or "
      "LibTorch for an older CUDA",
      describe_version(has), describe_version(wants));
}

// Whether it is in this process already.
bool is_loaded() {
  void* const library = ::dlopen(kLibrary, RTLD_LAZY | RTLD_NOLOAD);
  if (library != nullptr) ::dlclose(library);
  return library != nullptr;
}

// Beside libtorch_cpu.so.
std::string load_library() {
  Dl_info info{};
  // A function of libtorch_cpu.so; the address of one of a class would be in the caller.
  if (::dladdr(reinterpret_cast<const void*>(&at::globalContext), &info) == 0) {
    return "the place of LibTorch's libraries is unknown";
  }
  const auto path = std::filesystem::path(info.dli_fname).parent_path() / kLibrary;
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    return fmt::format("this LibTorch has no CUDA: there is no {}", path.string());
  }
  // It never works unloaded: it registers its operators.
  if (::dlopen(path.c_str(), RTLD_LAZY | RTLD_GLOBAL | RTLD_NODELETE) == nullptr) {
    return fmt::format("LibTorch's part for CUDA cannot be loaded: {}", ::dlerror());
  }
  return {};
}

Cuda load() {
  Cuda cuda;
  cuda.why_not = check_driver();
  if (cuda.why_not.empty() && !is_loaded()) cuda.why_not = load_library();
  if (!cuda.why_not.empty()) return cuda;
  // LibTorch looks for its CUDA once.
  if (!at::globalContext().hasCUDA()) {
    cuda.why_not =
        "LibTorch was asked for CUDA before its part for CUDA was loaded, for instance by "
        "torch::cuda::is_available or torch::manual_seed: call paceline::local_device before, or "
        "link the program to libtorch_cuda.so";
    return cuda;
  }
  cuda.devices =
      static_cast<unsigned char>(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount());
  if (cuda.devices == 0) cuda.why_not = "LibTorch finds no CUDA device";
  return cuda;
}

Cuda load_or_explain() {
  try {
    return load();
  } catch (const std::exception& error) {
    return {.why_not = error.what()};
  }
}

}  // namespace

const Cuda& Cuda::get() {
  static const Cuda cuda = load_or_explain();
  return cuda;
}

}  // namespace paceline::distributed
