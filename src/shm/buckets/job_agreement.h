#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "shm/buckets/second_level.h"
#include "shm/buckets/step_agreement.h"

namespace paceline::shm {

// True once a stage is complete. One that fails makes the group's failure; one that was aborted
// throws Mismatch, as if a peer on this node aborted the step. `what` it is, and the job's
// `global_ranks`, are for messages.
bool is_complete(const ControlBlocks& blocks, SecondLevel::Stage& stage, const std::string& what,
                 const GlobalRanks& global_ranks);
// Makes the exception that is being handled the group's failure, with the ranks that it names, or
// else `ranks`.
[[noreturn]] void fail_between_nodes(const ControlBlocks& blocks, const RankSet& ranks,
                                     const std::string& what);

// What the ranks of all nodes say of a step. Rank 0 of a node, its leader, collects it and checks
// that it goes together; the others of the node read it in the leader's control block.
class JobAgreement {
 public:
  JobAgreement(const ControlBlocks& blocks, StepAgreement& agreement, SecondLevel& between);

  void begin_step() { agreed_ = false; }
  // To be called once every rank of the node has published a bucket of the step. True once all
  // nodes have said what they had to, which then is in the StepAgreement.
  bool advance();
  bool is_leader() const { return blocks_.rank() == 0; }
  // By their places in the job.
  const GlobalRanks& global_ranks() const { return global_ranks_; }

  // What the leader collects at present; null if nothing.
  SecondLevel::Stage* stage() const { return stage_.get(); }
  void cancel() noexcept;
  // Never destroys it.
  void release_stage() { std::ignore = stage_.release(); }

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
  // Of the leader.
  enum class Phase { none, reports, flags } phase_ = Phase::none;
  std::unique_ptr<SecondLevel::Stage> stage_;
  std::shared_ptr<std::byte> all_;
  std::vector<RankReport> reports_;
};

}  // namespace paceline::shm
