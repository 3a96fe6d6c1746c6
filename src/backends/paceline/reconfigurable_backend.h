#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "backends/paceline/backend.h"

namespace paceline::backends {

// The backend paceline with ranks that change: c10d's option enable_reconfigure. Each `reconfigure`
// ends the group that it has and forms another one, of the ranks whose handles it gets; they find
// each other by these, without a store. Until then, after `abort` and after a `reconfigure` that
// fails it has no group, and its calls throw UsageError.
//
// Ranks in messages and errors are those of the present group.
class ReconfigurableBackend final : public distributed::ExtendedBackend {
 public:
  using WorkPtr = PacelineBackend::WorkPtr;
  using Make = std::function<c10::intrusive_ptr<PacelineBackend>(std::shared_ptr<shm::Region>)>;

  // Does not wait for other ranks.
  ReconfigurableBackend(const distributed::BackendRequest& request, Make make);
  ~ReconfigurableBackend() override;

  bool supportsReconfigure() const override { return true; }
  // For one reconfigure: each gives this rank another handle.
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  // Collective over the ranks of the handles. Returns when the group is formed: the Work is
  // complete. Throws UsageError for invalid options, which change nothing; PeerLost or Timeout,
  // which name ranks by their positions among the handles; and Mismatch.
  WorkPtr reconfigure(const c10d::ReconfigureOptions& options) override;
  bool isInitialized() override { return present() != nullptr; }
  // Ends the group. Its other ranks throw PeerLost. A reconfigure that is under way goes on, but
  // throws Error in place of forming the group. Neither this, nor reconfigure or shutdown, may be
  // called by a hook.
  void abort() override;
  void shutdown() override;
  // SUCCESS if there is no group.
  c10d::ErrorType getError() override;

  const std::string getBackendName() const override { return "paceline"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  std::uint64_t getSequenceNumberForGroup() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return group("broadcast")->broadcast(tensors, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return group("all_reduce")->allreduce(tensors, options);
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return group("all_reduce")->allreduce_sparse(tensors, options);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return group("all_reduce_coalesced")->allreduce_coalesced(tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return group("reduce")->reduce(tensors, options);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    return group("all_gather")->allgather(outputs, inputs, options);
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    return group("all_gather_coalesced")->allgather_coalesced(outputs, inputs, options);
  }
  WorkPtr all_gather_single(at::Tensor& output, at::Tensor& input,
                            const c10d::AllgatherOptions& options) override {
    return group("all_gather_single")->all_gather_single(output, input, options);
  }
  WorkPtr all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                      const c10d::AllgatherOptions& options) override {
    return group("all_gather_coalesced")->all_gather_single_coalesced(outputs, inputs, options);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    return group("gather")->gather(outputs, inputs, options);
  }
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input,
                        const c10d::GatherOptions& options) override {
    return group("gather")->gather_single(output, input, options);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    return group("scatter")->scatter(outputs, inputs, options);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return group("reduce_scatter")->reduce_scatter(outputs, inputs, options);
  }
  WorkPtr reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& options) override {
    return group("reduce_scatter")->reduce_scatter_single(output, input, options);
  }
  WorkPtr reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return group("reduce_scatter_coalesced")
        ->reduce_scatter_single_coalesced(outputs, inputs, options);
  }
  WorkPtr all_to_all_single(at::Tensor& output, at::Tensor& input,
                            std::vector<std::int64_t>& output_splits,
                            std::vector<std::int64_t>& input_splits,
                            const c10d::AllToAllOptions& options) override {
    return group("all_to_all")
        ->all_to_all_single(output, input, output_splits, input_splits, options);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    return group("all_to_all")->alltoall(outputs, inputs, options);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return group("barrier")->barrier(options);
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    group("monitored_barrier")->monitoredBarrier(options, wait_all_ranks);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return group("send")->send(tensors, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return group("recv")->recv(tensors, from, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return group("recv")->recvAnysource(tensors, tag);
  }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { group("startCoalescing")->startCoalescing(); }
  WorkPtr endCoalescing() override { return group("endCoalescing")->endCoalescing(); }

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override {
    return group("split")->split(store, ranks, options);
  }

  bool supportsTensorAlloc(c10::DeviceIndex device) override {
    const auto present_group = present();
    return present_group && present_group->supportsTensorAlloc(device);
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return group("allocateTensor")->allocateTensor(size, options);
  }
  std::unordered_map<std::string, std::uint64_t> getMemoryStats() override {
    return group("getMemoryStats")->getMemoryStats();
  }

  // Hooks stay from group to group.
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(std::int64_t id, c10d::CompletionHook hook) override {
    hooks_->completion.add(id, std::move(hook));
  }
  void unregisterCompletionHook(std::int64_t id) override { hooks_->completion.remove(id); }
  bool supportsAbortHooks() const override { return true; }
  void registerAbortHook(std::int64_t id, c10d::AbortHook hook) override {
    hooks_->abort.add(id, std::move(hook));
  }
  void unregisterAbortHook(std::int64_t id) override { hooks_->abort.remove(id); }

  std::unique_ptr<distributed::BucketReducer> make_bucket_reducer(
      const distributed::BucketReducer::Options& options) override {
    return group("DistributedDataParallel")->make_bucket_reducer(options);
  }
  bool all_reduce_now(const at::Tensor& tensor, const c10d::ReduceOp& op) override {
    return group("all_reduce")->all_reduce_now(tensor, op);
  }
  at::Tensor allocate_shared(std::size_t bytes) override {
    return group("allocate_shared")->allocate_shared(bytes);
  }
  void abort_because(const std::string& text) noexcept override;
  void check_peers(const std::vector<int>& needed, const shm::OpContext& op) override;
  bool has_failed() const override;
  std::uint64_t call_count() override;
  bool is_busy_with(std::uint64_t calls) override;
  // The next group has other processes.
  std::shared_ptr<const shm::Membership> membership() const override { return nullptr; }

 private:
  using Group = c10::intrusive_ptr<PacelineBackend>;

  void check_not_forked(const char* operation) const;
  Group present() const;  // null if there is none
  // Throws UsageError, for `operation`, if there is none.
  Group group(const char* operation) const;
  void set_group(Group group, int aborts);
  void leave_group();
  // The ranks of the next group, by rank.
  struct Members {
    std::vector<shm::Endpoint> endpoints;
    int own = -1;
    std::uint64_t group = 0;  // see shm::join
  };
  // Throws UsageError.
  Members checked_members(const c10d::ReconfigureOptions& options) const;

  const Make make_;
  shm::RegionOptions region_options_;
  c10::intrusive_ptr<PacelineOptions> options_;
  std::shared_ptr<GroupHooks> hooks_ = std::make_shared<GroupHooks>();

  const shm::OwningProcess process_;
  std::mutex reconfiguring_;
  std::set<std::int64_t> uuids_;  // that have been used
  mutable std::mutex mutex_;      // guards what follows, held briefly
  int aborts_ = 0;                // so far
  Group group_;
  shm::ListeningEndpoint listening_;
};

}  // namespace paceline::backends
