#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <vector>

#include <paceline/distributed.h>

#include "distributed/bucket_reducer.h"

namespace paceline::distributed {

// The asynchronous all-reduces of a step's buckets over any c10d::Backend. A backend matches calls
// by their order, so buckets start in ascending order, in any order of publication.
class BucketWorks {
 public:
  using Bucket = BucketReducer::Bucket;

  // `tensors`: what is reduced for each bucket. `sums`: as in BucketReducer::Options.
  BucketWorks(c10::intrusive_ptr<c10d::Backend> backend, std::vector<Bucket> buckets,
              std::vector<at::Tensor> tensors, bool sums);

  // `share`: this rank's weight in averages, divided by that of all ranks; unset: all weigh the
  // same.
  void begin_step(std::optional<double> share);
  void publish(std::size_t bucket);
  void skip(std::size_t bucket) { settle(bucket, State::skipped); }
  bool all_started() const { return works_.size() == buckets_.size(); }
  // Starts also the buckets that are neither published nor skipped; their values do not matter.
  void start_rest();
  bool is_reduced(std::size_t bucket) const {
    return bucket < works_.size() && (!works_[bucket] || works_[bucket]->isCompleted());
  }
  // On an accelerator these may only make the current stream wait.
  void wait(const ProcessGroup& group);
  void wait(const ProcessGroup& group, std::size_t bucket);

 private:
  enum class State { open, published, skipped };

  void settle(std::size_t bucket, State state);
  void start();
  void scale(const at::Tensor& bucket) const;

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::vector<Bucket> buckets_;
  std::vector<at::Tensor> reduced_;
  bool sums_;
  std::optional<double> share_;
  std::vector<State> state_;
  // Of buckets that were published before they could be started: when the stream has them.
  std::vector<std::optional<c10::Event>> ready_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

// This rank's weight, not negative, divided by the sum of all ranks' weights. Collective over the
// backend, which takes CPU tensors. Throws Mismatch about step `step` unless the sum is positive
// and finite.
double share_of(double weight, c10d::Backend& backend, const ProcessGroup& group,
                std::uint32_t step);

}  // namespace paceline::distributed
