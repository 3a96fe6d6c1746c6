#include <paceline/collectives.h>

#include "distributed/start.h"

namespace paceline {

using distributed::start;
using distributed::Tensors;
using distributed::with;

namespace {

Work start_all_reduce(const at::Tensor& tensor, const AllReduceOptions& options, bool async) {
  return start(options.group, "all_reduce", {tensor}, [&](c10d::Backend& backend, Tensors& dense) {
    return backend.allreduce(dense, {.reduceOp = options.op, .asyncOp = async});
  });
}

Work start_reduce(const at::Tensor& tensor, const ReduceOptions& options, bool async) {
  return start(options.group, "reduce", {tensor}, [&](c10d::Backend& backend, Tensors& dense) {
    const int root = distributed::group_rank_of(options.group, options.dst);
    return backend.reduce(dense, {.reduceOp = options.op, .rootRank = root, .asyncOp = async});
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

void all_reduce(const at::Tensor& tensor, const AllReduceOptions& options) {
  start_all_reduce(tensor, options, false).wait();
}
void reduce(const at::Tensor& tensor, const ReduceOptions& options) {
  start_reduce(tensor, options, false).wait();
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
Work reduce_async(const at::Tensor& tensor, const ReduceOptions& options) {
  return start_reduce(tensor, options, true);
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

void monitored_barrier(const MonitoredBarrierOptions& options) {
  const auto backend =
      distributed::backend_of(options.group, c10::DeviceType::CPU, "monitored_barrier");
  if (!backend) return;
  c10d::BarrierOptions request;
  if (options.timeout >= 0ms) request.timeout = options.timeout;
  distributed::translate("monitored_barrier",
                         [&] { backend->monitoredBarrier(request, options.wait_all_ranks); });
}

}  // namespace paceline
