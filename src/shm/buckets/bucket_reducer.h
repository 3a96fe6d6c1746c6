#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "shm/buckets/control_blocks.h"
#include "shm/buckets/second_level.h"
#include "shm/buckets/step_agreement.h"
#include "shm/buckets/step_progress.h"
#include "shm/buckets/two_level_reduction.h"
#include "shm/buckets/waits.h"

namespace paceline::shm {

struct BucketReducerOptions {
  std::uint32_t steps = 0;                // the first step has number steps + 1
  std::vector<std::string> parameters{};  // the names of the parameters in FrozenFlags
  // Null if this node has all ranks of the job. A forked child leaks it.
  std::shared_ptr<SecondLevel> between_nodes{};
  // Of buckets that are averaged. Unset: one leaf for each rank, as it must be with between_nodes.
  std::optional<LeafPlan> leaves{};
  bool sums = false;       // averages are not divided; steps have no weights then
  bool own_pages = false;  // no page of a bucket has anything else
  // Whether begin_step calls note_this_thread. False if it runs on a thread that works for another,
  // which waits meanwhile and calls it itself.
  bool notes_thread = true;
};

// Reduces a fixed set of buckets once per step, in any order of publication, independently of the
// group's calls. No rank waits before `finish`.
//
// A step runs: begin_step; write to data(b) and publish(b), for every b in any order, with any
// number of try_progress in between; finish. Then data(b) holds the reduced bucket on every rank.
// Until the next publish(b), data(b) is this rank's own again.
//
// Used by one thread at a time, which need not be the one that uses the group. In a forked child
// the calls of a step throw UsageError.
class BucketReducer {
 public:
  using Bucket = shm::Bucket;
  using Describe = DescribeBucket;
  using Options = BucketReducerOptions;

  // Collective. Waits as long as the group does at this time. Mismatch if the number or the
  // total size of the buckets differs.
  // `buckets`: the same on all ranks.
  // `describe`: the content of a bucket, for messages; not called later.
  BucketReducer(Group& group, std::span<const Bucket> buckets, const Describe& describe,
                Options options = {});
  BucketReducer(const BucketReducer&) = delete;
  BucketReducer& operator=(const BucketReducer&) = delete;
  // Aborts a step that is under way; peers may still write to the buckets, so their memory is
  // retired.
  ~BucketReducer();

  // This rank's memory for a bucket. It may outlive the reducer.
  const std::shared_ptr<std::byte>& data(std::size_t bucket) const { return data_[bucket]; }
  // Where ranks have several leaves: this rank's memory for the parts of an averaged bucket, which
  // it writes in place of data(b). Values are of LeafPlan::part_type. If that is the bucket's type,
  // the last part is data(b) and missing here. The others may be written before the step begins.
  const std::vector<std::shared_ptr<std::byte>>& parts(std::size_t bucket) const {
    return parts_[bucket];
  }

  // Tells the peers that this thread uses the group; see CallingThreads.
  void note_this_thread() { region_->threads().note_this_thread(); }
  // Ranks that begin a step with different numbers of forwards or different frozen parameters throw
  // Mismatch, since they would reduce gradients that do not belong together. `weights`, not
  // negative, are the weights of this rank's leaves in averages, relative to the others'; empty: 1
  // each. Values of leaves of weight 0 are not read. `frozen`: the flags that summary.frozen is the
  // fingerprint of.
  void begin_step(const StepSummary& summary, std::span<const double> weights = {},
                  FrozenFlags frozen = {});
  bool in_step() const { return in_step_; }
  const ControlBlocks& blocks() const { return blocks_; }
  std::uint32_t steps() const { return blocks_.step(); }

  // Makes `memory` the bucket in this step, in place of data(b); or that part of it, and the bucket
  // too if the part is. It must live until the step is finished or aborted, and must not be touched
  // after publish. Returns false and changes nothing if it is not a block allocated from the
  // region.
  bool use_in_place(std::size_t bucket, void* memory, std::size_t part = 0);
  void publish(std::size_t bucket);
  // Instead of publish: leaves the bucket unreduced. All ranks must skip the same buckets, else
  // Mismatch. At least one bucket must be published.
  void skip(std::size_t bucket);
  // Reduces this rank's slice of every bucket that all ranks have published. Never waits. Between
  // nodes a thread does it, and this throws what it threw.
  void try_progress();
  // Lets finish wait this much longer than the group's calls: other ranks may be in calls whose own
  // timeout names the cause more precisely.
  void extend_timeout(std::chrono::milliseconds more) {
    deadline_.timeout = base::Deadline::after(deadline_.timeout).remaining() + more;
  }
  // Finishes the step. The timeout applies until all ranks have published, and again until all have
  // reduced; between nodes it applies once more, and waits for other nodes last a second longer.
  // Throws like Group's calls, and Mismatch if a peer aborted the step before its part was done.
  void finish();
  // Whether all ranks have reduced their slices in this step, or the one finished last.
  bool is_reduced(std::size_t bucket) const {
    return blocks_.reached_by_all(bucket, &BucketWords::reduced);
  }
  // The last step that a rank of this node finished; also after a failure of the group.
  std::uint32_t finished(int rank) const {
    return blocks_.progress(rank).finished.load(std::memory_order_acquire);
  }
  // When finish was blocked, in the step that was finished last.
  using Wait = StepWait;
  const std::vector<Wait>& waits() const { return waits_; }
  // This rank's weight in the averages of the step finished last. All ranks' weights sum to 1;
  // with Options::sums each is 1.
  double share() const { return agreement_.share(); }
  // Whether the ranks began the step that was finished last with different numbers of
  // modifications; the same on all.
  bool modifications_differ() const { return agreement_.modifications_differ(); }

  // Aborts a step, and waits until every rank has aborted it, so that no peer touches this rank's
  // buckets any more. If a rank finished it, the ranks differ from here on, and Mismatch fails the
  // group. Returns false outside a step, where it does nothing.
  bool abort_step();

  bool failed() const { return region_->failed(); }
  // Makes `text` the failure that this and every other rank throws; this one is at fault.
  [[noreturn]] void fail(const std::string& text, FailureKind kind = FailureKind::mismatch);

 private:
  using BucketWords = ControlBlocks::BucketWords;

  void check_process() const;
  std::unique_ptr<StepProgress> make_progress();
  void finish_step();
  void finish_two_levels();
  // Runs `action`. If it throws, cancels the exchanges between nodes first: the step must be
  // aborted then, unless the group has failed.
  template <typename Action>
  void run_or_cancel(Action action);
  void place(std::size_t bucket, void* memory);
  void reset_places(std::size_t bucket);
  void* own_part(std::size_t bucket, std::size_t part) const;
  void await(BucketWait& context, int rank);
  void await_all(BucketWait& context);
  void await_all(std::size_t bucket, Word BucketWords::*word);
  void await_all(Word BucketWords::*word);
  void restart_deadline();
  void reduce_slice(std::size_t bucket);
  void average_slice(std::size_t bucket, const Slice& slice, std::span<void* const> to) const;

  std::shared_ptr<Region> region_;
  LeafPlan leaves_;
  std::vector<std::shared_ptr<std::byte>> data_;
  // By bucket: its parts that have memory of their own.
  std::vector<std::vector<std::shared_ptr<std::byte>>> parts_;
  TwoLevelReduction::LaneBuffers lanes_;    // until two_level_ has them
  std::unique_ptr<StepProgress> progress_;  // of two_level_; null on the only node
  ControlBlocks blocks_;
  StepAgreement agreement_;
  std::unique_ptr<TwoLevelReduction> two_level_;  // null on the only node
  std::vector<void*> places_;                     // by bucket: where it is in this step
  std::vector<double> ones_;                      // the weights of leaves, if none are given
  const bool notes_thread_;
  std::vector<void*> used_parts_;     // in place in this step
  std::vector<std::size_t> pending_;  // published here, slice not reduced yet
  std::vector<bool> skipped_;         // by bucket, in this step
  CallDeadline deadline_;             // of the current call
  std::vector<Wait> waits_;
  bool in_step_ = false;
};

}  // namespace paceline::shm
