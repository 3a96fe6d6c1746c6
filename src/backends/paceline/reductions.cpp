// c10d's reductions and barriers in terms of shm::Collectives.

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <paceline/error.h>

#include "backends/paceline/overlap.h"
#include "backends/paceline/run.h"
#include "backends/paceline/sparse.h"

namespace paceline::backends {
namespace {

using c10d::OpType;
using distributed::premultiplied;

Tensors premultiplied(const Tensors& tensors, const c10d::ReduceOp& op) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) result.push_back(premultiplied(tensor, op));
  return result;
}

void reduce_scatter_parts(shm::Collectives& group, const Parts& from, const at::Tensor& output,
                          const Reduction& how) {
  const Flat to(output, Flat::Use::out);
  group.reduce_scatter(from.inputs(), to.output(), how.type, how.op);
  to.write_back();
}

}  // namespace

PacelineBackend::WorkPtr PacelineBackend::barrier(const c10d::BarrierOptions& options) {
  return run({{OpType::BARRIER, "barrier", "paceline:barrier"}, {}, {}}, options,
             [this] { group_->barrier(); });
}

void PacelineBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  check_usable("monitored_barrier");
  const auto timeout =
      options.timeout < std::chrono::milliseconds(0) ? timeout_.load() : options.timeout;
  progress_->run_here([&] { pass_monitored_barrier(timeout, wait_all_ranks); });
}

void PacelineBackend::reduce_in_place(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                      const Reduction& how, std::optional<int> root) {
  const Flat from(premultiplied(tensor, op), Flat::Use::in);
  if (root && *root != getRank()) {
    return group_->reduce(from.data(), nullptr, from.count(), how.type, how.op, *root);
  }
  const bool same = from.data() == tensor.data_ptr();
  const Flat to(tensor, same ? Flat::Use::in_out : Flat::Use::out);
  if (root) {
    group_->reduce(from.data(), to.data(), to.count(), how.type, how.op, *root);
  } else {
    group_->all_reduce(from.data(), to.data(), to.count(), how.type, how.op);
  }
  to.write_back();
}

bool PacelineBackend::all_reduce_now(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  constexpr const char* kName = "all_reduce";
  if (tensor.layout() != at::kStrided || !tensor.is_contiguous()) return false;
  if (tensor.is_conj() || tensor.is_neg()) return false;
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM || at::hasCallbacks() || hooks_->any()) return false;
  check_usable(kName);
  check_dense(tensor, kName);
  const Reduction how = reduction(op, tensor, kName);
  ++sequence_;
  progress_->run_here([&] {
    group_->set_timeout(timeout_);
    void* const data = tensor.data_ptr();
    group_->all_reduce(data, data, static_cast<std::size_t>(tensor.numel()), how.type, how.op);
  });
  return true;
}

PacelineBackend::WorkPtr PacelineBackend::allreduce(Tensors& tensors,
                                                    const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors.front().is_sparse()) return allreduce_sparse(tensors, options);
  constexpr Kind kKind{OpType::ALLREDUCE, "all_reduce", "paceline:all_reduce"};
  const at::Tensor tensor = single(tensors, kKind.name);
  const Reduction how = reduction(options.reduceOp, tensor, kKind.name);
  return run({kKind, tensors, {tensor}}, options,
             [this, tensor, op = options.reduceOp, how] { reduce_in_place(tensor, op, how); });
}

PacelineBackend::WorkPtr PacelineBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  constexpr Kind kKind{OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", "paceline:all_reduce"};
  std::vector<Reduction> how;
  for (const at::Tensor& tensor : tensors) {
    check_dense(tensor, kKind.name);
    how.push_back(reduction(options.reduceOp, tensor, kKind.name));
  }
  check_apart(tensors, {}, kKind.name);
  return run({kKind, tensors, tensors, tensors.size()}, options,
             [this, tensors, op = options.reduceOp, how] {
               for (std::size_t i = 0; i < tensors.size(); ++i) {
                 reduce_in_place(tensors[i], op, how[i]);
               }
             });
}

PacelineBackend::WorkPtr PacelineBackend::allreduce_sparse(Tensors& tensors,
                                                           const c10d::AllreduceOptions& options) {
  constexpr Kind kKind{OpType::_ALLREDUCE_SPARSE, "all_reduce", "paceline:all_reduce"};
  check_sparse(tensors, options.reduceOp);
  const at::Tensor& tensor = tensors.front();
  return run({kKind, {}, {tensor}, kCallsOfSparse}, options, [this, tensor] {
    // Not through detach(): that copy alone would get the new values.
    const at::NoGradGuard no_grad;
    tensor.copy_(sum_of_sparse(*group_, tensor));
  });
}

PacelineBackend::WorkPtr PacelineBackend::reduce(Tensors& tensors,
                                                 const c10d::ReduceOptions& options) {
  constexpr Kind kKind{OpType::REDUCE, "reduce", "paceline:reduce"};
  const at::Tensor tensor = single(tensors, kKind.name);
  const Reduction how = reduction(options.reduceOp, tensor, kKind.name);
  const int root = checked_root(kKind, options.rootRank);
  return run({kKind, tensors, {tensor}}, options, [this, tensor, op = options.reduceOp, how, root] {
    reduce_in_place(tensor, op, how, root);
  });
}

PacelineBackend::WorkPtr PacelineBackend::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  constexpr Kind kKind{OpType::REDUCE_SCATTER, "reduce_scatter", "paceline:reduce_scatter"};
  const at::Tensor output = single(outputs, kKind.name);
  const Tensors parts = single_list(inputs, output, getSize(), kKind.name);
  check_same_size({parts[static_cast<std::size_t>(getRank())]}, output, kKind.name);
  check_apart(outputs, without_own(parts, getRank(), output), kKind.name);
  const Reduction how = reduction(options.reduceOp, output, kKind.name);
  return run({kKind, parts, {output}}, options, [this, output, parts, op = options.reduceOp, how] {
    reduce_scatter_parts(*group_, Parts(premultiplied(parts, op), Flat::Use::in), output, how);
  });
}

PacelineBackend::WorkPtr PacelineBackend::reduce_scatter_single(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return reduce_scatter_whole(
      {OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", "paceline:reduce_scatter"}, {output},
      {input}, options);
}

PacelineBackend::WorkPtr PacelineBackend::reduce_scatter_single_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return reduce_scatter_whole(
      {OpType::COALESCED, "reduce_scatter_tensor_coalesced", "paceline:reduce_scatter"}, outputs,
      inputs, options);
}

PacelineBackend::WorkPtr PacelineBackend::reduce_scatter_whole(
    const Kind& kind, const Tensors& outputs, const Tensors& inputs,
    const c10d::ReduceScatterOptions& options) {
  check_pairs(outputs, inputs, kind.name);
  std::vector<Reduction> how;
  Tensors read;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_concatenation(inputs[i], outputs[i], getSize(), kind.name);
    how.push_back(reduction(options.reduceOp, outputs[i], kind.name));
    for (at::Tensor& part : without_own_part(inputs[i], getRank(), outputs[i])) {
      read.push_back(std::move(part));
    }
  }
  check_apart(outputs, read, kind.name);
  return run({kind, inputs, outputs, inputs.size()}, options,
             [this, outputs, inputs, op = options.reduceOp, how] {
               for (std::size_t i = 0; i < inputs.size(); ++i) {
                 const at::Tensor input = premultiplied(inputs[i], op);
                 reduce_scatter_parts(*group_, Parts(input, getSize(), Flat::Use::in), outputs[i],
                                      how[i]);
               }
             });
}

}  // namespace paceline::backends
