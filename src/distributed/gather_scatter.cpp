#include <paceline/collectives.h>

#include "distributed/start.h"

namespace paceline {

using distributed::flat;
using distributed::start;
using distributed::Tensors;

namespace {

// gather and scatter take no list, or the one list of the call.
std::vector<Tensors> as_lists(Tensors list) {
  if (list.empty()) return {};
  return {std::move(list)};
}

}  // namespace

static Work start_broadcast(const at::Tensor& tensor, const BroadcastOptions& options, bool async) {
  return start(options.group, "broadcast", {tensor}, {},
               [&](c10d::Backend& backend, Tensors& to, Tensors& /*from*/) {
                 const int root = distributed::group_rank_of(options.group, options.src);
                 return backend.broadcast(to, {.rootRank = root, .asyncOp = async});
               });
}
void broadcast(const at::Tensor& tensor, const BroadcastOptions& options) {
  start_broadcast(tensor, options, false).wait();
}
Work broadcast_async(const at::Tensor& tensor, const BroadcastOptions& options) {
  return start_broadcast(tensor, options, true);
}

static Work start_all_gather(const Tensors& tensors, const at::Tensor& tensor,
                             const AllGatherOptions& options, bool async) {
  return start(options.group, "all_gather", tensors, {tensor},
               [&](c10d::Backend& backend, Tensors& to, Tensors& from) {
                 std::vector<Tensors> outputs{flat(to)};
                 Tensors inputs = flat(from);
                 return backend.allgather(outputs, inputs, {.asyncOp = async});
               });
}
void all_gather(const Tensors& tensors, const at::Tensor& tensor, const AllGatherOptions& options) {
  start_all_gather(tensors, tensor, options, false).wait();
}
Work all_gather_async(const Tensors& tensors, const at::Tensor& tensor,
                      const AllGatherOptions& options) {
  return start_all_gather(tensors, tensor, options, true);
}

static Work start_all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input,
                                         const AllGatherOptions& options, bool async) {
  return start(options.group, "all_gather_into_tensor", {output}, {input},
               [&](c10d::Backend& backend, Tensors& to, Tensors& from) {
                 at::Tensor flat_to = to[0].view({-1});
                 at::Tensor flat_from = from[0].view({-1});
                 return backend.all_gather_single(flat_to, flat_from, {.asyncOp = async});
               });
}
void all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input,
                            const AllGatherOptions& options) {
  start_all_gather_into_tensor(output, input, options, false).wait();
}
Work all_gather_into_tensor_async(const at::Tensor& output, const at::Tensor& input,
                                  const AllGatherOptions& options) {
  return start_all_gather_into_tensor(output, input, options, true);
}

static Work start_gather(const at::Tensor& tensor, const Tensors& list,
                         const GatherOptions& options, bool async) {
  return start(options.group, "gather", list, {tensor},
               [&](c10d::Backend& backend, Tensors& to, Tensors& from) {
                 const int root = distributed::group_rank_of(options.group, options.dst);
                 auto outputs = as_lists(flat(to));
                 Tensors inputs = flat(from);
                 return backend.gather(outputs, inputs, {.rootRank = root, .asyncOp = async});
               });
}
void gather(const at::Tensor& tensor, const Tensors& gather_list, const GatherOptions& options) {
  start_gather(tensor, gather_list, options, false).wait();
}
Work gather_async(const at::Tensor& tensor, const Tensors& gather_list,
                  const GatherOptions& options) {
  return start_gather(tensor, gather_list, options, true);
}

static Work start_scatter(const at::Tensor& tensor, const Tensors& list,
                          const ScatterOptions& options, bool async) {
  return start(options.group, "scatter", {tensor}, list,
               [&](c10d::Backend& backend, Tensors& to, Tensors& from) {
                 const int root = distributed::group_rank_of(options.group, options.src);
                 Tensors outputs = flat(to);
                 auto inputs = as_lists(flat(from));
                 return backend.scatter(outputs, inputs, {.rootRank = root, .asyncOp = async});
               });
}
void scatter(const at::Tensor& tensor, const Tensors& scatter_list, const ScatterOptions& options) {
  start_scatter(tensor, scatter_list, options, false).wait();
}
Work scatter_async(const at::Tensor& tensor, const Tensors& scatter_list,
                   const ScatterOptions& options) {
  return start_scatter(tensor, scatter_list, options, true);
}

static Work start_all_to_all(const Tensors& outputs, const Tensors& inputs,
                             const AllToAllOptions& options, bool async) {
  return start(options.group, "all_to_all", outputs, inputs,
               [&](c10d::Backend& backend, Tensors& to, Tensors& from) {
                 Tensors flat_to = flat(to);
                 Tensors flat_from = flat(from);
                 return backend.alltoall(flat_to, flat_from, {.asyncOp = async});
               });
}
void all_to_all(const Tensors& outputs, const Tensors& inputs, const AllToAllOptions& options) {
  start_all_to_all(outputs, inputs, options, false).wait();
}
Work all_to_all_async(const Tensors& outputs, const Tensors& inputs,
                      const AllToAllOptions& options) {
  return start_all_to_all(outputs, inputs, options, true);
}

static Work start_all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                                    const AllToAllSingleOptions& options, bool async) {
  return start(options.group, "all_to_all_single", {output}, {input},
               [&](c10d::Backend& backend, Tensors& to, Tensors& from) {
                 auto to_splits = options.output_split_sizes;
                 auto from_splits = options.input_split_sizes;
                 return backend.all_to_all_single(to[0], from[0], to_splits, from_splits,
                                                  {.asyncOp = async});
               });
}
void all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                       const AllToAllSingleOptions& options) {
  start_all_to_all_single(output, input, options, false).wait();
}
Work all_to_all_single_async(const at::Tensor& output, const at::Tensor& input,
                             const AllToAllSingleOptions& options) {
  return start_all_to_all_single(output, input, options, true);
}

}  // namespace paceline
