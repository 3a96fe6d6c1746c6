#include "parallel/parameter_server/job.h"

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <cerrno>
#include <limits>
#include <sstream>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "base/environment.h"
#include "base/log.h"
#include "base/open_pidfd.h"
#include "base/parse.h"
#include "distributed/forked_child.h"
#include "distributed/make_group.h"
#include "distributed/rendezvous/rendezvous.h"
#include "distributed/store_calls.h"
#include "distributed/store_exchange.h"
#include "distributed/translate.h"
#include "parallel/ddp/wrapped_model.h"
#include "shm/membership/socket.h"

namespace paceline::parameter_server {
namespace {

// How many this process has entered. Every process numbers them alike, also a new one.
std::atomic<int> jobs_entered = 0;

InitOptions checked_init(InitOptions options) {
  distributed::check_forked_child();
  if (options.backend != "paceline") {
    throw UsageError(
        fmt::format("ParameterServer over the backend {}: it needs paceline, which notices the end "
                    "of a process for each pair of ranks by itself",
                    options.backend));
  }
  if (options.enable_reconfigure) {
    throw UsageError(
        "ParameterServer with .enable_reconfigure: leave it out; processes may come and go anyway");
  }
  options.timeout = distributed::checked_timeout(options.timeout);
  return options;
}

// Bootstrap sockets stay for a world, and replaced processes may take part.
distributed::Plan plan_of(InitOptions options, const base::Environment& environment) {
  options.enable_reconfigure = true;
  auto plan = distributed::plan_rendezvous(options, environment, false);
  plan.world = fmt::format("parameter server {}", jobs_entered++);
  return plan;
}

std::string key_of(int rank) {
  return fmt::format("rank {}", rank);
}

// See BackendRequest.
std::vector<int> nodes_of_pair(const distributed::Placement& own,
                               const distributed::Placement& other, int server, int worker) {
  const bool one = own.variables && other.variables ? own.variables->node == other.variables->node
                                                    : own.machine == other.machine;
  if (one) return {};
  if (distributed::find_backend("paceline", true) != nullptr) return {0, 1};
  throw UsageError(fmt::format(
      "ParameterServer: server {} and worker {} run on different nodes, which the backend paceline "
      "does not connect in this build: it has no libsodium",
      server, worker));
}

// Watches the other process of a pair, if it is visible from here. Throws PeerLost if it has ended.
std::shared_ptr<const shm::Membership> watch(const shm::Endpoint& own, const shm::Endpoint& other,
                                             int other_place, const shm::GlobalRanks& ranks) {
  if (own.pids != other.pids || own.machine != other.machine) return nullptr;
  auto processes = std::make_shared<shm::Membership>();
  processes->peers.resize(2);
  auto& peer = processes->peers[static_cast<std::size_t>(other_place)];
  peer = {base::open_pidfd(other.pid), other.pid};
  if (!peer.watch && errno == ESRCH) distributed::throw_lost(ranks, {other_place});
  return processes;
}

}  // namespace

std::string Announcement::encode() const {
  return fmt::format("{}\n{}\n{}\n{}", number, servers, endpoint.encode(), placement.encode());
}

Announcement Announcement::decode(int rank, const std::string& text) {
  constexpr int kEndpointLines = 4;
  std::istringstream stream(text);
  Announcement result;
  std::string line;
  std::string endpoint;
  std::getline(stream, line);
  const auto number =
      base::parse_number<std::int64_t>(line, 0, std::numeric_limits<std::int64_t>::max());
  std::getline(stream, line);
  const auto servers = base::parse_number<int>(line, 1, shm::kMaxWorldSize);
  for (int i = 0; i < kEndpointLines && std::getline(stream, line); ++i) endpoint += line + "\n";
  result.endpoint = shm::Endpoint::decode(endpoint);
  const std::string rest{std::istreambuf_iterator<char>(stream), {}};
  const auto placement = distributed::Placement::decode(rest);
  if (!number || !servers || !placement) {
    throw Error(fmt::format("the record of rank {} in the store is malformed: {}", rank, text));
  }
  result.number = *number;
  result.servers = *servers;
  result.placement = *placement;
  return result;
}

Job::Job(const ParameterServerOptions& options) : options_(checked_init(options.init)) {
  const auto& environment = base::environment();
  const auto plan = plan_of(options_, environment);
  auto met = distributed::rendezvous(plan, options_, environment, 0, nullptr);
  store_ = std::move(met.store);
  round_ = std::move(met.round);
  host_ = std::move(met.host);
  rank_ = met.rank;
  size_ = met.size;
  replaces_processes_ = environment.max_replacements.value_or(0) > 0;
  own_.servers = options.servers;
  own_.endpoint = shm::Endpoint::own(false);
  own_.placement = distributed::Placement::own(environment, plan.launched);
}

std::int64_t Job::announce() {
  distributed::translate("announcing this rank in the store", [&] {
    own_.number = store_->add(key_of(rank_) + " processes", 1);
    store_->set(key_of(rank_), own_.encode());
  });
  return own_.number;
}

void Job::announce_end() noexcept {
  try {
    Announcement end = own_;
    end.number = Announcement::kEnded;
    store_->set(key_of(rank_), end.encode());
  } catch (const std::exception&) {
    base::log(LogLevel::debug, "leaving the parameter server's job: {}",
              distributed::current_exception_text());
  }
}

std::optional<std::string> Job::read(int rank) const {
  return distributed::translate("looking for a rank in the store",
                                [&]() -> std::optional<std::string> {
                                  if (!store_->check({key_of(rank)})) return std::nullopt;
                                  return store_->get_to_str(key_of(rank));
                                });
}

std::optional<Announcement> Job::find(int rank) const {
  const auto text = read(rank);
  return text ? std::optional(decode(rank, *text)) : std::nullopt;
}

bool Job::has_ended(int rank) const {
  const auto text = read(rank);
  return text && Announcement::decode(rank, *text).number == Announcement::kEnded;
}

// Of two ranks that count the servers differently, one may not expect the other to come.
Announcement Job::decode(int rank, const std::string& text) const {
  auto found = Announcement::decode(rank, text);
  if (found.servers != own_.servers) {
    throw Mismatch(
        ddp::option_difference(fmt::format("servers = {}", own_.servers),
                               fmt::format("servers = {}", found.servers), {rank_, rank}),
        {rank}, "ParameterServer", 0);
  }
  if (found.number != Announcement::kEnded) return found;
  throw PeerLost(fmt::format("rank {}, a server, has ended", rank), {rank}, "connect", 0);
}

Announcement Job::await(int rank) const {
  const auto deadline = base::Deadline::after(options_.timeout);
  const auto found = distributed::call_store(deadline, [=, *this](const auto& cancelled) {
    distributed::await_keys(*store_, {key_of(rank)},
                            [&] { return cancelled || deadline.expired(); });
    return read(rank);
  });
  if (found && *found) return decode(rank, **found);
  throw Timeout(fmt::format("rank {}, a server, did not come within the timeout of {} s; this is "
                            "rank {} of {}",
                            rank, deadline.budget().count() / 1000.0, rank_, size_),
                {rank}, "connect", 0);
}

std::shared_ptr<Pair> Job::meet(int server, int worker, const Announcement& other,
                                const std::function<void()>& check) const {
  const bool serves = rank_ == server;
  const auto number = serves ? other.number : own_.number;
  distributed::BackendRequest request{
      .store = c10::make_intrusive<c10d::PrefixStore>(
          fmt::format("{} {} {}", server, worker, number), store_),
      .rank = serves ? 0 : 1,
      .size = 2,
      .timeout = options_.timeout,
      .group_name = fmt::format("of server {} and worker {}", server, worker),
      .options = options_.backend_options,
      .members = {server, worker},
      .nodes = nodes_of_pair(own_.placement, other.placement, server, worker),
      .host = host_,
      .check_peers = check};
  request.processes = watch(own_.endpoint, other.endpoint, serves ? 1 : 0, request.global_ranks());
  return std::make_shared<Pair>(std::move(request));
}

}  // namespace paceline::parameter_server
