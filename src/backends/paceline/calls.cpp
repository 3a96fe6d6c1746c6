// c10d's collectives in terms of shm::Group.

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <paceline/error.h>

#include "backends/paceline/backend.h"
#include "backends/paceline/overlap.h"
#include "backends/paceline/sparse.h"
#include "distributed/start.h"

namespace paceline::backends {
namespace {

using c10d::OpType;

// With PREMUL_SUM each rank's tensors are multiplied by its factor before they are added.
at::Tensor premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return tensor;
  const auto& factor = static_cast<const c10d::PreMulSumSupplement&>(*op.supplement_);
  const at::Tensor plain = tensor.detach();
  return (factor.tensor_factor.defined() ? plain.mul(factor.tensor_factor)
                                         : plain.mul(factor.double_factor))
      .to(tensor.scalar_type());
}

Tensors premultiplied(const Tensors& tensors, const c10d::ReduceOp& op) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) result.push_back(premultiplied(tensor, op));
  return result;
}

// The tensors of position `i` of every rank's list.
Tensors column(const std::vector<Tensors>& lists, std::size_t i) {
  Tensors result;
  for (const Tensors& list : lists) result.push_back(list[i]);
  return result;
}

void check_pairs(const Tensors& outputs, const Tensors& inputs, const char* operation) {
  if (outputs.size() == inputs.size() && !inputs.empty()) return;
  throw UsageError(
      fmt::format("{} with {} outputs and {} inputs", operation, outputs.size(), inputs.size()));
}

}  // namespace

template <typename Body>
PacelineBackend::WorkPtr PacelineBackend::run(const Kind& kind, const Tensors& inputs,
                                              Tensors outputs, bool async,
                                              std::chrono::milliseconds timeout, Body body,
                                              std::size_t calls) {
  check_usable(kind.name);
  for (const at::Tensor& output : outputs) distributed::check_no_overlap(output, kind.name);
  const auto patience = limit(timeout);
  auto work = c10::make_intrusive<NodeWork>(kind.type, kind.title, inputs, std::move(outputs),
                                            ++sequence_, patience);
  const auto perform = [this, patience, calls](auto& make_calls) {
    group_.set_timeout(patience, calls);
    make_calls();
  };
  if (!async) {
    try {
      progress_->run_here([&] { perform(body); });
    } catch (...) {
      work->complete(std::current_exception(), *hooks_);
      throw;
    }
    work->complete(nullptr, *hooks_);
    return work;
  }
  group_.region()->threads().note_other_thread();
  progress_->enqueue(
      [work, perform, body = std::move(body), hooks = hooks_]() mutable -> ProgressThreads::After {
        std::exception_ptr error;
        try {
          perform(body);
        } catch (...) {
          error = std::current_exception();
        }
        const auto future = work->complete(error, *hooks);
        if (!future) return {};
        return [work, future] { work->settle(*future); };
      });
  return coalesced(work);
}

PacelineBackend::WorkPtr PacelineBackend::coalesced(WorkPtr work) {
  std::lock_guard lock(coalescing_mutex_);
  const auto own = coalescing_.find(std::this_thread::get_id());
  if (own == coalescing_.end()) return work;
  own->second.push_back(work);
  return work;
}

void PacelineBackend::startCoalescing() {
  std::lock_guard lock(coalescing_mutex_);
  coalescing_[std::this_thread::get_id()].clear();
}

PacelineBackend::WorkPtr PacelineBackend::endCoalescing() {
  std::lock_guard lock(coalescing_mutex_);
  auto own = coalescing_.extract(std::this_thread::get_id());
  if (own.empty()) throw UsageError("endCoalescing without startCoalescing");
  return c10::make_intrusive<CoalescedWork>(std::move(own.mapped()));
}

PacelineBackend::WorkPtr PacelineBackend::barrier(const c10d::BarrierOptions& options) {
  return run({OpType::BARRIER, "barrier", "paceline:barrier"}, {}, {}, options.asyncOp,
             options.timeout, [this] { group_.barrier(); });
}

void PacelineBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  check_usable("monitored_barrier");
  const auto patience =
      options.timeout < std::chrono::milliseconds(0) ? timeout_.load() : options.timeout;
  progress_->run_here([&] { monitored_barrier_.pass(patience, wait_all_ranks); });
}

PacelineBackend::WorkPtr PacelineBackend::broadcast(Tensors& tensors,
                                                    const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = single(tensors, "broadcast");
  shm::check_root("broadcast", options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  return run({OpType::BROADCAST, "broadcast", "paceline:broadcast"}, tensors, {tensor},
             options.asyncOp, options.timeout, [this, tensor, root] {
               const Flat data(tensor, Flat::Use::in_out);
               group_.broadcast(data.data(), data.count(), data.type(), root);
               data.write_back();
             });
}

void PacelineBackend::reduce_in_place(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                      const Reduction& how, std::optional<int> root) {
  const Flat from(premultiplied(tensor, op), Flat::Use::in);
  if (root && *root != getRank()) {
    return group_.reduce(from.data(), nullptr, from.count(), how.type, how.op, *root);
  }
  const bool same = from.data() == tensor.data_ptr();
  const Flat to(tensor, same ? Flat::Use::in_out : Flat::Use::out);
  if (root) {
    group_.reduce(from.data(), to.data(), to.count(), how.type, how.op, *root);
  } else {
    group_.all_reduce(from.data(), to.data(), to.count(), how.type, how.op);
  }
  to.write_back();
}

PacelineBackend::WorkPtr PacelineBackend::allreduce(Tensors& tensors,
                                                    const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors.front().is_sparse()) return allreduce_sparse(tensors, options);
  const at::Tensor tensor = single(tensors, "all_reduce");
  const Reduction how = reduction(options.reduceOp, tensor, "all_reduce");
  return run({OpType::ALLREDUCE, "all_reduce", "paceline:all_reduce"}, tensors, {tensor},
             options.asyncOp, options.timeout,
             [this, tensor, op = options.reduceOp, how] { reduce_in_place(tensor, op, how); });
}

PacelineBackend::WorkPtr PacelineBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Reduction> how;
  for (const at::Tensor& tensor : tensors) {
    check_dense(tensor, "all_reduce_coalesced");
    how.push_back(reduction(options.reduceOp, tensor, "all_reduce_coalesced"));
  }
  check_apart(tensors, {}, "all_reduce_coalesced");
  return run(
      {OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", "paceline:all_reduce"}, tensors,
      tensors, options.asyncOp, options.timeout,
      [this, tensors, op = options.reduceOp, how] {
        for (std::size_t i = 0; i < tensors.size(); ++i) {
          reduce_in_place(tensors[i], op, how[i]);
        }
      },
      tensors.size());
}

PacelineBackend::WorkPtr PacelineBackend::allreduce_sparse(Tensors& tensors,
                                                           const c10d::AllreduceOptions& options) {
  check_sparse(tensors, options.reduceOp);
  const at::Tensor tensor = tensors.front();
  return run(
      {OpType::_ALLREDUCE_SPARSE, "all_reduce", "paceline:all_reduce"}, {}, {tensor},
      options.asyncOp, options.timeout,
      [this, tensor] {
        // Not through detach(): that copy alone would get the new values.
        const at::NoGradGuard no_grad;
        tensor.copy_(sum_of_sparse(group_, tensor));
      },
      kCallsOfSparse);
}

PacelineBackend::WorkPtr PacelineBackend::reduce(Tensors& tensors,
                                                 const c10d::ReduceOptions& options) {
  const at::Tensor tensor = single(tensors, "reduce");
  const Reduction how = reduction(options.reduceOp, tensor, "reduce");
  shm::check_root("reduce", options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  return run({OpType::REDUCE, "reduce", "paceline:reduce"}, tensors, {tensor}, options.asyncOp,
             options.timeout, [this, tensor, op = options.reduceOp, how, root] {
               reduce_in_place(tensor, op, how, root);
             });
}

PacelineBackend::WorkPtr PacelineBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  const at::Tensor input = single(inputs, "all_gather");
  const Tensors parts = single_list(outputs, input, getSize(), "all_gather");
  const at::Tensor& own = parts[static_cast<std::size_t>(getRank())];
  check_same_size({own}, input, "all_gather");
  check_apart(parts, without_own(inputs, 0, own), "all_gather");
  return run({OpType::ALLGATHER, "all_gather", "paceline:all_gather"}, inputs, parts,
             options.asyncOp, options.timeout, [this, input, parts] {
               const Flat from(input, Flat::Use::in);
               const Parts to(parts, Flat::Use::out);
               group_.all_gather(from.input(), to.outputs(), from.type());
               to.write_back();
             });
}

PacelineBackend::WorkPtr PacelineBackend::allgather_coalesced(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  if (outputs.size() != static_cast<std::size_t>(getSize())) {
    throw UsageError(fmt::format("all_gather_coalesced with {} lists in a group of {} ranks",
                                 outputs.size(), getSize()));
  }
  for (const Tensors& list : outputs) check_pairs(list, inputs, "all_gather_coalesced");
  Tensors all;
  Tensors read;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_dense(inputs[i], "all_gather_coalesced");
    const Tensors parts = column(outputs, i);
    check_list(parts, inputs[i], getSize(), "all_gather_coalesced");
    check_same_size(parts, inputs[i], "all_gather_coalesced");
    all.insert(all.end(), parts.begin(), parts.end());
    if (!is_in_place(inputs[i], parts[static_cast<std::size_t>(getRank())])) {
      read.push_back(inputs[i]);
    }
  }
  check_apart(all, read, "all_gather_coalesced");
  return run(
      {OpType::ALLGATHER_COALESCED, "all_gather_coalesced", "paceline:all_gather"}, inputs, all,
      options.asyncOp, options.timeout,
      [this, outputs, inputs] {
        for (std::size_t i = 0; i < inputs.size(); ++i) {
          const Flat from(inputs[i], Flat::Use::in);
          const Parts to(column(outputs, i), Flat::Use::out);
          group_.all_gather(from.input(), to.outputs(), from.type());
          to.write_back();
        }
      },
      inputs.size());
}

PacelineBackend::WorkPtr PacelineBackend::all_gather_single(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return gather_whole({OpType::_ALLGATHER_BASE, "all_gather_into_tensor", "paceline:all_gather"},
                      outputs, inputs, options);
}

PacelineBackend::WorkPtr PacelineBackend::all_gather_single_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return gather_whole(
      {OpType::COALESCED, "all_gather_into_tensor_coalesced", "paceline:all_gather"}, outputs,
      inputs, options);
}

PacelineBackend::WorkPtr PacelineBackend::gather_whole(const Kind& kind, const Tensors& outputs,
                                                       const Tensors& inputs,
                                                       const c10d::AllgatherOptions& options) {
  check_pairs(outputs, inputs, kind.name);
  Tensors read;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_concatenation(outputs[i], inputs[i], getSize(), kind.name);
    if (!is_in_place(inputs[i], outputs[i], getRank())) read.push_back(inputs[i]);
  }
  check_apart(outputs, read, kind.name);
  return run(
      kind, inputs, outputs, options.asyncOp, options.timeout,
      [this, outputs, inputs] {
        for (std::size_t i = 0; i < inputs.size(); ++i) {
          const Flat from(inputs[i], Flat::Use::in);
          const Parts to(outputs[i], getSize(), Flat::Use::out);
          group_.all_gather(from.input(), to.outputs(), from.type());
          to.write_back();
        }
      },
      inputs.size());
}

PacelineBackend::WorkPtr PacelineBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                 const c10d::GatherOptions& options) {
  const at::Tensor input = single(inputs, "gather");
  shm::check_root("gather", options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  Tensors parts;
  if (getRank() == root) {
    parts = single_list(outputs, input, getSize(), "gather");
    check_same_size(parts, input, "gather");
    check_apart(parts, without_own(inputs, 0, parts[static_cast<std::size_t>(root)]), "gather");
  } else if (!outputs.empty()) {
    throw UsageError("gather with outputs on a rank that is not the root: it must have none");
  }
  return run({OpType::GATHER, "gather", "paceline:gather"}, inputs, parts, options.asyncOp,
             options.timeout, [this, input, parts, root] {
               const Flat from(input, Flat::Use::in);
               const Parts to(parts, Flat::Use::out);
               group_.gather(from.input(), to.outputs(), from.type(), root);
               to.write_back();
             });
}

PacelineBackend::WorkPtr PacelineBackend::gather_single(at::Tensor& output, at::Tensor& input,
                                                        const c10d::GatherOptions& options) {
  check_dense(input, "gather_single");
  shm::check_root("gather_single", options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  if (getRank() == root) {
    check_concatenation(output, input, getSize(), "gather_single");
    check_apart({output}, is_in_place(input, output, root) ? Tensors() : Tensors{input},
                "gather_single");
  }
  return run({OpType::GATHER, "gather_single", "paceline:gather"}, {input}, {output},
             options.asyncOp, options.timeout, [this, input, output, root] {
               const Flat from(input, Flat::Use::in);
               if (getRank() != root) return group_.gather(from.input(), {}, from.type(), root);
               const Parts to(output, getSize(), Flat::Use::out);
               group_.gather(from.input(), to.outputs(), from.type(), root);
               to.write_back();
             });
}

PacelineBackend::WorkPtr PacelineBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                  const c10d::ScatterOptions& options) {
  const at::Tensor output = single(outputs, "scatter");
  shm::check_root("scatter", options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  Tensors parts;
  if (getRank() == root) {
    parts = single_list(inputs, output, getSize(), "scatter");
    check_same_size(parts, output, "scatter");
    check_apart(outputs, without_own(parts, root, output), "scatter");
  } else if (!inputs.empty()) {
    throw UsageError("scatter with inputs on a rank that is not the root: it must have none");
  }
  return run({OpType::SCATTER, "scatter", "paceline:scatter"}, parts, {output}, options.asyncOp,
             options.timeout, [this, output, parts, root] {
               const Parts from(parts, Flat::Use::in);
               const Flat to(output, Flat::Use::out);
               group_.scatter(from.inputs(), to.output(), to.type(), root);
               to.write_back();
             });
}

PacelineBackend::WorkPtr PacelineBackend::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  const at::Tensor output = single(outputs, "reduce_scatter");
  const Tensors parts = single_list(inputs, output, getSize(), "reduce_scatter");
  check_same_size({parts[static_cast<std::size_t>(getRank())]}, output, "reduce_scatter");
  check_apart(outputs, without_own(parts, getRank(), output), "reduce_scatter");
  const Reduction how = reduction(options.reduceOp, output, "reduce_scatter");
  return run({OpType::REDUCE_SCATTER, "reduce_scatter", "paceline:reduce_scatter"}, parts, {output},
             options.asyncOp, options.timeout, [this, output, parts, op = options.reduceOp, how] {
               const Parts from(premultiplied(parts, op), Flat::Use::in);
               const Flat to(output, Flat::Use::out);
               group_.reduce_scatter(from.inputs(), to.output(), how.type, how.op);
               to.write_back();
             });
}

PacelineBackend::WorkPtr PacelineBackend::reduce_scatter_single(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return scatter_whole(
      {OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", "paceline:reduce_scatter"}, outputs,
      inputs, options);
}

PacelineBackend::WorkPtr PacelineBackend::reduce_scatter_single_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return scatter_whole(
      {OpType::COALESCED, "reduce_scatter_tensor_coalesced", "paceline:reduce_scatter"}, outputs,
      inputs, options);
}

PacelineBackend::WorkPtr PacelineBackend::scatter_whole(const Kind& kind, const Tensors& outputs,
                                                        const Tensors& inputs,
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
  return run(
      kind, inputs, outputs, options.asyncOp, options.timeout,
      [this, outputs, inputs, op = options.reduceOp, how] {
        for (std::size_t i = 0; i < inputs.size(); ++i) {
          const Parts from(premultiplied(inputs[i], op), getSize(), Flat::Use::in);
          const Flat to(outputs[i], Flat::Use::out);
          group_.reduce_scatter(from.inputs(), to.output(), how[i].type, how[i].op);
          to.write_back();
        }
      },
      inputs.size());
}

PacelineBackend::WorkPtr PacelineBackend::all_to_all_single(
    at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
    std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  constexpr const char* kName = "all_to_all_single";
  check_dense(output, kName);
  check_dense(input, kName);
  check_same_type(output, input, kName);
  const auto to_counts = split_counts(output, output_splits, getSize(), kName);
  const auto from_counts = split_counts(input, input_splits, getSize(), kName);
  check_apart({output}, {input}, kName);
  return run({OpType::ALLTOALL_BASE, kName, "paceline:all_to_all"}, {input}, {output},
             options.asyncOp, options.timeout, [this, output, input, to_counts, from_counts] {
               const Parts from(input, from_counts, Flat::Use::in);
               const Parts to(output, to_counts, Flat::Use::out);
               group_.all_to_all(from.inputs(), to.outputs(), to.type());
               to.write_back();
             });
}

PacelineBackend::WorkPtr PacelineBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                   const c10d::AllToAllOptions& options) {
  const at::Tensor like = outputs.empty() ? at::Tensor() : outputs.front();
  check_dense(like, "all_to_all");
  check_list(outputs, like, getSize(), "all_to_all");
  check_list(inputs, like, getSize(), "all_to_all");
  check_apart(outputs, without_own(inputs, getRank(), outputs[static_cast<std::size_t>(getRank())]),
              "all_to_all");
  return run({OpType::ALLTOALL, "all_to_all", "paceline:all_to_all"}, inputs, outputs,
             options.asyncOp, options.timeout, [this, outputs, inputs] {
               const Parts from(inputs, Flat::Use::in);
               const Parts to(outputs, Flat::Use::out);
               group_.all_to_all(from.inputs(), to.outputs(), to.type());
               to.write_back();
             });
}

}  // namespace paceline::backends
