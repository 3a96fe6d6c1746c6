#include "distributed/devices/device_backends.h"

#include <fmt/format.h>

#include <optional>
#include <string_view>
#include <utility>

#include <paceline/error.h>

#include "base/parse.h"
#include "distributed/devices/staged_backend.h"

namespace paceline::distributed {
namespace {

constexpr const char* kNccl = "nccl";

[[noreturn]] void refuse(const std::string& text, std::string_view why) {
  throw UsageError(
      fmt::format("backend '{}': {}; give the name of one backend, or one for each type of device, "
                  "as in cpu:paceline,cuda:nccl",
                  text, why));
}

void set(std::optional<std::string>& name, const std::string& text, std::string_view value) {
  if (name) refuse(text, "it names a type of device twice");
  if (value.empty()) refuse(text, "it has a device without a backend");
  name = value;
}

}  // namespace

DeviceBackends parse_backends(const std::string& text) {
  if (text == kNccl) return {"paceline", kNccl};
  if (text.find(':') == std::string::npos) return {text, text};
  std::optional<std::string> cpu;
  std::optional<std::string> cuda;
  for (const std::string_view part : base::split_at_commas(text)) {
    const std::size_t colon = part.find(':');
    if (colon == std::string_view::npos) refuse(text, "one of its parts has no device");
    const auto device = part.substr(0, colon);
    if (device == "cpu") {
      set(cpu, text, part.substr(colon + 1));
    } else if (device == "cuda") {
      set(cuda, text, part.substr(colon + 1));
    } else {
      refuse(text, "it names a device other than cpu and cuda");
    }
  }
  if (cpu == kNccl) refuse(text, "nccl is for CUDA tensors only");
  if (!cpu) cpu = cuda == kNccl ? "paceline" : cuda;
  if (!cuda) cuda = cpu;
  if (cuda != kNccl && cuda != cpu) {
    refuse(text, "CUDA tensors can have nccl, or the backend of CPU tensors");
  }
  return {*cpu, *cuda};
}

void add_cuda_backend(c10d::ProcessGroup& group, const DeviceBackends& names,
                      const c10::intrusive_ptr<c10d::Backend>& host, BackendRequest request) {
  using Type = c10d::ProcessGroup::BackendType;
  if (names.cuda == kNccl) {
    request.host_backend = host;
    group.setBackend(c10::DeviceType::CUDA, Type::NCCL,
                     find_backend(kNccl).make(std::move(request)));
  } else {
    // A group has one backend of each type.
    group.setBackend(c10::DeviceType::CUDA, Type::UNDEFINED,
                     c10::make_intrusive<StagedBackend>(host));
  }
}

}  // namespace paceline::distributed
