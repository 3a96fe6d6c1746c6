#include <fmt/format.h>

#include <algorithm>

#include <paceline/collectives.h>

#include "base/deadline.h"
#include "distributed/backend.h"
#include "distributed/start.h"

namespace paceline {

using distributed::flat;
using distributed::start;
using distributed::Tensors;

static Work start_all_reduce(const at::Tensor& tensor, const AllReduceOptions& options,
                             bool async) {
  return start(options.group, "all_reduce", {tensor}, {},
               [&](c10d::Backend& backend, Tensors& to, Tensors& /*from*/) {
                 return backend.allreduce(to, {.reduceOp = options.op, .asyncOp = async});
               });
}
static bool all_reduce_now(const at::Tensor& tensor, const AllReduceOptions& options) {
  const bool recorded = distributed::any_flight_recorder.load(std::memory_order_relaxed);
  if (recorded || !options.group.is_member()) return false;
  const auto device = distributed::device_of(tensor, "all_reduce");
  const auto backend = distributed::backend_of(options.group, device, "all_reduce");
  auto* const ours = dynamic_cast<distributed::ExtendedBackend*>(backend.get());
  return ours != nullptr && distributed::translate("all_reduce", [&] {
           return ours->all_reduce_now(tensor, options.op);
         });
}
void all_reduce(const at::Tensor& tensor, const AllReduceOptions& options) {
  if (!all_reduce_now(tensor, options)) start_all_reduce(tensor, options, false).wait();
}
Work all_reduce_async(const at::Tensor& tensor, const AllReduceOptions& options) {
  return start_all_reduce(tensor, options, true);
}

static Work start_reduce(const at::Tensor& tensor, const ReduceOptions& options, bool async) {
  return start(options.group, "reduce", {tensor}, {},
               [&](c10d::Backend& backend, Tensors& to, Tensors& /*from*/) {
                 const int root = distributed::group_rank_of(options.group, options.dst);
                 return backend.reduce(
                     to, {.reduceOp = options.op, .rootRank = root, .asyncOp = async});
               });
}
void reduce(const at::Tensor& tensor, const ReduceOptions& options) {
  start_reduce(tensor, options, false).wait();
}
Work reduce_async(const at::Tensor& tensor, const ReduceOptions& options) {
  return start_reduce(tensor, options, true);
}

static Work start_reduce_scatter(const at::Tensor& output, const Tensors& inputs,
                                 const ReduceScatterOptions& options, bool async) {
  return start(options.group, "reduce_scatter", {output}, inputs,
               [&](c10d::Backend& backend, Tensors& to, Tensors& from) {
                 Tensors outputs = flat(to);
                 std::vector<Tensors> lists{flat(from)};
                 return backend.reduce_scatter(outputs, lists,
                                               {.reduceOp = options.op, .asyncOp = async});
               });
}
void reduce_scatter(const at::Tensor& output, const Tensors& inputs,
                    const ReduceScatterOptions& options) {
  start_reduce_scatter(output, inputs, options, false).wait();
}
Work reduce_scatter_async(const at::Tensor& output, const Tensors& inputs,
                          const ReduceScatterOptions& options) {
  return start_reduce_scatter(output, inputs, options, true);
}

static Work start_reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                                        const ReduceScatterOptions& options, bool async) {
  return start(options.group, "reduce_scatter_tensor", {output}, {input},
               [&](c10d::Backend& backend, Tensors& to, Tensors& from) {
                 at::Tensor flat_to = to[0].view({-1});
                 at::Tensor flat_from = from[0].view({-1});
                 return backend.reduce_scatter_single(flat_to, flat_from,
                                                      {.reduceOp = options.op, .asyncOp = async});
               });
}
void reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                           const ReduceScatterOptions& options) {
  start_reduce_scatter_tensor(output, input, options, false).wait();
}
Work reduce_scatter_tensor_async(const at::Tensor& output, const at::Tensor& input,
                                 const ReduceScatterOptions& options) {
  return start_reduce_scatter_tensor(output, input, options, true);
}

static Work start_barrier(const BarrierOptions& options, bool async) {
  return start(options.group, "barrier", {}, {},
               [&](c10d::Backend& backend, Tensors& /*to*/, Tensors& /*from*/) {
                 c10d::BarrierOptions request;
                 request.asyncOp = async;
                 return backend.barrier(request);
               });
}
void barrier(const BarrierOptions& options) {
  start_barrier(options, false).wait();
}
Work barrier_async(const BarrierOptions& options) {
  return start_barrier(options, true);
}

void monitored_barrier(const MonitoredBarrierOptions& options) {
  const auto backend =
      distributed::backend_of(options.group, c10::DeviceType::CPU, "monitored_barrier");
  if (!backend) return;
  c10d::BarrierOptions request;
  if (options.timeout) {
    if (options.timeout->count() < 0) {
      throw UsageError(
          fmt::format("monitored_barrier: timeout of {} ms: it must not be negative; leave it out "
                      "for the group's",
                      options.timeout->count()));
    }
    request.timeout = std::min(*options.timeout, base::Deadline::kLongest);
  }
  distributed::translate("monitored_barrier",
                         [&] { backend->monitoredBarrier(request, options.wait_all_ranks); });
}

}  // namespace paceline
