#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "shm/buckets/leaf_plan.h"
#include "shm/buckets/step_values.h"

namespace paceline::distributed {

// A bucket reducer's ability to reduce gradients where autograd has put them.
class InPlaceGradients {
 public:
  // Makes `gradient`, a dense tensor of the type and count of part(bucket, part), that part in this
  // step: nothing is copied. Keep it until the step is finished or aborted. Returns false and
  // changes nothing if its memory does not allow that.
  virtual bool use(std::size_t bucket, std::size_t part, const at::Tensor& gradient) = 0;

 protected:
  ~InPlaceGradients() = default;
};

// Reduces a fixed set of buckets once per step, while other work goes on.
//
// A step runs: begin_step; write to tensor(b) and publish(b), for every b in any order, with
// try_progress in between; finish. Then tensor(b) holds the reduction on every rank. Only finish
// and abort_step wait, and over a c10d::Backend also begin_step with a weight or with buckets
// that ranks may skip. One thread at a time.
//
// Where ranks have several leaves (shm::LeafPlan), a rank writes sums to the parts of an averaged
// bucket instead; no bucket may be skipped then.
class BucketReducer {
 public:
  enum class Op { average, max };
  struct Bucket {
    std::int64_t count;
    at::ScalarType type;
    at::Device device;
    Op op;
    // Whether InPlaceGradients may take a gradient for it; only where supports_in_place.
    bool in_place = false;
    // Whether ranks may skip it, or other buckets of its step: then they compare their summaries
    // before they reduce anything.
    bool skips = false;
  };
  // Names the parameters of a bucket, for messages.
  using Describe = std::function<std::string(std::size_t bucket)>;
  struct Options {
    std::vector<Bucket> buckets{};
    Describe describe{};
    std::uint32_t steps = 0;                // the first step has number steps + 1
    std::vector<std::string> parameters{};  // the names of the parameters in FrozenFlags
    std::optional<shm::LeafPlan> leaves{};  // unset: one for each rank
    bool sums = false;                      // averages are not divided; steps have no weights then
    // Buckets on the CPU are copied to and from an accelerator: those in shared memory share no
    // page with anything else, so that they can be pinned, and others are pinned.
    bool staged = false;
    // Steps run on a thread of autograd's, as on an accelerator, while the thread that called
    // prepare_thread waits for it.
    bool on_autograd_thread = false;
    // On an accelerator: called once a bucket's average is the last thing in this stream, in finish
    // at the latest.
    std::function<void(std::size_t bucket, const c10::Stream&)> averaged{};
    // How much longer finish waits than the group's calls do, if the reducer sets the time.
    std::chrono::milliseconds extra_time{};
  };

  virtual ~BucketReducer() = default;

  // The bucket's flat tensor, the same one for the life of the reducer. Its memory may outlive it.
  virtual const at::Tensor& tensor(std::size_t bucket) const = 0;
  // Where this rank writes a part of the bucket, in the type of sums. The last part may be the
  // bucket itself; the others may be written before the step begins.
  virtual const at::Tensor& part(std::size_t bucket, std::size_t /*part*/) const {
    return tensor(bucket);
  }

  // Ranks that begin a step with different numbers of forwards or different frozen parameters throw
  // Mismatch, all of them the same, in finish at the latest. `weights`, not negative, are the
  // weights of this rank's leaves in averages, relative to the other ranks'. Either all ranks give
  // them, or no rank does and all leaves weigh the same. `frozen`: the flags that summary.frozen is
  // the fingerprint of. They must live until the step is finished or aborted.
  using Weights = std::span<const double>;
  virtual void begin_step(const shm::StepSummary& summary, Weights weights,
                          shm::FrozenFlags frozen) = 0;
  virtual bool in_step() const = 0;
  // How many steps have begun, including steps before the reducer was made.
  virtual std::uint32_t steps() const = 0;
  // Null where gradients are always copied into tensor(b).
  virtual InPlaceGradients* in_place() { return nullptr; }
  // Call on a thread before it calls backward: gradients as large as an in_place bucket are then
  // allocated where InPlaceGradients::use accepts them. With Options::on_autograd_thread, the ranks
  // know only from this which threads use the group (shm::CallingThreads).
  virtual void prepare_thread() {}
  virtual void publish(std::size_t bucket) = 0;
  // Instead of publish: leaves the bucket unreduced. All ranks must skip the same buckets, else
  // Mismatch. The last bucket must be published.
  virtual void skip(std::size_t bucket) = 0;
  virtual void try_progress() = 0;
  virtual void finish() = 0;
  // Whether a bucket that was published is reduced on all ranks.
  virtual bool is_reduced(std::size_t bucket) const = 0;
  // When finish was blocked, in the step that was finished last.
  using Wait = shm::StepWait;
  virtual const std::vector<Wait>& waits() const = 0;
  // This rank's weight in the averages of the step finished last. All ranks' weights sum to 1; with
  // Options::sums each is 1.
  virtual double share() const = 0;
  // Whether the ranks began the step that was finished last with different numbers of
  // modifications; the same on all.
  virtual bool modifications_differ() const = 0;
  // Aborts a step after an exception, so that the next one can begin; waits until all ranks have.
  // The content of the buckets is then undefined. Returns false outside a step, where it does
  // nothing. Throws Mismatch if another rank has finished the step.
  virtual bool abort_step() = 0;
  // Whether ranks that come late may still write into buckets, now and at any time from here on.
  virtual bool failed() const = 0;
  // Throws an Error with this text on this rank and, if the reducer can reach them, on the others.
  [[noreturn]] virtual void fail(const std::string& text) = 0;
  // The same with a Timeout that names this rank, if the reducer can reach the other ranks.
  [[noreturn]] virtual void time_out(const std::string& text) = 0;
};

// Whether bucket reducers of the group's backend for `device` have in_place(). `several_leaves`:
// ranks have them.
bool supports_in_place(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::DeviceType device,
                       bool several_leaves);

// The reducer that suits the group's backend for the device of the buckets, or a group of one rank,
// which needs none. Collective.
std::unique_ptr<BucketReducer> make_bucket_reducer(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, const BucketReducer::Options& options);

}  // namespace paceline::distributed
