// LibTorch's NCCL backend, for CUDA tensors.

#include <dlfcn.h>
#include <fmt/format.h>

#include <map>
#include <string>
#include <utility>

#include <paceline/device.h>
#include <paceline/distributed.h>
#include <paceline/error.h>

#include "backends/nccl/plugin.h"
#include "base/deadline.h"
#include "base/plugin.h"
#include "distributed/backend.h"
#include "distributed/devices/cuda.h"
#include "distributed/store_exchange.h"
#include "shm/membership/failure.h"

namespace paceline {
namespace backends {
namespace {

struct LoadedPlugin {
  const NcclPlugin* plugin = nullptr;
  std::string why_not{};
};

LoadedPlugin load() {
  const auto& cuda = distributed::Cuda::get();
  if (cuda.devices == 0) return {.why_not = cuda.why_not};
  const auto path = base::plugin_path("nccl");
  if (path.empty()) {
    return {
        .why_not =
            "this build of Paceline has no plug-in for NCCL: it needs nccl.h and the headers of "
            "CUDA, and a LibTorch with CUDA, when it is built"};
  }
  // It stays loaded: its objects have threads.
  void* const library = ::dlopen(path.c_str(), RTLD_LAZY | RTLD_NODELETE);
  if (library == nullptr) {
    return {.why_not = fmt::format("the plug-in for NCCL cannot be loaded: {}", ::dlerror())};
  }
  const auto function = reinterpret_cast<NcclPluginFunction>(::dlsym(library, kNcclPluginFunction));
  if (function == nullptr) {
    return {.why_not = fmt::format("{} belongs to another version of Paceline", path.string())};
  }
  const NcclPlugin* const plugin = function();
  auto why_not = plugin->why_not();
  return {.plugin = why_not.empty() ? plugin : nullptr, .why_not = std::move(why_not)};
}

const LoadedPlugin& loaded() {
  static const LoadedPlugin plugin = load();
  return plugin;
}

// What a rank says before a group is formed: its device, or why it has none.
struct Readiness {
  bool ready;
  std::string text;

  std::string packed() const { return (ready ? "1" : "0") + text; }
  static Readiness unpack(const std::string& bytes) { return {bytes[0] == '1', bytes.substr(1)}; }
};

Readiness readiness() {
  std::string reason;
  if (!is_nccl_available(&reason)) return {false, reason};
  return {true, loaded().plugin->device()};
}

// NCCL would fail later, and not say which ranks. All ranks throw.
void check_devices(const distributed::BackendRequest& request) {
  const auto all = distributed::StoreExchange(request).all_gather(
      readiness().packed(), base::Deadline::after(request.timeout));
  const auto global_ranks = request.global_ranks();
  std::map<std::string, int> owners;
  for (int rank = 0; rank < request.size; ++rank) {
    const auto [ready, text] = Readiness::unpack(all[static_cast<std::size_t>(rank)]);
    if (!ready) {
      throw UsageError(fmt::format("the backend nccl is not available on rank {}: {}",
                                   global_ranks.of(rank), text));
    }
    const auto [owner, is_first] = owners.emplace(text, rank);
    if (is_first) continue;
    throw UsageError(fmt::format(
        "ranks {} and {} have the same current CUDA device, and NCCL needs one for each rank: "
        "start no more ranks on a machine than it has devices, give each rank its own with "
        "local_device "
        "or CUDA_VISIBLE_DEVICES, or let ranks share devices over the backend paceline or gloo",
        global_ranks.of(owner->second), global_ranks.of(rank)));
  }
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const distributed::BackendRequest& request) {
  check_devices(request);
  return loaded().plugin->make(request.store, request.rank, request.size, request.timeout,
                               request.group_name);
}

const bool nccl_registered = distributed::register_backend(
    "nccl", {.make = &make_nccl, .type = c10d::ProcessGroup::BackendType::NCCL});

}  // namespace
}  // namespace backends

bool is_nccl_available(std::string* reason) {
  const auto& plugin = backends::loaded();
  if (plugin.plugin == nullptr && reason != nullptr) *reason = plugin.why_not;
  return plugin.plugin != nullptr;
}

}  // namespace paceline
