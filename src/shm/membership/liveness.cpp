#include "shm/membership/liveness.h"

#include <fmt/format.h>

#include "shm/membership/socket.h"

namespace paceline::shm {

Liveness::Liveness(RegionMemory& memory, Membership membership, int rank)
    : memory_(memory),
      membership_(std::make_shared<const Membership>(std::move(membership))),
      rank_(rank) {
  if (membership_->own_liveness && memory_.mapping().mark_open(rank)) {
    memory_.rank_block(rank).marked.store(1, std::memory_order_release);
  }
}

// A process id stays valid when its process executes another program, which knows nothing of the
// group. Between ranks of one process, as tests have them, locks say nothing.
bool Liveness::has_closed(int peer) const {
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
