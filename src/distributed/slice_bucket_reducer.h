#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <optional>
#include <vector>

#include <paceline/distributed.h>

#include "base/idle_work.h"
#include "distributed/bucket_reducer.h"
#include "distributed/summary_comparison.h"

namespace paceline::distributed {

// Buckets on the CPU whose averages follow a LeafPlan, over any c10d::Backend or in a group of one
// rank. Each rank sends every other rank its slice of each part, averages its own slice with our
// kernels, and gathers the averages: as many bytes as a ring all-reduce, if each rank has one part.
//
// A backend matches calls by their order, so parts are sent in ascending order of buckets, in any
// order of publication, and a report of each rank after them. A rank that aborts a step takes part
// in the remaining calls. What comes after the reports happens in finish.
class SliceBucketReducer final : public BucketReducer, private InPlaceGradients {
 public:
  // `backend`: null in a group of one rank.
  SliceBucketReducer(ProcessGroup group, c10::intrusive_ptr<c10d::Backend> backend,
                     const Options& options);

  const at::Tensor& tensor(std::size_t bucket) const override { return buckets_[bucket].tensor; }
  const at::Tensor& part(std::size_t bucket, std::size_t part) const override {
    return buckets_[bucket].parts[part];
  }
  void begin_step(const shm::StepSummary& summary, Weights weights,
                  shm::FrozenFlags frozen) override;
  bool in_step() const override { return in_step_; }
  std::uint32_t steps() const override { return step_; }
  // In a group of one rank, gradients may be anywhere.
  InPlaceGradients* in_place() override { return backend_ ? nullptr : this; }
  void publish(std::size_t bucket) override;
  // Throws UsageError.
  void skip(std::size_t bucket) override;
  void try_progress() override { base::do_idle_work(); }
  void finish() override;
  bool is_reduced(std::size_t /*bucket*/) const override { return !in_step_; }
  const std::vector<Wait>& waits() const override { return waits_; }
  double share() const override { return leaves_.weight_of(rank_, weights_) / divisor_; }
  bool modifications_differ() const override;
  bool abort_step() override;
  bool failed() const override { return false; }  // each rank's memory is its own
  [[noreturn]] void fail(const std::string& text) override;
  [[noreturn]] void time_out(const std::string& text) override;

 private:
  struct SliceBucket {
    Op op;
    shm::DataType type;
    std::int64_t slice;                    // elements of each rank, the last ones are padding
    at::Tensor padded;                     // all slices
    at::Tensor tensor;                     // without the padding
    std::vector<at::Tensor> padded_parts;  // of this rank
    std::vector<at::Tensor> parts;
    // By number of part: this rank's slice of each rank that has so many.
    std::vector<at::Tensor> received;
    at::Tensor average;  // of this rank's slice
    // In a group of one rank: where the parts are in this step.
    std::vector<at::Tensor> places{};
    bool published = false;  // in this step
  };

  bool use(std::size_t bucket, std::size_t part, const at::Tensor& gradient) override {
    buckets_[bucket].places[part] = gradient;
    return true;
  }

  SliceBucket make_bucket(const Bucket& bucket, bool pinned) const;
  std::size_t count_parts(Op op, int rank) const;
  void send(const SliceBucket& bucket, std::size_t part);
  void send_published();
  void send_report();
  void read_reports();
  void reduce(const SliceBucket& bucket, const at::Tensor& result) const;
  const void* source(const SliceBucket& bucket, int rank, std::size_t part) const;
  void gather(SliceBucket& bucket);
  void wait_for_works();
  void reduce_and_gather();

  ProcessGroup group_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  shm::LeafPlan leaves_;
  int rank_;
  int ranks_;
  std::vector<SliceBucket> buckets_;
  std::size_t sent_ = 0;                         // buckets, in this step
  std::optional<SummaryComparison> comparison_;  // none in a group of one rank
  at::Tensor own_report_;
  at::Tensor reports_;
  bool reported_ = false;  // in this step
  shm::FrozenFlags frozen_;
  std::vector<double> weights_;  // by leaf; empty if all are 1
  double divisor_ = 1;
  bool sums_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::uint32_t step_;
  bool in_step_ = false;
  bool aborted_ = false;  // by another rank, or by all because they differ
  std::vector<Wait> waits_;
};

}  // namespace paceline::distributed
