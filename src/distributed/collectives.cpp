#include <paceline/collectives.h>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstring>
#include <utility>

#include "base/deadline.h"
#include "base/log.h"
#include "distributed/process_state.h"
#include "distributed/translate.h"

namespace paceline {

using distributed::translate;

namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Tensors = std::vector<at::Tensor>;

// Null on ranks that are no members: their call does nothing, as in PyTorch.
BackendPtr backend_of(const ProcessGroup& group, c10::DeviceType device, const char* operation) {
  if (group.is_member()) {
    return translate(operation, [&] { return group.c10d()->getBackend(device); });
  }
  base::log(LogLevel::warning, "{} on a rank that is no member of the group does nothing",
            operation);
  return nullptr;
}

c10::DeviceType device_of(const at::Tensor& tensor, const char* operation) {
  if (tensor.defined()) return tensor.device().type();
  throw UsageError(std::string(operation) + " of an undefined tensor");
}

// Backends differ in what they make of strides, and in whether they take a concatenation or a
// stack: all of them get contiguous tensors, and for the single-tensor calls flat ones.
Tensors contiguous(const Tensors& tensors) {
  Tensors dense;
  for (const at::Tensor& tensor : tensors) dense.push_back(tensor.contiguous());
  return dense;
}

// Every call is this twice: started, and waited for unless it is asynchronous. With asyncOp off,
// the backend may do it on this thread. `body` gets the contiguous tensors.
template <typename Start>
Work start(const ProcessGroup& group, const char* operation, Tensors tensors, Start&& body) {
  const BackendPtr backend = backend_of(
      group, tensors.empty() ? c10::DeviceType::CPU : device_of(tensors[0], operation), operation);
  if (!backend) return {};
  auto dense = translate(operation, [&] { return contiguous(tensors); });
  auto work = translate(operation, [&] { return body(*backend, dense); });
  return {std::move(work), std::move(tensors), std::move(dense)};
}

Tensors with(const at::Tensor& first, const Tensors& others) {
  Tensors all{first};
  all.insert(all.end(), others.begin(), others.end());
  return all;
}

Work start_all_reduce(const at::Tensor& tensor, const AllReduceOptions& options, bool async) {
  return start(options.group, "all_reduce", {tensor}, [&](c10d::Backend& backend, Tensors& dense) {
    return backend.allreduce(dense, {.reduceOp = options.op, .asyncOp = async});
  });
}

Work start_broadcast(const at::Tensor& tensor, const BroadcastOptions& options, bool async) {
  return start(options.group, "broadcast", {tensor}, [&](c10d::Backend& backend, Tensors& dense) {
    const int root = distributed::group_rank_of(options.group, options.src);
    return backend.broadcast(dense, {.rootRank = root, .asyncOp = async});
  });
}

Work start_all_gather(const Tensors& tensors, const at::Tensor& tensor,
                      const GatherOptions& options, bool async) {
  return start(options.group, "all_gather", with(tensor, tensors),
               [&](c10d::Backend& backend, Tensors& dense) {
                 Tensors input{dense[0]};
                 std::vector<Tensors> outputs{Tensors(dense.begin() + 1, dense.end())};
                 return backend.allgather(outputs, input, {.asyncOp = async});
               });
}

Work start_all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input,
                                  const GatherOptions& options, bool async) {
  return start(options.group, "all_gather_into_tensor", {input, output},
               [&](c10d::Backend& backend, Tensors& dense) {
                 at::Tensor from = dense[0].view({-1});
                 at::Tensor to = dense[1].view({-1});
                 return backend.all_gather_single(to, from, {.asyncOp = async});
               });
}

Work start_reduce_scatter(const at::Tensor& output, const Tensors& inputs,
                          const ReduceScatterOptions& options, bool async) {
  return start(options.group, "reduce_scatter", with(output, inputs),
               [&](c10d::Backend& backend, Tensors& dense) {
                 Tensors to{dense[0]};
                 std::vector<Tensors> from{Tensors(dense.begin() + 1, dense.end())};
                 return backend.reduce_scatter(to, from,
                                               {.reduceOp = options.op, .asyncOp = async});
               });
}

Work start_reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                                 const ReduceScatterOptions& options, bool async) {
  return start(options.group, "reduce_scatter_tensor", {output, input},
               [&](c10d::Backend& backend, Tensors& dense) {
                 at::Tensor to = dense[0].view({-1});
                 at::Tensor from = dense[1].view({-1});
                 return backend.reduce_scatter_single(to, from,
                                                      {.reduceOp = options.op, .asyncOp = async});
               });
}

Work start_barrier(const BarrierOptions& options, bool async) {
  return start(options.group, "barrier", {}, [&](c10d::Backend& backend, Tensors& /*dense*/) {
    c10d::BarrierOptions request;
    request.asyncOp = async;
    return backend.barrier(request);
  });
}

}  // namespace

Work::Work(c10::intrusive_ptr<c10d::Work> work, Tensors tensors, Tensors dense)
    : work_(std::move(work)), tensors_(std::move(tensors)), dense_(std::move(dense)) {}

void Work::wait() {
  if (!work_) return;
  translate("wait", [&] { work_->wait(); });
  write_back();
}

void Work::write_back() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (!dense_[i].is_same(tensors_[i])) tensors_[i].copy_(dense_[i]);
  }
  tensors_.clear();
  dense_.clear();
}

void Work::wait(std::chrono::milliseconds timeout) {
  if (!work_) return;
  // Zero means for ever to c10d, and its own timeout error is not of one type over the backends.
  const auto deadline = base::Deadline::after(timeout);
  try {
    work_->wait(std::max(timeout, 1ms));
    write_back();
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    if (work_->isCompleted() || !deadline.expired()) return wait();
    throw Timeout("the operation is not complete after " +
                      std::to_string(static_cast<double>(timeout.count()) / 1000.0) + " s",
                  {}, "wait", 0);
  }
}

bool Work::is_completed() const {
  return !work_ || work_->isCompleted();
}

void all_reduce(const at::Tensor& tensor, const AllReduceOptions& options) {
  start_all_reduce(tensor, options, false).wait();
}
void broadcast(const at::Tensor& tensor, const BroadcastOptions& options) {
  start_broadcast(tensor, options, false).wait();
}
void all_gather(const Tensors& tensors, const at::Tensor& tensor, const GatherOptions& options) {
  start_all_gather(tensors, tensor, options, false).wait();
}
void all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input,
                            const GatherOptions& options) {
  start_all_gather_into_tensor(output, input, options, false).wait();
}
void reduce_scatter(const at::Tensor& output, const Tensors& inputs,
                    const ReduceScatterOptions& options) {
  start_reduce_scatter(output, inputs, options, false).wait();
}
void reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                           const ReduceScatterOptions& options) {
  start_reduce_scatter_tensor(output, input, options, false).wait();
}
void barrier(const BarrierOptions& options) {
  start_barrier(options, false).wait();
}

Work all_reduce_async(const at::Tensor& tensor, const AllReduceOptions& options) {
  return start_all_reduce(tensor, options, true);
}
Work broadcast_async(const at::Tensor& tensor, const BroadcastOptions& options) {
  return start_broadcast(tensor, options, true);
}
Work all_gather_async(const Tensors& tensors, const at::Tensor& tensor,
                      const GatherOptions& options) {
  return start_all_gather(tensors, tensor, options, true);
}
Work all_gather_into_tensor_async(const at::Tensor& output, const at::Tensor& input,
                                  const GatherOptions& options) {
  return start_all_gather_into_tensor(output, input, options, true);
}
Work reduce_scatter_async(const at::Tensor& output, const Tensors& inputs,
                          const ReduceScatterOptions& options) {
  return start_reduce_scatter(output, inputs, options, true);
}
Work reduce_scatter_tensor_async(const at::Tensor& output, const at::Tensor& input,
                                 const ReduceScatterOptions& options) {
  return start_reduce_scatter_tensor(output, input, options, true);
}
Work barrier_async(const BarrierOptions& options) {
  return start_barrier(options, true);
}

std::string broadcast_bytes(std::string_view bytes, const BroadcastOptions& options) {
  if (!options.group.is_member()) return {};
  const bool root =
      get_rank(options.group) == distributed::group_rank_of(options.group, options.src);
  const auto size = at::tensor({static_cast<std::int64_t>(root ? bytes.size() : 0)}, at::kLong);
  broadcast(size, options);
  const auto data = at::empty({size.item<std::int64_t>()}, at::kByte);
  if (root && !bytes.empty()) std::memcpy(data.data_ptr(), bytes.data(), bytes.size());
  broadcast(data, options);
  return {static_cast<const char*>(data.data_ptr()), static_cast<std::size_t>(data.numel())};
}

std::vector<std::string> all_gather_bytes(std::string_view bytes, const GatherOptions& options) {
  if (!options.group.is_member()) return {};
  const std::int64_t ranks = get_world_size(options.group);
  const auto sizes = at::empty({ranks}, at::kLong);
  all_gather_into_tensor(sizes, at::tensor({static_cast<std::int64_t>(bytes.size())}, at::kLong),
                         options);
  const auto longest = sizes.max().item<std::int64_t>();
  const auto mine = at::zeros({longest}, at::kByte);
  if (!bytes.empty()) std::memcpy(mine.data_ptr(), bytes.data(), bytes.size());
  const auto all = at::empty({ranks, longest}, at::kByte);
  all_gather_into_tensor(all, mine, options);

  std::vector<std::string> result;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const auto* const row = static_cast<const char*>(all.data_ptr()) + rank * longest;
    result.emplace_back(row, static_cast<std::size_t>(sizes[rank].item<std::int64_t>()));
  }
  return result;
}

}  // namespace paceline
