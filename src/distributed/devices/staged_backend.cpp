#include "distributed/devices/staged_backend.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>

#include <chrono>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include "distributed/devices/streams.h"
#include "distributed/reported_wait.h"

namespace paceline::distributed {
namespace {

using Tensors = StagedBackend::Tensors;
using TensorLists = StagedBackend::TensorLists;
using WorkPtr = StagedBackend::WorkPtr;

at::Tensor on_cpu(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU);
}

// For a result that is written as a whole.
at::Tensor like(const at::Tensor& tensor) {
  return at::empty_like(tensor, tensor.options().device(at::kCPU));
}

// What `change` makes of each tensor.
template <typename Change>
Tensors each(const Tensors& tensors, const Change& change) {
  Tensors changed;
  for (const at::Tensor& tensor : tensors) changed.push_back(change(tensor));
  return changed;
}

template <typename Change>
TensorLists each(const TensorLists& lists, const Change& change) {
  TensorLists changed;
  for (const Tensors& tensors : lists) changed.push_back(each(tensors, change));
  return changed;
}

Tensors concatenate(const TensorLists& lists) {
  Tensors all;
  for (const Tensors& tensors : lists) all.insert(all.end(), tensors.begin(), tensors.end());
  return all;
}

// The host's Work, and where its results belong.
class StagedWork final : public SelfReportingWork {
 public:
  // `results` are the host's copies of `outputs`; `kept`, its inputs, live as long.
  StagedWork(WorkPtr host, Tensors outputs, Tensors results, Tensors kept)
      : host_(std::move(host)),
        outputs_(std::move(outputs)),
        results_(std::move(results)),
        kept_(std::move(kept)) {}

  bool isCompleted() override { return host_->isCompleted(); }
  bool isSuccess() const override { return host_->isSuccess(); }
  std::exception_ptr exception() const override { return host_->exception(); }
  int sourceRank() const override { return host_->sourceRank(); }
  void abort() override { host_->abort(); }
  Tensors result() override { return outputs_; }

  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout == kNoTimeout) {
      if (!host_->wait()) return false;
    } else {
      host_ = with_limited_wait(host_);
      TORCH_CHECK(wait_within(*host_, timeout), "the call took longer than the time limit");
    }
    put_back();
    // A callback of the future may have put the results back, on another stream.
    const std::lock_guard lock(mutex_);
    if (returned_) returned_->block(current_stream(outputs_.front().device()));
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<c10::Device> devices;
    if (!outputs_.empty() && !outputs_.front().is_cpu()) {
      devices.push_back(outputs_.front().device());
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), devices);
    host_->getFuture()->addCallback(
        [self = c10::intrusive_ptr<StagedWork>::unsafe_reclaim_from_nonowning(this),
         future](c10::ivalue::Future& host) {
          if (host.hasError()) return future->setError(host.exception_ptr());
          try {
            self->put_back();
            future->markCompleted(c10::IValue(self->outputs_));
          } catch (const std::exception&) {  // of the device
            future->setError(std::current_exception());
          }
        });
    return future;
  }

 private:
  void put_back() {
    const std::lock_guard lock(mutex_);
    if (results_.empty()) return;
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < results_.size(); ++i) outputs_[i].copy_(results_[i]);
    results_.clear();
    if (outputs_.front().is_cpu()) return;
    returned_.emplace(outputs_.front().device().type());
    returned_->record(current_stream(outputs_.front().device()));
  }

  WorkPtr host_;
  Tensors outputs_;
  std::mutex mutex_;
  Tensors results_;  // empty once they are put back
  std::optional<c10::Event> returned_{};
  Tensors kept_;
};

WorkPtr staged(WorkPtr host, Tensors outputs, Tensors results, Tensors kept = {}) {
  return c10::make_intrusive<StagedWork>(std::move(host), std::move(outputs), std::move(results),
                                         std::move(kept));
}

}  // namespace

StagedBackend::StagedBackend(c10::intrusive_ptr<c10d::Backend> host)
    : c10d::Backend(host->getRank(), host->getSize()), host_(std::move(host)) {}

WorkPtr StagedBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  Tensors copies = each(tensors, on_cpu);
  return staged(host_->broadcast(copies, options), tensors, copies);
}

WorkPtr StagedBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  Tensors copies = each(tensors, on_cpu);
  return staged(host_->allreduce(copies, options), tensors, copies);
}

WorkPtr StagedBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  Tensors copies = each(tensors, on_cpu);
  return staged(host_->allreduce_sparse(copies, options), tensors, copies);
}

WorkPtr StagedBackend::allreduce_coalesced(Tensors& tensors,
                                           const c10d::AllreduceCoalescedOptions& options) {
  Tensors copies = each(tensors, on_cpu);
  return staged(host_->allreduce_coalesced(copies, options), tensors, copies);
}

WorkPtr StagedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  Tensors copies = each(tensors, on_cpu);
  return staged(host_->reduce(copies, options), tensors, copies);
}

WorkPtr StagedBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& options) {
  TensorLists results = each(outputs, like);
  Tensors copies = each(inputs, on_cpu);
  auto work = host_->allgather(results, copies, options);
  return staged(std::move(work), concatenate(outputs), concatenate(results), copies);
}

WorkPtr StagedBackend::all_gather_single(at::Tensor& output, at::Tensor& input,
                                         const c10d::AllgatherOptions& options) {
  at::Tensor result = like(output);
  at::Tensor copy = on_cpu(input);
  return staged(host_->all_gather_single(result, copy, options), {output}, {result}, {copy});
}

WorkPtr StagedBackend::gather(TensorLists& outputs, Tensors& inputs,
                              const c10d::GatherOptions& options) {
  TensorLists results = each(outputs, like);
  Tensors copies = each(inputs, on_cpu);
  auto work = host_->gather(results, copies, options);
  return staged(std::move(work), concatenate(outputs), concatenate(results), copies);
}

WorkPtr StagedBackend::scatter(Tensors& outputs, TensorLists& inputs,
                               const c10d::ScatterOptions& options) {
  Tensors results = each(outputs, like);
  TensorLists copies = each(inputs, on_cpu);
  return staged(host_->scatter(results, copies, options), outputs, results, concatenate(copies));
}

WorkPtr StagedBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                      const c10d::ReduceScatterOptions& options) {
  Tensors results = each(outputs, like);
  TensorLists copies = each(inputs, on_cpu);
  return staged(host_->reduce_scatter(results, copies, options), outputs, results,
                concatenate(copies));
}

WorkPtr StagedBackend::reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                             const c10d::ReduceScatterOptions& options) {
  at::Tensor result = like(output);
  at::Tensor copy = on_cpu(input);
  return staged(host_->reduce_scatter_single(result, copy, options), {output}, {result}, {copy});
}

WorkPtr StagedBackend::all_to_all_single(at::Tensor& output, at::Tensor& input,
                                         std::vector<std::int64_t>& output_splits,
                                         std::vector<std::int64_t>& input_splits,
                                         const c10d::AllToAllOptions& options) {
  at::Tensor result = like(output);
  at::Tensor copy = on_cpu(input);
  return staged(host_->all_to_all_single(result, copy, output_splits, input_splits, options),
                {output}, {result}, {copy});
}

WorkPtr StagedBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                const c10d::AllToAllOptions& options) {
  Tensors results = each(outputs, like);
  Tensors copies = each(inputs, on_cpu);
  return staged(host_->alltoall(results, copies, options), outputs, results, copies);
}

WorkPtr StagedBackend::send(Tensors& tensors, int to, int tag) {
  Tensors copies = each(tensors, on_cpu);
  return staged(host_->send(copies, to, tag), {}, {}, copies);
}

WorkPtr StagedBackend::recv(Tensors& tensors, int from, int tag) {
  Tensors results = each(tensors, like);
  return staged(host_->recv(results, from, tag), tensors, results);
}

WorkPtr StagedBackend::recvAnysource(Tensors& tensors, int tag) {
  Tensors results = each(tensors, like);
  return staged(host_->recvAnysource(results, tag), tensors, results);
}

}  // namespace paceline::distributed
