#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "backends/paceline/p2p_progress_thread.h"
#include "backends/paceline/progress_threads.h"
#include "backends/paceline/tensors.h"
#include "backends/paceline/work.h"
#include "base/state_source.h"
#include "distributed/backend.h"
#include "shm/buckets/second_level.h"
#include "shm/collectives/group.h"
#include "shm/collectives/monitored_barrier.h"
#include "shm/p2p/mailbox.h"

namespace paceline::backends {

// The options of a group, as c10d has them.
struct PacelineOptions : c10d::Backend::Options {
  explicit PacelineOptions(std::chrono::milliseconds limit = kBackendDefaultTimeout)
      : Options("paceline", limit) {}
  c10::intrusive_ptr<Options> clone() const override {
    return c10::make_intrusive<PacelineOptions>(*this);
  }

  // The limit for the staging buffers of all ranks together, in bytes.
  std::size_t staging_bytes = shm::RegionOptions().staging_bytes;
  // From which size on parts are moved by one copy: see RegionOptions.
  std::optional<std::size_t> single_copy_bytes{};

  void set(const shm::RegionOptions& options);
  // The same for a group that is to be made.
  paceline::PacelineOptions for_request() const;
};

// The region of the request's group, as its options say.
shm::RegionOptions region_options(const distributed::BackendRequest& request);
// Connects the ranks of the request, over its sockets if it has them, else over its store.
// Collective.
std::shared_ptr<shm::Region> form_region(distributed::BackendRequest request);

// c10d over shared memory: the ranks of one machine. Calls whose options say asyncOp run on a
// progress thread and return at once; the others run on the caller's thread.
class PacelineBackend : public distributed::ExtendedBackend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  explicit PacelineBackend(std::shared_ptr<shm::Region> region)
      : PacelineBackend(std::make_shared<shm::Group>(std::move(region))) {}
  ~PacelineBackend() override;

  const std::string getBackendName() const override { return "paceline"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setTimeout(std::chrono::milliseconds timeout) override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr all_gather_single(at::Tensor& output, at::Tensor& input,
                            const c10d::AllgatherOptions& options) override;
  WorkPtr all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                      const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input,
                        const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr all_to_all_single(at::Tensor& output, at::Tensor& input,
                            std::vector<std::int64_t>& output_splits,
                            std::vector<std::int64_t>& input_splits,
                            const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // endCoalescing returns a Work for the asynchronous calls that this thread has made since
  // startCoalescing. Starting again drops the calls collected before, as after an exception.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // A backend for `ranks`; null on other ranks.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;

  // Memory of the group's region, which collectives read and write in place.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  std::unordered_map<std::string, std::uint64_t> getMemoryStats() override;

  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(std::int64_t id, c10d::CompletionHook hook) override {
    hooks_->completion.add(id, std::move(hook));
  }
  void unregisterCompletionHook(std::int64_t id) override { hooks_->completion.remove(id); }
  // Whether no call, message or callback of this rank is under way.
  bool is_idle() { return progress_->is_idle() && callbacks_->is_idle() && mailbox_->idle(); }
  // Call it before anything else.
  void share_hooks(std::shared_ptr<GroupHooks> hooks) { hooks_ = std::move(hooks); }
  bool supportsAbortHooks() const override { return true; }
  void registerAbortHook(std::int64_t id, c10d::AbortHook hook) override {
    hooks_->abort.add(id, std::move(hook));
  }
  void unregisterAbortHook(std::int64_t id) override { hooks_->abort.remove(id); }

  c10d::ErrorType getError() override;
  void abort() override { abort_because("abort was called"); }
  void shutdown() override;  // not by a hook

  std::unique_ptr<distributed::BucketReducer> make_bucket_reducer(
      const distributed::BucketReducer::Options& options) override;
  bool all_reduce_now(const at::Tensor& tensor, const c10d::ReduceOp& op) override;
  at::Tensor allocate_shared(std::size_t bytes) override;
  void abort_because(const std::string& text) noexcept override;
  void check_peers(const std::vector<int>& needed, const shm::OpContext& op) override {
    region_->check_peers(needed, op);
  }
  bool has_failed() const override { return region_->has_failed(); }
  std::uint64_t call_count() override { return progress_->count(); }
  bool is_busy_with(std::uint64_t calls) override { return progress_->is_busy_with(calls); }
  std::shared_ptr<const shm::Membership> membership() const override {
    return region_->peers().membership();
  }

 protected:
  // Which of c10d's calls it is: its name for messages, and for the profiler.
  struct Kind {
    c10d::OpType type;
    const char* name;
    const char* title;
  };

  // `local`: the ranks of the group that are on this node. `ranks`: the group's global ranks.
  PacelineBackend(std::shared_ptr<shm::Collectives> group, std::shared_ptr<shm::Group> local,
                  const shm::GlobalRanks& ranks);

  shm::Region& region() const { return *region_; }  // of the local group
  // Ends the threads and leaves the group. A destructor calls its own class's.
  virtual void leave();
  virtual void pass_monitored_barrier(std::chrono::milliseconds timeout, bool wait_all_ranks) {
    monitored_barrier_.pass(timeout, wait_all_ranks);
  }
  void check_usable(const char* operation) const;
  // The group's timeout if the call has none.
  std::chrono::milliseconds effective_timeout(std::chrono::milliseconds timeout) const;
  WorkPtr coalesced(WorkPtr work);
  // To or from a rank of the local group, or any of them. `source`: the sender's rank in the group.
  WorkPtr message(const Kind& kind, const Tensors& tensors, int peer, int tag,
                  std::optional<int> source = {});
  // What ends a message with this work, on any thread: `flat` is written back, if there is one.
  std::function<void(std::exception_ptr)> completion(const c10::intrusive_ptr<PacelineWork>& work,
                                                     std::shared_ptr<Flat> flat) const;

  // Of the ranks of this node; `make_between_nodes` returns null if there is no other.
  std::unique_ptr<distributed::BucketReducer> make_shm_bucket_reducer(
      const distributed::BucketReducer::Options& options,
      const std::function<std::shared_ptr<shm::SecondLevel>()>& make_between_nodes);

  // For split: adds what the parts of this group inherit from it, and makes the backend of a part,
  // whose ranks all call it.
  virtual void add_inherited(distributed::BackendRequest& /*part*/) const {}
  virtual c10::intrusive_ptr<Backend> make_part(distributed::BackendRequest part) const;

 private:
  // A call whose arguments are checked.
  struct Call {
    Kind kind;
    Tensors inputs;  // shown to a profiler
    Tensors outputs;
    std::size_t group_calls = 1;  // made by its body, which share the timeout
  };

  explicit PacelineBackend(const std::shared_ptr<shm::Group>& group)
      : PacelineBackend(group, group, group->region()->global_ranks()) {}

  int checked_root(const Kind& kind, std::int64_t root) const;
  // CallOptions: c10d's of the call. In run.h.
  template <typename CallOptions, typename Body>
  WorkPtr run(Call call, const CallOptions& options, Body body);
  // The result lands on `root`, without one on all ranks.
  void reduce_in_place(const at::Tensor& tensor, const c10d::ReduceOp& op, const Reduction& how,
                       std::optional<int> root = {});
  // Pairs of tensors. In each, one tensor is the parts of all ranks, one after the other.
  WorkPtr all_gather_whole(const Kind& kind, const Tensors& outputs, const Tensors& inputs,
                           const c10d::AllgatherOptions& options);
  WorkPtr reduce_scatter_whole(const Kind& kind, const Tensors& outputs, const Tensors& inputs,
                               const c10d::ReduceScatterOptions& options);

  const std::shared_ptr<shm::Collectives> group_;
  const std::shared_ptr<shm::Group> local_group_;
  const std::shared_ptr<shm::Region> region_;  // of the local group
  std::shared_ptr<shm::Mailbox> mailbox_;
  shm::MonitoredBarrier monitored_barrier_;
  c10::intrusive_ptr<PacelineOptions> options_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<std::uint64_t> sequence_{0};  // of the last call
  // A Work may outlive the backend.
  std::shared_ptr<GroupHooks> hooks_ = std::make_shared<GroupHooks>();
  std::mutex coalescing_mutex_;
  std::map<std::thread::id, std::vector<WorkPtr>> coalescing_;  // by the thread that coalesces
  // Behind pointers, since they cannot always be destroyed: not in a forked child, which lacks
  // their threads, and not by a callback on one of these threads.
  std::unique_ptr<ProgressThreads> progress_;
  std::unique_ptr<P2PProgressThread> p2p_progress_;
  // Runs the callbacks of messages, which keep it alive.
  std::shared_ptr<ProgressThreads> callbacks_ = std::make_shared<ProgressThreads>();
  base::StateSource source_;
};

}  // namespace paceline::backends
