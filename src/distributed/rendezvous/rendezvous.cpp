#include "distributed/rendezvous/rendezvous.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "base/address.h"
#include "base/deadline.h"
#include "base/wait_report.h"
#include "distributed/rendezvous/agent_round.h"
#include "distributed/rendezvous/file_store.h"
#include "distributed/rendezvous/local_store.h"
#include "distributed/rendezvous/memory_store.h"
#include "distributed/rendezvous/tcp_store.h"
#include "distributed/store_calls.h"
#include "distributed/store_exchange.h"
#include "distributed/translate.h"
#include "shm/membership/rank_set.h"

namespace paceline::distributed {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Why the rendezvous cannot be reached for now, as the thread that tries knows it; empty if it does
// not.
class Obstacle {
 public:
  void set(std::string text) {
    const std::lock_guard lock(mutex_);
    text_ = std::move(text);
  }
  // " (cannot resolve node0: ...)"
  std::string in_parentheses() const {
    const std::lock_guard lock(mutex_);
    return text_.empty() ? "" : fmt::format(" ({})", text_);
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
};

// A host may get its name late, as in Kubernetes. A TCPStore tries again as well, but does not say
// why it has to.
void await_address(const Plan& plan, const std::atomic<bool>& cancelled, Obstacle& obstacle) {
  constexpr std::chrono::milliseconds kPause{200};
  while (!cancelled) {
    try {
      base::resolve(plan.host, plan.port);
      return obstacle.set("");
    } catch (const UsageError& error) {
      obstacle.set(error.what());
    }
    std::this_thread::sleep_for(kPause);
  }
}

StorePtr open_store(const Plan& plan, const StorePtr& given, std::chrono::milliseconds timeout,
                    const std::string& prefix, const base::Deadline& deadline) {
  const auto with_prefix = [&](StorePtr store) {
    store->setTimeout(timeout);
    return c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store));
  };
  switch (plan.means) {
    case Plan::Means::given_store:
      // Its timeout is the program's.
      return c10::make_intrusive<c10d::PrefixStore>(prefix, given);
    case Plan::Means::alone:
      break;
    case Plan::Means::inherited:
      return with_prefix(c10::make_intrusive<MemoryStore>(
          plan.path, fmt::format("{} (PACELINE_STORE_FD, from `paceline run`)", plan.path)));
    case Plan::Means::local: {
      auto store = open_local_store(plan, prefix, deadline);
      store->setTimeout(timeout);
      return store;
    }
    case Plan::Means::tcp:
      return with_prefix(open_tcp_store(plan, timeout));
    case Plan::Means::file: {
      auto store = with_prefix(open_file_store(plan, "file://" + plan.path, deadline));
      claim_rank(*store, plan);
      return store;
    }
  }
  return with_prefix(c10::make_intrusive<c10d::HashStore>());
}

// The rank that serves the store to this one; none if it is not a rank, or not known.
std::optional<int> server_of(const Plan& plan) {
  const bool by_rank_0 = plan.means == Plan::Means::tcp && !plan.agent && !plan.serve;
  return by_rank_0 ? std::optional(0) : std::nullopt;
}

std::string place_of(const Plan& plan) {
  switch (plan.means) {
    case Plan::Means::given_store:
      return "the store that was given";
    case Plan::Means::tcp:
      return fmt::format("the rendezvous at {}, which {} serves,",
                         base::join_host_port(plan.host, plan.port),
                         plan.agent ? "the launcher" : "rank 0");
    case Plan::Means::local:
      return local_place(plan);
    case Plan::Means::alone:
    case Plan::Means::inherited:
    case Plan::Means::file:
      break;
  }
  return "the rendezvous at file://" + plan.path;
}

Timeout no_answer(const Plan& plan, const base::Deadline& deadline, const Obstacle& obstacle) {
  const char* const advice = plan.means == Plan::Means::tcp
                                 ? ": see that it runs and that nothing else holds the port"
                                 : "";
  return Timeout(
      fmt::format("{} did not answer within the timeout of {} s{}; this is rank {} of {}{}",
                  place_of(plan), deadline.budget().count() / 1000.0, obstacle.in_parentheses(),
                  plan.rank, plan.size, advice),
      server_of(plan) ? std::vector{*server_of(plan)} : std::vector<int>(), "connect", 0);
}

// If rank 0 has ended, the others cannot connect to its store, or get no answer there. While it
// lives, the store itself shows which ranks are lost.
void check_server(const shm::Membership& processes) {
  if (!processes.peers[0].ended()) return;
  shm::RankSet ended;
  for (std::size_t rank = 0; rank < processes.peers.size(); ++rank) {
    if (processes.peers[rank].ended()) ended.insert(static_cast<int>(rank));
  }
  throw_lost({}, ended);
}

// At a local store, the ranks that wait report what they know themselves: see local_store.
void report_no_answer(base::WaitReport& report, const Plan& plan, const Obstacle& obstacle) {
  if (plan.means == Plan::Means::local) return;
  report.check([&](const std::string& waited, auto) -> std::optional<base::WaitReport::Text> {
    if (plan.rank > base::WaitReport::kStrangers) return std::nullopt;
    return base::WaitReport::Text{
        fmt::format("rank {} of {} has waited {}: {} does not answer yet{}", plan.rank, plan.size,
                    waited, place_of(plan), obstacle.in_parentheses()),
        place_of(plan)};
  });
}

StorePtr open_in_time(const Plan& plan, const InitOptions& options, const std::string& prefix,
                      const shm::Membership* processes) {
  const auto deadline = base::Deadline::after(options.timeout);
  base::WaitReport report;
  const auto obstacle = std::make_shared<Obstacle>();
  try {
    const auto opened = call_store(
        deadline,
        [=, given = options.store, timeout = options.timeout](const auto& cancelled) {
          if (plan.means == Plan::Means::tcp && !plan.serve) {
            await_address(plan, cancelled, *obstacle);
          }
          return cancelled ? nullptr : open_store(plan, given, timeout, prefix, deadline);
        },
        [&] {
          if (processes != nullptr && server_of(plan)) check_server(*processes);
          report_no_answer(report, plan, *obstacle);
        });
    if (!opened || !*opened) throw no_answer(plan, deadline, *obstacle);
    return *opened;
  } catch (const c10d::TimeoutError&) {
    throw no_answer(plan, deadline, *obstacle);
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    throw Error(fmt::format("rank {} of {} cannot use {}: {}", plan.rank, plan.size, place_of(plan),
                            current_exception_text()));
  }
}

bool is_bootstrap_socket(int fd) {
  const auto option = [&](int name) {
    int value = -1;
    socklen_t size = sizeof value;
    return ::getsockopt(fd, SOL_SOCKET, name, &value, &size) == 0 ? value : -1;
  };
  return option(SO_DOMAIN) == AF_UNIX && option(SO_TYPE) == SOCK_SEQPACKET;
}

// In a process that inherits the variable, but not the sockets, the descriptors may be its own.
std::vector<base::UniqueFd> take_sockets(const base::Environment& environment, const Plan& plan) {
  const std::size_t expected = plan.rank == 0 ? static_cast<std::size_t>(plan.size) - 1 : 1;
  if (environment.bootstrap_sockets.size() != expected) {
    throw UsageError(
        fmt::format("PACELINE_BOOTSTRAP_SOCKETS names {} descriptors, rank {} of {} needs {}",
                    environment.bootstrap_sockets.size(), plan.rank, plan.size, expected));
  }
  std::set<int> distinct;
  for (const int fd : environment.bootstrap_sockets) {
    if (::fcntl(fd, F_GETFD) < 0) {
      throw UsageError(
          fmt::format("PACELINE_BOOTSTRAP_SOCKETS names descriptor {}, which is not open: start "
                      "this program directly under `paceline run`, or through "
                      "something that does not close descriptors",
                      fd));
    }
    if (is_bootstrap_socket(fd) && distinct.insert(fd).second) continue;
    throw UsageError(fmt::format(
        "PACELINE_BOOTSTRAP_SOCKETS names descriptor {}, which is not one of the sockets of "
        "`paceline run`: unset the variable for programs that a rank starts",
        fd));
  }
  std::vector<base::UniqueFd> sockets;
  for (const int fd : environment.bootstrap_sockets) {
    static_cast<void>(::fcntl(fd, F_SETFD, FD_CLOEXEC));
    sockets.emplace_back(fd);
  }
  return sockets;
}

// This machine's address by which the other ranks can reach it: the loopback address if all ranks
// are known to be on this host; the one that leads to rank 0; empty if neither is known.
std::string host_of(const Plan& plan) {
  const bool here = plan.means == Plan::Means::alone || plan.means == Plan::Means::inherited ||
                    plan.means == Plan::Means::local;
  if (here) return "127.0.0.1";
  return plan.means == Plan::Means::tcp ? base::host_towards(plan.host, plan.port) : "";
}

// Each attempt and each world of a process has keys of its own in a store that outlives it. A store
// that rank 0 serves ends with it, and torchrun's agents may count restarts differently.
std::string name_keys(const Plan& plan, const base::Environment& environment, int attempt) {
  const bool is_new = plan.means == Plan::Means::tcp && !plan.agent;
  return fmt::format("{}/{}", is_new ? 0 : environment.restart_count.value_or(0),
                     plan.world.empty() ? std::to_string(attempt) : plan.world);
}

}  // namespace

Rendezvous rendezvous(const Plan& plan, const InitOptions& options,
                      const base::Environment& environment, int attempt,
                      const shm::Membership* processes) {
  const bool has_round = plan.agent && !options.enable_reconfigure;
  const std::string prefix =
      "paceline/" + (has_round ? "agent/" + plan.world : name_keys(plan, environment, attempt));
  Rendezvous result{.rank = plan.rank,
                    .size = plan.size,
                    .store = open_in_time(plan, options, prefix, processes),
                    .store_server = server_of(plan)};
  if (has_round) {
    result.round = std::make_shared<AgentRound>(BackendRequest{.store = std::move(result.store),
                                                               .rank = plan.rank,
                                                               .size = plan.size,
                                                               .timeout = options.timeout,
                                                               .check_peers = [&] {
                                                                 if (processes != nullptr)
                                                                   check_server(*processes);
                                                               }});
    result.store = result.round->group_store();
  }
  if (plan.take_sockets) result.sockets = take_sockets(environment, plan);
  result.host = host_of(plan);
  return result;
}

}  // namespace paceline::distributed
