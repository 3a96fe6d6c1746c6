#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <functional>
#include <span>
#include <utility>
#include <vector>

#include <paceline/distributed.h>

#include "distributed/backend.h"
#include "distributed/bucket_reducer.h"

namespace paceline::comm_hooks {

// A hook that is also this runs for a bucket once the future of the bucket before is completed.
// Callbacks of its futures may then make calls: all ranks make them in the same order.
class OneBucketAtATime {
 public:
  virtual ~OneBucketAtATime() = default;
};

// Buckets reduced by the user's communication hook. The hook runs for one bucket after the other,
// in ascending order, since its collectives are matched by their order. The hook does not get the
// last bucket: a bucket reducer of its own, `control`, reduces it and carries what ranks report to
// each other.
class HookBucketReducer final : public distributed::BucketReducer {
 public:
  using Hook = std::shared_ptr<c10d::CommHookInterface>;
  struct Input {
    c10d::GradBucket bucket;
    std::span<const std::size_t> parameters;  // their numbers in the model
  };
  using MakeInput = std::function<Input(std::size_t bucket)>;

  // Collective.
  HookBucketReducer(const c10::intrusive_ptr<c10d::ProcessGroup>& group, Hook hook,
                    const Options& options, MakeInput make_input);

  const at::Tensor& tensor(std::size_t bucket) const override;
  void begin_step(const shm::StepSummary& summary, Weights weights,
                  shm::FrozenFlags frozen) override;
  void prepare_thread() override { control_->prepare_thread(); }
  bool in_step() const override { return control_->in_step(); }
  std::uint32_t steps() const override { return control_->steps(); }
  void publish(std::size_t bucket) override;
  void skip(std::size_t bucket) override;
  void try_progress() override;
  void finish() override;
  bool is_reduced(std::size_t bucket) const override;
  const std::vector<Wait>& waits() const override { return waits_; }
  double share() const override { return control_->share(); }
  bool modifications_differ() const override {
    return !models_may_differ_ && control_->modifications_differ();
  }
  // The other ranks may be in a collective of their hooks without a counterpart here, so the step
  // cannot be aborted and all ranks throw.
  bool abort_step() override;
  bool failed() const override { return control_->failed(); }
  [[noreturn]] void fail(const std::string& text) override {
    control_->fail(text);
    __builtin_unreachable();  // GCC 12 ignores noreturn on a virtual function
  }
  [[noreturn]] void time_out(const std::string& text) override {
    control_->time_out(text);
    __builtin_unreachable();
  }

 private:
  struct Open {
    bool published = false;
    bool skipped = false;
    c10::intrusive_ptr<c10::ivalue::Future> result;
  };
  int own_rank() const;  // global
  void run_hooks();
  void await(std::size_t bucket);
  template <typename Body>
  void guarded(std::size_t bucket, Body&& body);

  ProcessGroup group_;
  Hook hook_;
  Describe describe_;
  MakeInput make_input_;
  std::chrono::milliseconds timeout_;
  bool one_at_a_time_;
  bool models_may_differ_ = false;
  c10::intrusive_ptr<distributed::ExtendedBackend> backend_;  // of `control`; null over others
  std::vector<int> all_ranks_;                                // of the group
  std::vector<at::Tensor> tensors_;
  std::vector<Open> open_;
  std::size_t next_ = 0;  // whose hook runs next
  // What hooks left to do after the last one, and by which bucket's.
  std::vector<std::pair<std::size_t, std::function<void()>>> after_last_;
  std::unique_ptr<BucketReducer> control_;
  std::vector<Wait> waits_;
};

}  // namespace paceline::comm_hooks
