#include "backends/paceline/backend.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <paceline/error.h>

#include "backends/paceline/node_channel.h"
#include "backends/paceline/tensors.h"
#include "distributed/store_exchange.h"

namespace paceline::backends {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

const bool paceline_registered = distributed::register_backend(
    "paceline", {[](distributed::BackendRequest request) -> c10::intrusive_ptr<c10d::Backend> {
                   return c10::make_intrusive<NodeBackend>(form_region(std::move(request)));
                 },
                 c10d::ProcessGroup::BackendType::CUSTOM});

}  // namespace

std::shared_ptr<node::Region> form_region(distributed::BackendRequest request) {
  const node::RegionOptions options{.name = request.group_name,
                                    .numbers = node::RankNumbers(request.world_ranks),
                                    .timeout = request.timeout};
  if (!request.links.empty() || request.size == 1) {
    return node::Region::create(std::move(request.links), request.rank, request.size, options);
  }
  distributed::StoreExchange exchange(request);
  return node::Region::create(exchange, options);
}

NodeBackend::NodeBackend(std::shared_ptr<node::Region> region)
    : ExtendedBackend(region->rank(), region->size()),
      region_(std::move(region)),
      group_(region_),
      timeout_(region_->options().timeout),
      progress_(std::make_unique<ProgressThread>()) {}

NodeBackend::~NodeBackend() {
  shutdown();
  if (region_->in_forked_child()) static_cast<void>(progress_.release());
}

void NodeBackend::shutdown() {
  if (region_->in_forked_child()) return;
  progress_->stop();
  region_->depart();
}

// Asked before a thread of ours is: a forked child has none of them.
void NodeBackend::check_usable(const char* operation) const {
  region_->check_usable({operation, sequence_});
  if (!progress_->stopped()) return;
  throw UsageError(
      fmt::format("{} on group {}, which this rank has left", operation, region_->options().name));
}

void NodeBackend::abort_because(const std::string& text) noexcept {
  region_->abort(text);
}

template <typename Body>
WorkPtr NodeBackend::run(c10d::OpType type, std::vector<at::Tensor> outputs, bool async,
                         std::chrono::milliseconds timeout, Body body) {
  check_usable(c10d::opTypeToString(type).c_str());
  auto work = c10::make_intrusive<NodeWork>(type, std::move(outputs), ++sequence_);
  const auto limit = timeout > std::chrono::milliseconds(0) ? timeout : timeout_;
  if (!async) {
    progress_->run_here([&] {
      group_.set_timeout(limit);
      body();
    });
    work->complete();
    return work;
  }
  progress_->enqueue([this, work, limit, body = std::move(body)]() mutable {
    std::exception_ptr error;
    try {
      group_.set_timeout(limit);
      body();
    } catch (...) {
      error = std::current_exception();
    }
    work->complete(std::move(error));
  });
  return work;
}

WorkPtr NodeBackend::broadcast(std::vector<at::Tensor>& tensors,
                               const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = single(tensors, "broadcast");
  const int root = static_cast<int>(options.rootRank);
  return run(c10d::OpType::BROADCAST, {tensor}, options.asyncOp, options.timeout,
             [this, tensor, root] {
               const Contiguous data(tensor, Contiguous::Use::in_out);
               const auto [count, type] = moved(tensor);
               group_.broadcast(data.pointer(), count, type, root);
               data.write_back();
             });
}

WorkPtr NodeBackend::allreduce(std::vector<at::Tensor>& tensors,
                               const c10d::AllreduceOptions& options) {
  const at::Tensor tensor = single(tensors, "all_reduce");
  const auto type = node_type(tensor.scalar_type(), "all_reduce");
  const auto op = reduce_op(options.reduceOp, tensor, "all_reduce");
  return run(c10d::OpType::ALLREDUCE, {tensor}, options.asyncOp, options.timeout,
             [this, tensor, type, op] {
               const Contiguous data(tensor, Contiguous::Use::in_out);
               group_.all_reduce(data.pointer(), data.pointer(), data.count(), type, op);
               data.write_back();
             });
}

WorkPtr NodeBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                               std::vector<at::Tensor>& inputs,
                               const c10d::AllgatherOptions& options) {
  const at::Tensor input = single(inputs, "all_gather");
  const auto parts = parts_like(outputs, input, getSize(), "all_gather");
  return run(c10d::OpType::ALLGATHER, parts, options.asyncOp, options.timeout,
             [this, input, parts] {
               const Contiguous from(input, Contiguous::Use::in);
               const ContiguousList to(parts, Contiguous::Use::out);
               const auto [count, type] = moved(input);
               group_.all_gather(from.pointer(), to.pointers(), count, type);
               to.write_back();
             });
}

WorkPtr NodeBackend::all_gather_single(at::Tensor& output, at::Tensor& input,
                                       const c10d::AllgatherOptions& options) {
  check_concatenation(output, input, getSize(), "all_gather_into_tensor");
  return run(c10d::OpType::_ALLGATHER_BASE, {output}, options.asyncOp, options.timeout,
             [this, output, input] {
               const Contiguous from(input, Contiguous::Use::in);
               const Contiguous to(output, Contiguous::Use::out);
               const auto [count, type] = moved(input);
               group_.all_gather(from.pointer(), to.slices(getSize()), count, type);
               to.write_back();
             });
}

WorkPtr NodeBackend::reduce_scatter(std::vector<at::Tensor>& outputs,
                                    std::vector<std::vector<at::Tensor>>& inputs,
                                    const c10d::ReduceScatterOptions& options) {
  const at::Tensor output = single(outputs, "reduce_scatter");
  const auto parts = parts_like(inputs, output, getSize(), "reduce_scatter");
  const auto type = node_type(output.scalar_type(), "reduce_scatter");
  const auto op = reduce_op(options.reduceOp, output, "reduce_scatter");
  return run(c10d::OpType::REDUCE_SCATTER, {output}, options.asyncOp, options.timeout,
             [this, output, parts, type, op] {
               const ContiguousList from(parts, Contiguous::Use::in);
               const Contiguous to(output, Contiguous::Use::out);
               const auto pointers = from.pointers();
               group_.reduce_scatter({pointers.begin(), pointers.end()}, to.pointer(), to.count(),
                                     type, op);
               to.write_back();
             });
}

WorkPtr NodeBackend::reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& options) {
  check_concatenation(input, output, getSize(), "reduce_scatter_tensor");
  const auto type = node_type(output.scalar_type(), "reduce_scatter_tensor");
  const auto op = reduce_op(options.reduceOp, output, "reduce_scatter_tensor");
  return run(
      c10d::OpType::_REDUCE_SCATTER_BASE, {output}, options.asyncOp, options.timeout,
      [this, output, input, type, op] {
        const Contiguous from(input, Contiguous::Use::in);
        const Contiguous to(output, Contiguous::Use::out);
        const auto slices = from.slices(getSize());
        group_.reduce_scatter({slices.begin(), slices.end()}, to.pointer(), to.count(), type, op);
        to.write_back();
      });
}

WorkPtr NodeBackend::barrier(const c10d::BarrierOptions& options) {
  return run(c10d::OpType::BARRIER, {}, options.asyncOp, options.timeout,
             [this] { group_.barrier(); });
}

bool NodeBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  return device <= 0;
}

at::Tensor NodeBackend::allocateTensor(long size, at::TensorOptions options) {
  if (options.device().type() != c10::DeviceType::CPU) {
    throw UsageError(fmt::format("allocateTensor on {}: the backend paceline has CPU memory only",
                                 options.device().str()));
  }
  std::size_t bytes = 0;
  if (size < 0 ||
      __builtin_mul_overflow(static_cast<std::size_t>(size), options.dtype().itemsize(), &bytes)) {
    throw UsageError(fmt::format("allocateTensor of {} elements", size));
  }
  void* const memory = region_->allocate(bytes);
  if (memory == nullptr) {
    throw Error(
        fmt::format("no room for {} bytes of shared memory in group {}: {} bytes are in use", bytes,
                    region_->options().name, region_->bytes_in_use()));
  }
  return at::from_blob(
      memory, {size}, [region = region_](void* p) { region->free(p); }, options);
}

std::unique_ptr<distributed::BucketChannel> NodeBackend::make_bucket_channel(
    const std::vector<distributed::BucketChannel::Bucket>& buckets,
    distributed::BucketChannel::Describe describe) {
  check_usable("DistributedDataParallel");
  std::unique_ptr<distributed::BucketChannel> channel;
  progress_->run_here(
      [&] { channel = std::make_unique<NodeChannel>(group_, buckets, std::move(describe)); });
  return channel;
}

}  // namespace paceline::backends
