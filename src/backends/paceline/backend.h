#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "backends/paceline/progress_thread.h"
#include "backends/paceline/work.h"
#include "distributed/backend.h"
#include "node/group.h"

namespace paceline::backends {

// Joins the ranks of the request, over its links or else its store. Collective.
std::shared_ptr<node::Region> form_region(distributed::BackendRequest request);

// c10d over shared memory: the ranks of one machine. Calls whose options say asyncOp run on a
// progress thread and return at once; the others run on the caller's thread.
class NodeBackend : public distributed::ExtendedBackend {
 public:
  explicit NodeBackend(std::shared_ptr<node::Region> region);
  ~NodeBackend() override;

  const std::string getBackendName() const override { return "paceline"; }
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> all_gather_single(at::Tensor& output, at::Tensor& input,
                                                   const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_single(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

  // Memory of the group's region, which collectives read and write in place.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  void abort() override { abort_because("abort was called"); }
  void shutdown() override;

  std::unique_ptr<distributed::BucketChannel> make_bucket_channel(
      const std::vector<distributed::BucketChannel::Bucket>& buckets,
      distributed::BucketChannel::Describe describe) override;
  void abort_because(const std::string& text) noexcept override;
  void check_peers() override { region_->check_peers({"new_group", 0}); }

 private:
  void check_usable(const char* operation) const;
  template <typename Body>
  c10::intrusive_ptr<c10d::Work> run(c10d::OpType type, std::vector<at::Tensor> outputs, bool async,
                                     std::chrono::milliseconds timeout, Body body);

  std::shared_ptr<node::Region> region_;
  node::Group group_;
  std::chrono::milliseconds timeout_;
  std::atomic<std::uint64_t> sequence_{0};  // of the last call
  // Behind a pointer: in a forked child, where its thread is missing, it cannot be destroyed.
  std::unique_ptr<ProgressThread> progress_;
};

}  // namespace paceline::backends
