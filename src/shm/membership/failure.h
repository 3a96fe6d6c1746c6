#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "shm/membership/rank_set.h"

namespace paceline::shm {

enum class FailureKind : std::uint32_t { none, peer_lost, timeout, mismatch };

// Why a group can no longer be used, in words that make sense on every rank.
struct Failure {
  FailureKind kind = FailureKind::none;
  RankSet ranks{};  // the global ranks at fault
  std::string text;
};

// The first failure of a group, in the shared region: the first rank that records one wins, and all
// others read it. Lives in zero-initialised shared memory and may be damaged by a peer: reading it
// is safe with any content.
class FailureRecord {
 public:
  static constexpr std::size_t kMaxText = 3072;

  // Does nothing if another failure was there before. A text beyond kMaxText is cut.
  void record(const Failure& failure);
  // Whether something has been, or is just being, recorded. One relaxed load.
  bool present() const { return state_.load(std::memory_order_relaxed) != kEmpty; }
  // The recorded failure. If its writer died half-way, a peer_lost that names no rank.
  Failure read() const;

 private:
  static constexpr std::uint32_t kEmpty = 0, kWriting = 1, kComplete = 2;

  std::atomic<std::uint32_t> state_;
  std::atomic<std::uint32_t> kind_;
  std::array<std::atomic<std::uint64_t>, RankSet::Words().size()> ranks_;
  std::atomic<std::uint32_t> length_;
  std::array<std::atomic<char>, kMaxText> text_;

  // An atomic that uses a lock would not work between processes.
  static_assert(decltype(state_)::is_always_lock_free &&
                decltype(ranks_)::value_type::is_always_lock_free &&
                decltype(text_)::value_type::is_always_lock_free);
};

// The global ranks of a group's ranks, and their nodes if the world has several: messages and
// errors use these.
class GlobalRanks {
 public:
  GlobalRanks() = default;  // the group is the world
  // Both by group rank; without nodes if there is one. Throws UsageError for a rank that no
  // RankSet holds.
  explicit GlobalRanks(std::vector<int> ranks, std::vector<int> nodes = {});

  int of(int rank) const {
    const auto at = static_cast<std::size_t>(rank);  // a damaged peer may say anything
    return at < ranks_.size() ? ranks_[at] : rank;
  }
  RankSet of(const RankSet& group_ranks) const;
  // By group rank.
  const std::vector<int>& nodes() const { return nodes_; }
  // "rank 3"; "ranks 8 and 9 on node 1", "rank 3 on node 0 and rank 9 on node 1"; counts more than
  // kMaxListed nodes: "ranks 8-63 on 9 nodes".
  std::string describe(const RankSet& group_ranks) const;
  // Names ranks that are not in the group without a node.
  std::string describe_global(const RankSet& global) const;

 private:
  std::vector<int> ranks_;
  std::vector<int> nodes_;
};

// What this rank was doing when it found out; goes into the error.
struct OpContext {
  const char* operation;
  std::uint64_t sequence;
};

// What the error says.
Failure failure_of(const PeerError& error);

// Throws PeerLost, Timeout or Mismatch.
[[noreturn]] void throw_failure(const Failure& failure, const OpContext& op);

}  // namespace paceline::shm
