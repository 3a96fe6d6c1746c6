#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shm/collectives/calling_threads.h"
#include "shm/membership/at_exit.h"
#include "shm/membership/bootstrap.h"
#include "shm/membership/cross_memory_reader.h"
#include "shm/membership/failure.h"
#include "shm/membership/liveness.h"
#include "shm/memory/region_memory.h"
#include "shm/sync/wait_ladder.h"
#include "shm/wait_context.h"

namespace paceline::shm {

struct RegionOptions {
  std::string name = "world";                                    // for messages
  GlobalRanks global_ranks{};                                    // for messages and errors
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  // of each call
  // The limit for the staging buffers of all ranks together.
  std::size_t staging_bytes = std::size_t{64} << 20;
  // What each rank can allocate; a page uses memory only once it is touched. 0: as much as the
  // machine has.
  std::size_t arena_bytes = 0;
  // From which size of its largest part on the unregistered parts of a rank in a scatter or an
  // all_to_all are read from the memory of its process, if the system allows it. Unset: where that
  // is faster.
  std::optional<std::size_t> single_copy_bytes{};
};

// What the ranks of one group on one machine share: memory, liveness of the peers, the group's
// failure, and waits for each other.
//
// Blocks allocated from its memory keep it alive through the shared_ptr. Everything but waiting may
// be called from any thread. In a forked child check_usable throws UsageError, and the destructor
// only unmaps.
class Region {
 public:
  // Collective over the ranks of the exchange, at the ends of the sockets, or at the endpoints.
  static std::shared_ptr<Region> create(Exchange& exchange, const RegionOptions& options);
  static std::shared_ptr<Region> create(BootstrapSockets sockets, int rank, int size,
                                        const RegionOptions& options);
  // See join.
  static std::shared_ptr<Region> create(const std::vector<Endpoint>& endpoints, int rank,
                                        base::UniqueFd listener, std::uint64_t group,
                                        const RegionOptions& options);
  // How much memory a group of `size` ranks shares.
  static Layout layout(int size, const RegionOptions& options);

  // `mapping` is as large as layout(size, options) of rank 0, and zero when the first rank comes.
  Region(const std::shared_ptr<Mapping>& mapping, Membership membership, int rank, int size,
         const RegionOptions& options);
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  int rank() const { return rank_; }
  int size() const { return size_; }
  const RegionOptions& options() const { return options_; }
  const GlobalRanks& global_ranks() const { return options_.global_ranks; }

  // Whether the ranks outnumber the cores that they have together. May become false while ranks map
  // the region; after a round in which all take part, it is the same on all ranks.
  bool oversubscribed() const { return size_ > memory_->group_block().cores.count(); }

  RegionMemory& memory() const { return *memory_; }
  const Liveness& peers() const { return peers_; }
  const CrossMemoryReader& cross_memory() const { return cross_memory_; }
  CallingThreads& threads() { return threads_; }

  // Memory of this rank; throws the group's failure, or Error, if there is no room.
  void* allocate_or_throw(std::size_t bytes, std::size_t alignment = Arena::kAlignment);

  // Sets a word of this rank and wakes the ranks that sleep on it.
  void publish(Word& word, std::uint32_t value);
  // Returns once `word`, written by `peer`, is at `target` or past it, at once if it is. Throws the
  // group's failure, or PeerLost or Timeout, which then becomes the group's failure.
  void await(const Word& word, std::uint32_t target, int peer, WaitContext& context) {
    if (!reached(word, target)) await_slowly(word, target, peer, context);
  }
  static bool reached(const Word& word, std::uint32_t target) {
    return static_cast<std::int32_t>(word.load(std::memory_order_acquire) - target) >= 0;
  }

  // Rings a peer's doorbell, or listens at this rank's: see Doorbell. A failure of the group ends
  // listening too.
  void ring(int peer) { memory_->rank_block(peer).doorbell.ring(); }
  void ring_peers();
  std::uint32_t rings() const { return memory_->rank_block(rank_).doorbell.rings(); }
  void listen(std::uint32_t heard);

  bool failed() const { return memory_->group_block().failure.present(); }
  // The group's failure; of kind none if there is none.
  Failure failure() const;
  bool in_forked_child() const { return process_.is_forked_child(); }
  // Makes this the group's failure unless it has one, and throws the group's failure.
  [[noreturn]] void fail(const Failure& failure, const OpContext& op);
  // Makes the loss of a peer the group's failure; `where` describes the call that waits for it.
  [[noreturn]] void fail_lost(int peer, const std::string& where, const OpContext& op);
  // Whether this rank is to report that a rank is late: no other rank has done so after `since`.
  bool claim_report(int late, std::chrono::steady_clock::time_point since);
  // Tells ranks that wait for this one that a thread of it waits for a message to or from a global
  // rank, until it does not. Of several threads, the last one counts.
  void begin_awaiting(int global_rank);
  void end_awaiting(int global_rank);
  // Between global ranks, on any node.
  std::optional<int> awaited_by(int global_rank) const;
  // Whether a global rank, on any node, has left the group normally, as far as it is known here.
  bool has_left(int global_rank) const;
  void set_left_elsewhere(const RankSet& global_ranks);
  // The rank of this group that is a global rank; nullopt if none is.
  std::optional<int> find(int global_rank) const;
  // Throws if the group has failed, this rank has left it or this process is a forked child.
  void check_usable(const OpContext& op) const;
  // Throws the group's failure. The death of any peer becomes that failure, and so does the
  // departure of one of `needed`.
  void check_peers(const std::vector<int>& needed, const OpContext& op);
  // Whether the group has failed or lost a rank. Records nothing.
  bool has_failed() const;
  // Records a failure with an exception's text, which the peers throw; if another rank has ended
  // before, the text names it first.
  void abort(const std::string& text) noexcept;
  // Tells the peers that this rank makes no further call. The destructor does it too.
  void depart() noexcept;
  bool departed() const { return departed_; }

 private:
  void await_slowly(const Word& word, std::uint32_t target, int peer, WaitContext& context);
  WaitLadder ladder() const { return WaitLadder(oversubscribed()); }
  void sleep(const Word& word, std::uint32_t target, int peer);
  void poll_for_a_slice(const Word& word, std::uint32_t target, WaitContext& context);
  void check_progress(const Word& word, std::uint32_t target, int peer, WaitContext& context);
  [[noreturn]] void fail_late(int peer, const WaitContext& context);
  [[noreturn]] void throw_recorded(const OpContext& op) const;

  int rank_;
  int size_;
  RegionOptions options_;
  std::unique_ptr<RegionMemory> memory_;
  Liveness peers_;
  CrossMemoryReader cross_memory_;
  CallingThreads threads_;
  OwningProcess process_;
  std::atomic<bool> departed_ = false;
  AtExit depart_at_exit_;
};

}  // namespace paceline::shm
