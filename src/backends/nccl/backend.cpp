// LibTorch's NCCL backend, for CUDA tensors.

#include <dlfcn.h>
#include <fmt/format.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
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
#include "distributed/devices/failure_watch.h"
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
  enum Kind : char { unavailable = '0', own_device = '1', may_share = '2' } kind;
  std::string text;

  std::string packed() const { return static_cast<char>(kind) + text; }
  static Readiness unpack(const std::string& bytes) {
    return {static_cast<Kind>(bytes[0]), bytes.substr(1)};
  }
};

Readiness readiness() {
  std::string reason;
  if (!is_nccl_available(&reason)) return {Readiness::unavailable, reason};
  const NcclPlugin& plugin = *loaded().plugin;
  return {plugin.shares_devices() ? Readiness::may_share : Readiness::own_device, plugin.device()};
}

// NCCL would fail later, and not say which ranks. All ranks throw.
void check_devices(const distributed::BackendRequest& request) {
  const auto all = distributed::StoreExchange(request).all_gather(
      readiness().packed(), base::Deadline::after(request.timeout));
  const auto global_ranks = request.global_ranks();
  // The first rank of each device.
  struct Owner {
    int rank;
    Readiness::Kind kind;
  };
  std::map<std::string, Owner> owners;
  for (int rank = 0; rank < request.size; ++rank) {
    const auto [kind, text] = Readiness::unpack(all[static_cast<std::size_t>(rank)]);
    if (kind == Readiness::unavailable) {
      throw UsageError(fmt::format("the backend nccl is not available on rank {}: {}",
                                   global_ranks.of(rank), text));
    }
    const auto [owner, is_first] = owners.emplace(text, Owner{rank, kind});
    if (is_first) continue;
    if (kind == Readiness::may_share && owner->second.kind == kind) continue;
    throw UsageError(fmt::format(
        "ranks {} and {} have the same current CUDA device, and NCCL needs one for each rank: "
        "start no more ranks on a machine than it has devices, give each rank its own with "
        "local_device or CUDA_VISIBLE_DEVICES, or let ranks share devices over the backend "
        "paceline or gloo. NCCL 2.30 and later lets ranks share devices, more slowly, if "
        "NCCL_MULTI_RANK_GPU_ENABLE=1 is set on all of them",
        global_ranks.of(owner->second.rank), global_ranks.of(rank)));
  }
}

// NCCL's own limit ends the process. In a step of DDP, the backend for CPU tensors knows which
// ranks are late, and comes first.
constexpr std::chrono::seconds kAfterHost{10};

c10::intrusive_ptr<c10d::Backend> make_nccl(const distributed::BackendRequest& request) {
  check_devices(request);
  auto host =
      c10::dynamic_intrusive_pointer_cast<distributed::ExtendedBackend>(request.host_backend);
  if (!host || request.size == 1) {
    return loaded().plugin->make(request.store, request.rank, request.size, request.timeout,
                                 request.group_name, [](const auto& /*abort*/) { return nullptr; });
  }
  return loaded().plugin->make(request.store, request.rank, request.size,
                               request.timeout + kAfterHost, request.group_name,
                               [&](std::function<void()> abort) {
                                 return std::make_shared<distributed::FailureWatch>(
                                     std::move(host), request.group_name, std::move(abort));
                               });
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
