#include "distributed/rendezvous/communicator.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/error.h>

#include "base/address.h"
#include "base/environment.h"
#include "distributed/rendezvous/tcp_store.h"
#include "distributed/translate.h"
#include "launch/job.h"
#include "shm/membership/rank_set.h"

namespace paceline::distributed {
namespace {

// A text in memory that is broadcast.
template <std::size_t size>
struct Text {
  std::array<char, size> bytes{};

  void set(std::string_view text) { text.copy(bytes.data(), size - 1); }
  std::string get() const { return bytes.data(); }
};

// What rank 0 broadcasts.
struct RendezvousInfo {
  enum class Outcome : int { chosen, usage_error, error } outcome = Outcome::chosen;
  int port = 0;
  Text<64> host;  // empty if all ranks are on one machine
  Text<64> world;
  Text<1024> error;
};

void check_agreement(const Communicator& communicator, const InitOptions& options) {
  if (options.rank || options.world_size || options.store || options.init_method != "env://") {
    throw UsageError(
        "init_process_group takes the ranks and their rendezvous from the communicator: leave out "
        ".rank, .world_size, .store and .init_method");
  }
  const int size = communicator.size();
  if (size < 1 || size > shm::kMaxWorldSize || communicator.rank() < 0 ||
      communicator.rank() >= size) {
    throw UsageError(
        fmt::format("a communicator says that this is rank {} of {}: worlds have 1 to {} ranks, "
                    "numbered from 0",
                    communicator.rank(), size, shm::kMaxWorldSize));
  }
}

std::vector<base::Address> resolve_if_possible(const std::string& host) {
  try {
    return base::resolve(host, 0);
  } catch (const UsageError&) {
    return {};
  }
}

// Of several machines. MASTER_ADDR may name another machine than rank 0's, which need not be the
// job's rank 0, and a loopback address left from something else.
base::Address choose_address(const std::optional<std::string>& master) {
  const std::string name = base::host_name();
  for (const std::string& host : {master.value_or(name), name}) {
    for (const base::Address& one : resolve_if_possible(host)) {
      if (!one.is_loopback() && base::is_own(one)) return one;
    }
  }
  const auto found = base::addresses_in_network();
  if (found.size() == 1) return found.front();
  std::vector<std::string> hosts;
  for (const base::Address& one : found) hosts.push_back(one.host());
  throw UsageError(fmt::format(
      "rank 0 does not know by which address the other machines reach {}: its name resolves to "
      "none of its addresses in a network{}, and it has {}. Set MASTER_ADDR to the right one",
      name, master ? fmt::format(", nor does MASTER_ADDR={}", *master) : "",
      hosts.empty() ? "no network" : fmt::format("{}", fmt::join(hosts, " and "))));
}

RendezvousInfo choose_rendezvous(const Communicator& communicator, const InitOptions& options) {
  RendezvousInfo info;
  info.world.set("communicator " + launch::random_run_id());
  if (communicator.one_machine()) return info;
  const base::Address address = choose_address(base::environment().master_addr);
  info.host.set(address.host());
  try {
    info.port = serve_at_free_port(address, options.timeout);
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    throw Error(fmt::format("rank 0 cannot serve the rendezvous at {}: {}", address.host(),
                            current_exception_text()));
  }
  return info;
}

template <typename Action>
std::exception_ptr exception_of(Action action) {
  try {
    action();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// Of an exception, for the other ranks.
RendezvousInfo describe(const std::exception_ptr& exception) {
  RendezvousInfo info;
  try {
    std::rethrow_exception(exception);
  } catch (const UsageError& error) {
    info.outcome = RendezvousInfo::Outcome::usage_error;
    info.error.set(error.what());
  } catch (const std::exception& error) {
    info.outcome = RendezvousInfo::Outcome::error;
    info.error.set(error.what());
  }
  return info;
}

}  // namespace

Plan plan_communicator(const Communicator& communicator, const InitOptions& options,
                       const std::function<void()>& check) {
  RendezvousInfo info;
  const bool chooses = communicator.rank() == 0 && communicator.size() > 1;
  const auto error = exception_of([&] {
    check();
    check_agreement(communicator, options);
    if (chooses) info = choose_rendezvous(communicator, options);
  });
  if (chooses && error) info = describe(error);
  if (communicator.size() > 1) communicator.broadcast(&info, sizeof(info));
  if (error) std::rethrow_exception(error);
  switch (info.outcome) {
    case RendezvousInfo::Outcome::chosen:
      break;
    case RendezvousInfo::Outcome::usage_error:
      throw UsageError(info.error.get());
    case RendezvousInfo::Outcome::error:
      throw Error(info.error.get());
  }
  Plan plan;
  plan.rank = communicator.rank();
  plan.size = communicator.size();
  if (plan.size == 1) return plan;
  plan.world = info.world.get();
  plan.host = info.host.get();
  if (plan.host.empty()) {
    plan.means = Plan::Means::local;
    plan.job = plan.world;
  } else {
    plan.means = Plan::Means::tcp;
    plan.port = info.port;
    plan.serve = plan.rank == 0;
  }
  return plan;
}

}  // namespace paceline::distributed
