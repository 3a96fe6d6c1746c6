#include "parallel/parameter_server/server.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <utility>

#include <paceline/error.h>

#include "base/log.h"
#include "base/start_thread.h"
#include "distributed/translate.h"
#include "parallel/parameter_server/protocol.h"

namespace paceline::parameter_server {
namespace {

// How late a new process of a worker may be taken in.
constexpr std::chrono::milliseconds kTakeInInterval{20};

}  // namespace

Server::Server(std::unique_ptr<Job> job, Shard shard, std::string description,
               const ParameterServerOptions& options)
    : job_(std::move(job)),
      shard_(std::move(shard)),
      description_(std::move(description)),
      options_(options),
      sessions_(static_cast<std::size_t>(job_->size() - options.servers)),
      updates_(job_->size() - options.servers, options.staleness,
               [this](const std::vector<int>& workers) {
                 std::vector<const FlatTensors*> gradients;
                 for (const int worker : workers) {
                   gradients.push_back(&session(worker).gradients);
                 }
                 shard_.step(gradients);
               }),
      coming_(base::Deadline::after(job_->timeout())) {
  for (Session& one : sessions_) {
    one.gradients = FlatTensors(shard_.parameters(), [](std::size_t bytes) {
      return at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
    });
  }
}

void Server::announce(Job& job) {
  if (job.announce() == 1) return;
  job.announce_end();
  throw PeerLost(fmt::format("rank {}, a server, was lost, and with it the parameters and the "
                             "optimizer that it held: no new process can take its place, so start "
                             "the job again, from a checkpoint",
                             job.rank()),
                 {job.rank()}, "ParameterServer", 0);
}

Server::~Server() {
  end("the server's ParameterServer was destroyed");
}

void Server::serve() {
  if (std::exchange(served_, true)) throw UsageError("serve was called twice on a ParameterServer");
  coming_ = base::Deadline::after(job_->timeout());
  try {
    for (;;) {
      updates_.await_change(is_any_absent() ? kTakeInInterval : base::Deadline::kLongest);
      updates_.check_failure();
      if (updates_.is_over() && !awaits_replacements()) break;
      take_in_workers();
      give_up_late_workers();
    }
  } catch (...) {
    end(distributed::current_exception_text());
    throw;
  }
  end("serve has returned");
  if (updates_.lost().size() == sessions_.size()) throw_all_lost();
}

bool Server::is_absent(int worker) {
  const std::lock_guard lock(sessions_mutex_);
  return session(worker).ended;
}

bool Server::is_any_absent() {
  const std::lock_guard lock(sessions_mutex_);
  return std::ranges::any_of(sessions_, &Session::ended);
}

void Server::take_in_workers() {
  for (int worker = 0; worker < static_cast<int>(sessions_.size()); ++worker) {
    if (!is_absent(worker) || is_closed_) continue;
    const auto process = find(worker);
    if (process && process->number > session(worker).number) start(worker, *process);
  }
}

// The store may be in another process, which may end before this server.
std::optional<Announcement> Server::find(int worker) {
  try {
    return job_->find(rank_of(worker));
  } catch (const Mismatch& error) {
    if (updates_.presence(worker) == Presence::awaited) lose(worker, error.what());
    return std::nullopt;
  } catch (const Error& error) {
    is_closed_ = true;
    base::log(LogLevel::warning, "server {}: no further process can come: {}", job_->rank(),
              error.what());
    return std::nullopt;
  }
}

void Server::start(int worker, const Announcement& process) {
  Session& its = session(worker);
  if (its.thread.joinable()) its.thread.join();
  its.number = process.number;
  its.ended = false;
  updates_.meet(worker);
  its.thread = base::start_thread([this, worker, process] { run(worker, process); });
}

void Server::run(int worker, const Announcement& process) noexcept {
  std::string reason;
  try {
    admit(worker, process);
  } catch (...) {
    reason = distributed::current_exception_text();
  }
  {
    // First, so that a new process can be taken in as soon as this one is seen to be lost.
    const std::lock_guard lock(sessions_mutex_);
    session(worker).pair.reset();
    session(worker).ended = true;
  }
  reason.empty() ? updates_.leave(worker) : lose(worker, reason);
}

void Server::lose(int worker, const std::string& reason) {
  base::log(LogLevel::warning, "server {}: worker {} is lost: {}", job_->rank(), rank_of(worker),
            reason);
  updates_.lose(worker, reason);
}

void Server::admit(int worker, const Announcement& process) {
  const auto pair =
      job_->meet(job_->rank(), rank_of(worker), process, [this] { updates_.check_failure(); });
  pair->set_timeout(base::Deadline::kLongest);  // a worker's step may take any time
  {
    const std::lock_guard lock(sessions_mutex_);
    session(worker).pair = pair;
  }
  updates_.check_failure();  // end() may have missed the pair
  try {
    obey(worker, *pair);
  } catch (const PeerError&) {
    throw;
  } catch (...) {
    pair->abort(distributed::current_exception_text());
    throw;
  }
}

void Server::introduce(int worker, Pair& pair) {
  session(worker).limit = std::chrono::milliseconds(pair.receive_number());
  const std::string difference =
      compare(description_, job_->rank(), pair.receive_text(), rank_of(worker));
  pair.send_text(difference);
  if (!difference.empty()) throw Mismatch(difference, {rank_of(worker)}, "ParameterServer", 0);
}

void Server::push(int worker, Pair& pair) {
  const std::int64_t computed_at = pair.receive_number();
  const auto& message = session(worker).gradients.memory();
  pair.receive(message);
  {
    const std::lock_guard lock(sessions_mutex_);
    session(worker).bytes_received += static_cast<std::int64_t>(message.nbytes());
  }
  try {
    pair.send_number(updates_.push(worker, computed_at, session(worker).limit));
  } catch (const LateWorkers& late) {
    send_late(pair, late);
  }
}

void Server::pull(int worker, Pair& pair, FlatTensors& parameters) {
  try {
    pair.send_number(updates_.pull(worker, session(worker).limit,
                                   [&] { parameters.write(shard_.parameters()); }));
  } catch (const LateWorkers& late) {
    return send_late(pair, late);
  }
  pair.send(parameters.memory());
  const std::lock_guard lock(sessions_mutex_);
  session(worker).bytes_sent += static_cast<std::int64_t>(parameters.memory().nbytes());
}

void Server::send_late(Pair& pair, const LateWorkers& late) const {
  std::vector<int> ranks;
  for (const int worker : late.workers) ranks.push_back(rank_of(worker));
  parameter_server::send_late(pair, ranks);
}

// Until the worker leaves.
void Server::obey(int worker, Pair& pair) {
  FlatTensors parameters(shard_.parameters(),
                         [&](std::size_t bytes) { return pair.allocate(bytes); });
  for (;;) {
    switch (static_cast<Command>(pair.receive_number())) {
      case Command::introduce:
        introduce(worker, pair);
        break;
      case Command::join:
        pair.send_number(updates_.join(worker));
        break;
      case Command::enter:
        updates_.enter(worker, pair.receive_number());
        break;
      case Command::pull:
        pull(worker, pair, parameters);
        break;
      case Command::push:
        push(worker, pair);
        break;
      case Command::leave:
        return pair.send_number(0);
      default:
        throw Error(fmt::format("rank {} sent an unknown command", rank_of(worker)));
    }
  }
}

// Workers that have not come in time count as lost. They may still come.
void Server::give_up_late_workers() {
  if (!coming_.expired()) return;
  for (int worker = 0; worker < static_cast<int>(sessions_.size()); ++worker) {
    if (updates_.presence(worker) != Presence::awaited || !is_absent(worker)) continue;
    lose(worker, fmt::format("it did not come within the timeout of {} s",
                             coming_.budget().count() / 1000.0));
  }
}

// After all workers were lost. None can train without all servers.
bool Server::awaits_replacements() {
  const bool may_come = job_->replaces_processes() && !is_closed_ &&
                        updates_.lost().size() == sessions_.size() && !has_server_ended();
  if (!may_come || !updates_.is_over()) {
    alone_.reset();
    return false;
  }
  if (!alone_) alone_ = base::Deadline::after(job_->timeout());
  return !alone_->expired();
}

bool Server::has_server_ended() const {
  for (int rank = 0; rank < options_.servers; ++rank) {
    if (job_->has_ended(rank)) return true;
  }
  return false;
}

void Server::end(const std::string& why) noexcept {
  updates_.fail(std::make_exception_ptr(Error(why)));
  {
    const std::lock_guard lock(sessions_mutex_);
    for (const Session& one : sessions_) {
      if (one.pair) one.pair->abort(why);
    }
  }
  for (Session& one : sessions_) {
    if (one.thread.joinable()) one.thread.join();
  }
  job_->announce_end();
}

void Server::throw_all_lost() const {
  std::string text = "all workers were lost without having left:";
  std::vector<int> ranks;
  for (const auto& [worker, reason] : updates_.lost()) {
    text += fmt::format(" rank {}: {};", rank_of(worker), reason);
    ranks.push_back(rank_of(worker));
  }
  text.pop_back();
  throw PeerLost(text, std::move(ranks), "serve", 0);
}

ParameterServerStats Server::stats() const {
  auto stats = updates_.stats();
  std::map<int, ParameterServerWorkerStats> by_rank;
  const std::lock_guard lock(sessions_mutex_);
  for (auto& [worker, its] : stats.workers) {
    const Session& session = sessions_[static_cast<std::size_t>(worker)];
    its.bytes_sent = session.bytes_sent;
    its.bytes_received = session.bytes_received;
    by_rank[rank_of(worker)] = its;
  }
  stats.workers = std::move(by_rank);
  return stats;
}

}  // namespace paceline::parameter_server
