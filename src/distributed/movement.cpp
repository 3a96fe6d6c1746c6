#include <paceline/collectives.h>

#include "distributed/start.h"

namespace paceline {

using distributed::start;
using distributed::Tensors;
using distributed::with;

namespace {

// What gather, scatter and all_to_all get in lists is none, or the one list of the call.
std::vector<Tensors> as_lists(Tensors::const_iterator begin, Tensors::const_iterator end) {
  if (begin == end) return {};
  return {Tensors(begin, end)};
}

Work start_broadcast(const at::Tensor& tensor, const BroadcastOptions& options, bool async) {
  return start(options.group, "broadcast", {tensor}, [&](c10d::Backend& backend, Tensors& dense) {
    const int root = distributed::group_rank_of(options.group, options.src);
    return backend.broadcast(dense, {.rootRank = root, .asyncOp = async});
  });
}

Work start_all_gather(const Tensors& tensors, const at::Tensor& tensor,
                      const AllGatherOptions& options, bool async) {
  return start(options.group, "all_gather", with(tensor, tensors),
               [&](c10d::Backend& backend, Tensors& dense) {
                 Tensors input{dense[0]};
                 std::vector<Tensors> outputs{Tensors(dense.begin() + 1, dense.end())};
                 return backend.allgather(outputs, input, {.asyncOp = async});
               });
}

Work start_all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input,
                                  const AllGatherOptions& options, bool async) {
  return start(options.group, "all_gather_into_tensor", {input, output},
               [&](c10d::Backend& backend, Tensors& dense) {
                 at::Tensor from = dense[0].view({-1});
                 at::Tensor to = dense[1].view({-1});
                 return backend.all_gather_single(to, from, {.asyncOp = async});
               });
}

Work start_gather(const at::Tensor& tensor, const Tensors& list, const GatherOptions& options,
                  bool async) {
  return start(options.group, "gather", with(tensor, list),
               [&](c10d::Backend& backend, Tensors& dense) {
                 const int root = distributed::group_rank_of(options.group, options.dst);
                 Tensors input{dense[0]};
                 auto outputs = as_lists(dense.begin() + 1, dense.end());
                 return backend.gather(outputs, input, {.rootRank = root, .asyncOp = async});
               });
}

Work start_scatter(const at::Tensor& tensor, const Tensors& list, const ScatterOptions& options,
                   bool async) {
  return start(options.group, "scatter", with(tensor, list),
               [&](c10d::Backend& backend, Tensors& dense) {
                 const int root = distributed::group_rank_of(options.group, options.src);
                 Tensors output{dense[0]};
                 auto inputs = as_lists(dense.begin() + 1, dense.end());
                 return backend.scatter(output, inputs, {.rootRank = root, .asyncOp = async});
               });
}

Work start_all_to_all(const Tensors& outputs, const Tensors& inputs, const AllToAllOptions& options,
                      bool async) {
  Tensors all = outputs;
  all.insert(all.end(), inputs.begin(), inputs.end());
  return start(options.group, "all_to_all", std::move(all),
               [&](c10d::Backend& backend, Tensors& dense) {
                 const auto middle = dense.begin() + static_cast<std::ptrdiff_t>(outputs.size());
                 Tensors to(dense.begin(), middle);
                 Tensors from(middle, dense.end());
                 return backend.alltoall(to, from, {.asyncOp = async});
               });
}

Work start_all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                             const AllToAllSingleOptions& options, bool async) {
  return start(options.group, "all_to_all_single", {output, input},
               [&](c10d::Backend& backend, Tensors& dense) {
                 auto to_splits = options.output_split_sizes;
                 auto from_splits = options.input_split_sizes;
                 return backend.all_to_all_single(dense[0], dense[1], to_splits, from_splits,
                                                  {.asyncOp = async});
               });
}

}  // namespace

void broadcast(const at::Tensor& tensor, const BroadcastOptions& options) {
  start_broadcast(tensor, options, false).wait();
}
void all_gather(const Tensors& tensors, const at::Tensor& tensor, const AllGatherOptions& options) {
  start_all_gather(tensors, tensor, options, false).wait();
}
void all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input,
                            const AllGatherOptions& options) {
  start_all_gather_into_tensor(output, input, options, false).wait();
}
void gather(const at::Tensor& tensor, const Tensors& gather_list, const GatherOptions& options) {
  start_gather(tensor, gather_list, options, false).wait();
}
void scatter(const at::Tensor& tensor, const Tensors& scatter_list, const ScatterOptions& options) {
  start_scatter(tensor, scatter_list, options, false).wait();
}
void all_to_all(const Tensors& outputs, const Tensors& inputs, const AllToAllOptions& options) {
  start_all_to_all(outputs, inputs, options, false).wait();
}
void all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                       const AllToAllSingleOptions& options) {
  start_all_to_all_single(output, input, options, false).wait();
}

Work broadcast_async(const at::Tensor& tensor, const BroadcastOptions& options) {
  return start_broadcast(tensor, options, true);
}
Work all_gather_async(const Tensors& tensors, const at::Tensor& tensor,
                      const AllGatherOptions& options) {
  return start_all_gather(tensors, tensor, options, true);
}
Work all_gather_into_tensor_async(const at::Tensor& output, const at::Tensor& input,
                                  const AllGatherOptions& options) {
  return start_all_gather_into_tensor(output, input, options, true);
}
Work gather_async(const at::Tensor& tensor, const Tensors& gather_list,
                  const GatherOptions& options) {
  return start_gather(tensor, gather_list, options, true);
}
Work scatter_async(const at::Tensor& tensor, const Tensors& scatter_list,
                   const ScatterOptions& options) {
  return start_scatter(tensor, scatter_list, options, true);
}
Work all_to_all_async(const Tensors& outputs, const Tensors& inputs,
                      const AllToAllOptions& options) {
  return start_all_to_all(outputs, inputs, options, true);
}
Work all_to_all_single_async(const at::Tensor& output, const at::Tensor& input,
                             const AllToAllSingleOptions& options) {
  return start_all_to_all_single(output, input, options, true);
}

}  // namespace paceline
