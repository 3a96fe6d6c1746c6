#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/error.h>

#include "base/deadline.h"
#include "base/parse.h"
#include "distributed/backend.h"
#include "distributed/store_exchange.h"

namespace paceline::backends {
namespace {

using Devices = std::vector<std::shared_ptr<::gloo::transport::Device>>;

// Only PyTorch's Python reads GLOO_SOCKET_IFNAME, one interface or several, comma separated.
Devices make_devices(const std::string& host) {
  const char* const given = std::getenv("GLOO_SOCKET_IFNAME");
  const std::string names = given != nullptr ? given : "";
  if (names.empty()) {
    return {host.empty() ? c10d::ProcessGroupGloo::createDefaultDevice()
                         : c10d::ProcessGroupGloo::createDeviceForHostname(host)};
  }
  Devices devices;
  for (const std::string_view name : base::split_at_commas(names)) {
    devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(std::string(name)));
  }
  return devices;
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

// LibTorch's own Gloo. It uses the interfaces of GLOO_SOCKET_IFNAME. Without that variable, ranks
// known to share a host use that address only, others the interface of this machine's name.
c10::intrusive_ptr<c10d::Backend> make(const distributed::BackendRequest& request) {
  if (!std::holds_alternative<std::monostate>(request.options)) {
    throw UsageError(fmt::format(
        "backend_options of group {} are PacelineOptions, but its backend is gloo, which "
        "has none: leave them out, or use the backend paceline",
        request.group_name));
  }
  ignore_broken_pipes();
  // Gloo also waits for missing ranks, but does not name them.
  if (!request.met) {
    distributed::StoreExchange(request).all_gather("here", base::Deadline::after(request.timeout));
  }
  auto options = c10d::ProcessGroupGloo::Options::create(request.timeout);
  options->devices = make_devices(request.host);
  auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(request.store, request.rank,
                                                             request.size, options);
  // A rank that left at once would close connections that other ranks still check.
  backend->barrier()->wait();
  return backend;
}

const bool gloo_registered =
    distributed::register_backend("gloo", {&make, c10d::ProcessGroup::BackendType::GLOO});

}  // namespace
}  // namespace paceline::backends
