#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shm/buckets/second_level.h"
#include "shm/buckets/step_agreement.h"

namespace paceline::shm {

// What nodes exchange: a bucket, or the step summaries.
using Exchanged = std::optional<std::size_t>;

// Whether a stage is complete. If it failed, so does the group. If it was aborted, throws Mismatch,
// as if a peer on this node aborted the step. `what` and `global_ranks` appear in messages.
bool is_complete(const ControlBlocks& blocks, SecondLevel::Stage& stage, Exchanged what,
                 const GlobalRanks& global_ranks);
// Names the global ranks at fault, with their nodes.
std::string describe_at_fault(const RankSet& at_fault, const GlobalRanks& global_ranks);
// Makes the exception that is being handled the group's failure. At fault are the ranks that it
// names, or else `ranks`.
[[noreturn]] void fail_between_nodes(const ControlBlocks& blocks, const RankSet& ranks,
                                     Exchanged what);

// What the ranks of all nodes report of a step. Rank 0 of a node, its leader, gathers the reports
// and checks them for agreement. The node's other ranks read them in the leader's control block.
class JobAgreement {
 public:
  JobAgreement(const ControlBlocks& blocks, StepAgreement& agreement, SecondLevel& between);

  void begin_step() { agreed_ = false; }
  // Call once every rank of the node has published a bucket of the step. Returns true once the
  // reports of all nodes have arrived and agree; the StepAgreement is then set.
  bool advance();
  bool is_leader() const { return blocks_.rank() == 0; }
  // Global ranks by job index.
  const GlobalRanks& global_ranks() const { return global_ranks_; }

  // Call while this rank waits. Fails the group if other nodes never come to the exchange under
  // way.
  void check();
  // The leader's exchange under way, or null.
  SecondLevel::Stage* stage() const { return stage_.get(); }
  void cancel() noexcept;

 private:
  void collect_reports();
  void collect_flags();
  void advance_leader();
  void check(std::span<const StepSummary> summaries);
  void check_buckets();
  void check_finished();
  void check_flags();
  void collect(std::uint32_t phase, std::span<const std::byte> mine);
  void fail(const Disagreement& disagreement) const;

  const ControlBlocks& blocks_;
  StepAgreement& agreement_;
  SecondLevel& between_;
  GlobalRanks global_ranks_;
  std::uint64_t buckets_fingerprint_;
  bool agreed_ = false;
  // Used by the leader only, as are the next three.
  enum class Phase { none, reports, flags } phase_ = Phase::none;
  std::unique_ptr<SecondLevel::Stage> stage_;
  std::shared_ptr<std::byte> all_;
  std::vector<RankReport> reports_;
};

}  // namespace paceline::shm
