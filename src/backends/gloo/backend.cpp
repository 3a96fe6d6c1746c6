#include <fmt/format.h>
#include <fmt/ranges.h>
#include <net/if.h>
#include <sched.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/error.h>

#include "backends/gloo/gloo_engine.h"
#include "base/deadline.h"
#include "base/parse.h"
#include "distributed/backend.h"
#include "distributed/store_exchange.h"

namespace paceline::backends {
namespace {

// Two ranks of an engine connect at their first message, for which Gloo has five times as long as
// this. Transfers have no other limit.
constexpr std::chrono::seconds kConnectLimit{2};
// A group connects when it is made. Ranks on busy cores have at least this, again five times, or
// the group's timeout if that is shorter.
constexpr std::chrono::seconds kLeastConnectLimit{10};

using Devices = std::vector<std::shared_ptr<::gloo::transport::Device>>;
using c10d::ProcessGroupGloo;

std::vector<std::string> interfaces_here() {
  std::vector<std::string> names;
  struct if_nameindex* const all = ::if_nameindex();
  for (auto* one = all; one != nullptr && one->if_index != 0; ++one)
    names.emplace_back(one->if_name);
  if (all != nullptr) ::if_freenameindex(all);
  return names;
}

Devices devices_of_interfaces(const std::vector<std::string>& names, bool lazy) {
  Devices devices;
  for (const std::string& name : names) {
    try {
      devices.push_back(ProcessGroupGloo::createDeviceForInterface(name, lazy));
    } catch (const std::exception&) {
      throw UsageError(
          fmt::format("GlooOptions::interfaces or GLOO_SOCKET_IFNAME: this machine has no "
                      "interface '{}' with an address; its interfaces are {}",
                      name, fmt::join(interfaces_here(), ", ")));
    }
  }
  return devices;
}

Devices devices_of_hosts(const std::vector<std::string>& names, bool lazy) {
  Devices devices;
  for (const std::string& name : names) {
    devices.push_back(ProcessGroupGloo::createDeviceForHostname(name, lazy));
  }
  return devices;
}

// Only PyTorch's Python reads GLOO_SOCKET_IFNAME, one interface or several, comma separated.
std::vector<std::string> interfaces_by_variable() {
  const char* const given = std::getenv("GLOO_SOCKET_IFNAME");
  std::vector<std::string> names;
  if (given == nullptr || *given == '\0') return names;
  for (const std::string_view name : base::split_at_commas(given)) names.emplace_back(name);
  return names;
}

bool connects_lazily(const GlooOptions& options) {
  return options.lazy_init.value_or(c10d::getCvarBool(c10d::TORCH_GLOO_LAZY_INIT, false));
}

Devices make_devices(const GlooOptions& options, const std::string& host) {
  const bool lazy = connects_lazily(options);
  if (!options.interfaces.empty()) return devices_of_interfaces(options.interfaces, lazy);
  if (!options.hostnames.empty()) return devices_of_hosts(options.hostnames, lazy);
  const auto names = interfaces_by_variable();
  if (!names.empty()) return devices_of_interfaces(names, lazy);
  if (!host.empty()) return devices_of_hosts({host}, lazy);
  return {ProcessGroupGloo::createDefaultDevice(lazy)};
}

GlooOptions checked_options(const distributed::BackendRequest& request) {
  auto options = distributed::own_options<GlooOptions>(request, "gloo");
  if (options.threads && *options.threads < 1) {
    throw UsageError(
        fmt::format("GlooOptions: {} threads; at least one is needed", *options.threads));
  }
  if (!options.interfaces.empty() && !options.hostnames.empty()) {
    throw UsageError("GlooOptions: give either interfaces or hostnames");
  }
  return options;
}

// Gloo would wait for connections that a rank with fewer does not make.
void check_equally_many(const distributed::BackendRequest& request, std::size_t devices) {
  const std::string key = "gloo_devices";
  if (request.rank == 0) return request.store->set(key, std::to_string(devices));
  request.store->wait({key}, request.timeout);
  const std::string others = request.store->get_to_str(key);
  if (others == std::to_string(devices)) return;
  throw UsageError(fmt::format(
      "group {}: rank {} uses {} interfaces and rank 0 {}; all ranks have to use equally "
      "many (GlooOptions, GLOO_SOCKET_IFNAME)",
      request.group_name, request.rank, devices, others));
}

// Gloo writes to connections that a lost rank has closed, and this rank would die of the signal
// before it says what happened. Python ignores it, too.
void ignore_broken_pipes() {
  struct sigaction action {};
  ::sigaction(SIGPIPE, nullptr, &action);
  if ((action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_DFL) {
    ::signal(SIGPIPE, SIG_IGN);
  }
}

// LibTorch's own Gloo, whose calls can be aborted.
class AbortableGloo final : public ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  // Once a wait has timed out, Gloo closes the connections of its context, and all calls fail, here
  // and on the other ranks. So this waits for a message that nobody sends, from each rank, since a
  // wait for one whose connection is closed already closes no other. Without it, the destructor
  // waits for the calls under way.
  void abort() override {
    constexpr int kUnusedTag = 0x7ace0000;
    auto nothing = std::vector{at::empty({1}, at::kByte)};
    for (std::size_t context = 0; context < contexts_.size(); ++context) {
      for (int peer = 0; peer < getSize(); ++peer) {
        if (peer == getRank()) continue;
        try {
          recv(nothing, peer, kUnusedTag + static_cast<int>(context))
              ->wait(std::chrono::milliseconds(1));
        } catch (const std::exception&) {
          // As it should.
        }
      }
    }
  }
};

template <typename Backend>
c10::intrusive_ptr<c10d::Backend> connect(const distributed::BackendRequest& request,
                                          Devices devices, std::optional<int> threads,
                                          std::chrono::milliseconds timeout) {
  ignore_broken_pipes();
  auto options = ProcessGroupGloo::Options::create(timeout);
  options->threads = threads.value_or(2 * static_cast<int>(devices.size()));
  options->devices = std::move(devices);
  return c10::make_intrusive<Backend>(request.store, request.rank, request.size, options);
}

c10::intrusive_ptr<c10d::Backend> make(const distributed::BackendRequest& request) {
  const GlooOptions chosen = checked_options(request);
  // Gloo also waits for missing ranks, but does not name them.
  if (!request.met) {
    distributed::StoreExchange(request).all_gather("here", base::Deadline::after(request.timeout));
  }
  Devices devices = make_devices(chosen, request.host);
  check_equally_many(request, devices.size());
  // An abort would make the connections that are made lazily.
  const auto make_one =
      connects_lazily(chosen) ? connect<ProcessGroupGloo> : connect<AbortableGloo>;
  // All ranks have just been here.
  const auto timeout = std::max<std::chrono::milliseconds>(
      request.timeout / 5,
      std::min<std::chrono::milliseconds>(request.timeout, kLeastConnectLimit));
  auto backend = make_one(request, std::move(devices), chosen.threads, timeout);
  backend->setTimeout(request.timeout);
  // A rank that left at once would close connections that other ranks still check.
  backend->barrier()->wait();
  return backend;
}

// Threads that this one starts meanwhile do not preempt others when they wake up. Gloo's thread
// polls without a pause while another one holds a connection's lock. If it has just preempted that
// one, and no other core is free, the lock stays held until the scheduler's next tick, up to 4 ms.
class StartsBatchThreads {
 public:
  StartsBatchThreads() {
    if (::sched_getscheduler(0) == SCHED_OTHER) is_set_ = set(SCHED_BATCH);
  }
  StartsBatchThreads(const StartsBatchThreads&) = delete;
  StartsBatchThreads& operator=(const StartsBatchThreads&) = delete;
  ~StartsBatchThreads() {
    if (is_set_) set(SCHED_OTHER);
  }

 private:
  static bool set(int policy) {
    const sched_param none{};
    return ::sched_setscheduler(0, policy, &none) == 0;  // of this thread only
  }

  bool is_set_ = false;
};

// See PacelineOptions::gloo. Waits for nobody.
std::unique_ptr<internode::Engine> make_engine(const distributed::BackendRequest& request) {
  GlooOptions chosen = checked_options(request);
  chosen.lazy_init = true;
  const StartsBatchThreads meanwhile;
  Devices devices = make_devices(chosen, request.host);
  if (devices.size() == 1 && chosen.interfaces.empty() && chosen.hostnames.empty()) {
    devices.push_back(make_devices(chosen, request.host).front());
  }
  const auto connections = static_cast<int>(devices.size());  // one of each device
  return std::make_unique<GlooEngine>(
      connect<ProcessGroupGloo>(request, std::move(devices), chosen.threads.value_or(1),
                                kConnectLimit),
      request.store, request.store_server, connections);
}

const bool gloo_registered = distributed::register_backend(
    "gloo",
    {.make = &make, .type = c10d::ProcessGroup::BackendType::GLOO, .make_engine = &make_engine});

}  // namespace
}  // namespace paceline::backends
