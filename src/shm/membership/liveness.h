#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/process_stat.h"
#include "shm/membership/bootstrap.h"
#include "shm/memory/region_memory.h"

namespace paceline::shm {

// Checks which ranks of a group are alive.
class Liveness {
 public:
  // Marks the memory as open in this process, for the peers.
  Liveness(RegionMemory& memory, Membership membership, int rank);

  // How the other ranks' processes are watched; may be kept longer than the group.
  const std::shared_ptr<const Membership>& membership() const { return membership_; }

  // Whether a peer has left the group normally.
  bool has_left(int peer) const {
    return memory_.rank_block(peer).departed.load(std::memory_order_acquire) != 0;
  }
  // Whether its process has ended, or executes another program, though it has not left.
  bool has_died(int peer) const {
    // In this order: a rank sets `departed` before its process ends.
    return (process_of(peer).ended() || has_closed(peer)) && !has_left(peer);
  }
  bool is_here(int peer) const { return !has_left(peer) && !has_died(peer); }
  // "has left the group", "was lost (its process 4711 ended)".
  std::string describe_loss(int peer) const;
  // "its process 4711 is stopped"; empty if that is not so, or not known.
  std::string describe_stop(int peer) const { return base::describe_stop(process_of(peer).pid); }

 private:
  const Peer& process_of(int rank) const {
    return membership_->peers[static_cast<std::size_t>(rank)];
  }
  bool has_closed(int peer) const;
  bool looks_closed(int peer) const;

  struct Look {
    std::atomic<std::uint32_t> number = 0;
    std::atomic<bool> closed = false;
  };

  RegionMemory& memory_;
  std::shared_ptr<const Membership> membership_;
  int rank_;
  mutable std::vector<Look> looks_;  // by peer
};

}  // namespace paceline::shm
