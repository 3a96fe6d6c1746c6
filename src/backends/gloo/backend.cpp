#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>

#include <paceline/error.h>

#include "base/deadline.h"
#include "distributed/backend.h"
#include "distributed/store_exchange.h"

namespace paceline::backends {
namespace {

// LibTorch's own Gloo. Ranks known to share a host use that address only. Otherwise Gloo uses the
// interface of GLOO_SOCKET_IFNAME, or of this machine's name, as in PyTorch.
c10::intrusive_ptr<c10d::Backend> make(const distributed::BackendRequest& request) {
  if (!std::holds_alternative<std::monostate>(request.options)) {
    throw UsageError(fmt::format(
        "backend_options of group {} are PacelineOptions, but its backend is gloo, which "
        "has none: leave them out, or use the backend paceline",
        request.group_name));
  }
  // Gloo also waits for missing ranks, but does not name them.
  if (!request.met) {
    distributed::StoreExchange(request).all_gather("here", base::Deadline::after(request.timeout));
  }
  auto options = c10d::ProcessGroupGloo::Options::create(request.timeout);
  const bool interface_given = std::getenv("GLOO_SOCKET_IFNAME") != nullptr;
  options->devices.push_back(request.host.empty() || interface_given
                                 ? c10d::ProcessGroupGloo::createDefaultDevice()
                                 : c10d::ProcessGroupGloo::createDeviceForHostname(request.host));
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
