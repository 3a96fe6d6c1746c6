#include "distributed/rendezvous/local_store.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "base/errno_error.h"
#include "base/hash.h"
#include "base/unique_fd.h"
#include "base/wait_report.h"
#include "distributed/rendezvous/memory_store.h"
#include "shm/membership/bootstrap_packets.h"
#include "shm/membership/socket.h"

namespace paceline::distributed {
namespace {

using base::UniqueFd;

using shm::Failure;
using shm::FailureKind;

constexpr std::size_t kMaxBytes = 2 * shm::FailureRecord::kMaxText;
// From a rank whose timeout expires before rank 0's.
constexpr const char* kTimedOut = "timed out";

Failure late(const Plan& plan, const shm::RankSet& missing, const base::Deadline& deadline) {
  return {
      FailureKind::timeout, missing,
      fmt::format("{} did not come to {} within the timeout of {} s", shm::describe_ranks(missing),
                  local_place(plan), static_cast<double>(deadline.budget().count()) / 1000.0)};
}

std::optional<base::WaitReport::Text> report_late(const Plan& plan, const shm::RankSet& missing,
                                                  const std::string& waited) {
  return base::WaitReport::Text{
      fmt::format("rank {} has waited {} for {}, which {} not come to {}", plan.rank, waited,
                  shm::describe_ranks(missing), shm::has_or_have(missing), local_place(plan)),
      local_place(plan)};
}

Failure lost(const Plan& plan, int rank) {
  return {FailureKind::peer_lost,
          {rank},
          fmt::format("rank {} ended before all ranks had come to {}", rank, local_place(plan))};
}

// A connection that has not said which rank it is, or a rank that waits for the others.
struct Connection {
  UniqueFd socket;
  std::optional<int> rank;
};

// Rank 0: gives the file to all other ranks, once all have come.
class FileSender {
 public:
  FileSender(const Plan& plan, const std::string& name, const base::Deadline& deadline)
      : plan_(plan), deadline_(deadline), listener_(shm::listen_abstract(name)) {}

  void give(int file) {
    while (!missing().empty()) wait_for_some();
    for (const Connection& connection : connections_) {
      if (connection.rank)
        shm::send_packet(connection.socket.get(), "store", {&file, 1}, deadline_);
    }
  }

 private:
  shm::RankSet missing() const {
    shm::RankSet here{0};
    for (const Connection& connection : connections_) {
      if (connection.rank) here.insert(*connection.rank);
    }
    return shm::RankSet::all(plan_.size) - here;
  }

  void wait_for_some() {
    std::vector<int> fds{listener_.get()};
    for (const Connection& connection : connections_) fds.push_back(connection.socket.get());
    const auto ready = shm::wait_readable(fds, report_.next_check(deadline_));
    report_.check(
        [&](const std::string& waited, auto) { return report_late(plan_, missing(), waited); });
    if (std::ranges::none_of(ready, std::identity()) && deadline_.expired()) {
      fail(late(plan_, missing(), deadline_));
    }
    // Backwards, as hear() may remove the connection.
    for (std::size_t i = connections_.size(); i > 0; --i) {
      if (ready[i]) hear(i - 1);
    }
    if (!ready[0]) return;
    UniqueFd socket = shm::accept_from_same_user(listener_.get());
    if (socket) connections_.push_back({std::move(socket), std::nullopt});
  }

  // Closes the connection of a process that is no rank.
  void hear(std::size_t index) {
    Connection& connection = connections_[index];
    const shm::Packet packet = shm::receive_packet(connection.socket.get(), kMaxBytes);
    if (connection.rank && packet.bytes == kTimedOut) fail(late(plan_, missing(), deadline_));
    if (connection.rank) fail(lost(plan_, *connection.rank));
    const shm::RankSet missing_before = missing();
    const auto hello = shm::decode_hello(packet.bytes);
    if (!hello) {
      connections_.erase(connections_.begin() + static_cast<std::ptrdiff_t>(index));
      return;
    }
    connection.rank = hello->rank;
    const bool is_new = missing_before.contains(hello->rank);
    if (is_new && hello->protocol == shm::kProtocol && hello->size == plan_.size) return;
    fail({FailureKind::mismatch,
          {hello->rank},
          hello->protocol != shm::kProtocol
              ? fmt::format("a process of another version of Paceline came to {}",
                            local_place(plan_))
              : fmt::format("a process came to {} as rank {} of {}, where {}", local_place(plan_),
                            hello->rank, hello->size,
                            is_new ? fmt::format("{} ranks meet", plan_.size)
                                   : "another process has that rank")});
  }

  [[noreturn]] void fail(const Failure& failure) {
    for (const Connection& connection : connections_) {
      if (connection.rank)
        shm::send_packet(connection.socket.get(), encode(failure), {}, deadline_);
    }
    throw_failure(failure, shm::kConnecting);
  }

  const Plan& plan_;
  base::Deadline deadline_;
  base::WaitReport report_;
  UniqueFd listener_;
  std::vector<Connection> connections_;
};

// The other ranks: gets the file from rank 0, which may come later.
UniqueFd get_file(const Plan& plan, const std::string& name, const base::Deadline& deadline) {
  constexpr int kMilliseconds = 5;
  UniqueFd socket;
  base::WaitReport report;
  while (!(socket = shm::connect_abstract(name))) {
    if (deadline.expired()) throw_failure(late(plan, {0}, deadline), shm::kConnecting);
    if (plan.rank <= base::WaitReport::kStrangers) {
      report.check([&](const std::string& waited, auto) { return report_late(plan, {0}, waited); });
    }
    ::poll(nullptr, 0, kMilliseconds);
  }
  shm::send_packet(socket.get(), encode(shm::Hello{.rank = plan.rank, .size = plan.size}), {},
                   deadline);
  if (!shm::wait_readable(socket.get(), deadline)) {
    // Rank 0 knows which ranks are missing.
    shm::send_packet(socket.get(), kTimedOut, {}, deadline);
    const auto grace = base::Deadline::after(std::chrono::seconds(1));
    if (!shm::wait_readable(socket.get(), grace)) {
      throw_failure(late(plan, {0}, deadline), shm::kConnecting);
    }
  }
  shm::Packet packet = shm::receive_packet(socket.get(), kMaxBytes);
  if (!packet.fds.empty()) return std::move(packet.fds[0]);
  throw_failure(shm::decode_failure(packet.bytes).value_or(lost(plan, 0)), shm::kConnecting);
}

}  // namespace

std::string local_place(const Plan& plan) {
  return fmt::format("the rendezvous of the processes on this machine ({})", plan.job);
}

c10::intrusive_ptr<c10d::Store> open_local_store(const Plan& plan, const std::string& prefix,
                                                 const base::Deadline& deadline) {
  const std::string name =
      fmt::format("paceline-{}-{:x}-{}", ::geteuid(), base::hash(plan.job), prefix);
  UniqueFd file;
  if (plan.rank == 0) {
    FileSender sender(plan, name, deadline);
    file = UniqueFd(::memfd_create("paceline-store", MFD_CLOEXEC));
    if (!file) throw base::errno_error("cannot make memory for the store");
    sender.give(file.get());
  } else {
    file = get_file(plan, name, deadline);
  }
  return c10::make_intrusive<c10d::PrefixStore>(
      prefix, c10::make_intrusive<MemoryStore>(fmt::format("/proc/self/fd/{}", file.get()),
                                               local_place(plan)));
}

}  // namespace paceline::distributed
