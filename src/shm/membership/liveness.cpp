#include "shm/membership/liveness.h"

#include <fmt/format.h>

#include "shm/membership/socket.h"

namespace paceline::shm {

Liveness::Liveness(RegionMemory& memory, Membership membership, int rank)
    : memory_(memory),
      membership_(std::make_shared<const Membership>(std::move(membership))),
      rank_(rank),
      looks_(membership_->peers.size()) {
  if (membership_->own_liveness && memory_.mapping().mark_open(rank)) {
    memory_.rank_block(rank).marked.store(1, std::memory_order_release);
  }
}

// A process id stays valid when its process executes another program, which knows nothing of the
// group. That is rare, and asking costs a system call for each peer in each slice of a wait: so it
// is asked every tenth time.
bool Liveness::has_closed(int peer) const {
  constexpr std::uint32_t kEvery = 10;
  Look& look = looks_[static_cast<std::size_t>(peer)];
  if (look.number.fetch_add(1, std::memory_order_relaxed) % kEvery == 0 && looks_closed(peer)) {
    look.closed.store(true, std::memory_order_relaxed);
  }
  return look.closed.load(std::memory_order_relaxed);
}

// Between ranks of one process, as tests have them, locks say nothing.
bool Liveness::looks_closed(int peer) const {
  if (peer == rank_) return false;
  if (memory_.rank_block(peer).marked.load(std::memory_order_acquire) == 0) return false;
  const pid_t pid = process_of(peer).pid;
  if (pid != 0 && pid == process_of(rank_).pid) return false;
  return !memory_.mapping().is_open_elsewhere(peer);
}

std::string Liveness::describe_loss(int peer) const {
  if (has_left(peer)) return "has left the group";
  const Peer& lost = process_of(peer);
  // A process closes its files before it counts as ended.
  const bool ended =
      !lost.watch || wait_readable(lost.watch.get(), base::Deadline::after(kVerdict));
  return fmt::format("was lost (its process {}{})",
                     lost.pid != 0 ? fmt::format("{} ", lost.pid) : "",
                     ended ? "ended" : "executes another program");
}

}  // namespace paceline::shm
