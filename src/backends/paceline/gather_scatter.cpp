// c10d's collectives that only move data in terms of shm::Collectives.

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <paceline/error.h>

#include "backends/paceline/overlap.h"
#include "backends/paceline/run.h"

namespace paceline::backends {
namespace {

using c10d::OpType;

// The tensors of position `i` of every rank's list.
Tensors column(const std::vector<Tensors>& lists, std::size_t i) {
  Tensors result;
  for (const Tensors& list : lists) result.push_back(list[i]);
  return result;
}

void all_gather_parts(shm::Collectives& group, const at::Tensor& input, const Parts& to) {
  const Flat from(input, Flat::Use::in);
  group.all_gather(from.input(), to.outputs(), from.type());
  to.write_back();
}

void gather_parts(shm::Collectives& group, const at::Tensor& input, const Parts& to, int root) {
  const Flat from(input, Flat::Use::in);
  group.gather(from.input(), to.outputs(), from.type(), root);
  to.write_back();
}

void all_to_all_parts(shm::Collectives& group, const Parts& from, const Parts& to) {
  group.all_to_all(from.inputs(), to.outputs(), to.type());
  to.write_back();
}

}  // namespace

PacelineBackend::WorkPtr PacelineBackend::broadcast(Tensors& tensors,
                                                    const c10d::BroadcastOptions& options) {
  constexpr Kind kKind{OpType::BROADCAST, "broadcast", "paceline:broadcast"};
  const at::Tensor tensor = single(tensors, kKind.name);
  const int root = checked_root(kKind, options.rootRank);
  return run({kKind, tensors, {tensor}}, options, [this, tensor, root] {
    const Flat data(tensor, Flat::Use::in_out);
    group_->broadcast(data.data(), data.count(), data.type(), root);
    data.write_back();
  });
}

PacelineBackend::WorkPtr PacelineBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  constexpr Kind kKind{OpType::ALLGATHER, "all_gather", "paceline:all_gather"};
  const at::Tensor input = single(inputs, kKind.name);
  const Tensors parts = single_list(outputs, input, getSize(), kKind.name);
  const at::Tensor& own = parts[static_cast<std::size_t>(getRank())];
  check_same_size({own}, input, kKind.name);
  check_apart(parts, without_own(inputs, 0, own), kKind.name);
  return run({kKind, inputs, parts}, options, [this, input, parts] {
    all_gather_parts(*group_, input, Parts(parts, Flat::Use::out));
  });
}

PacelineBackend::WorkPtr PacelineBackend::allgather_coalesced(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  constexpr Kind kKind{OpType::ALLGATHER_COALESCED, "all_gather_coalesced", "paceline:all_gather"};
  if (outputs.size() != static_cast<std::size_t>(getSize())) {
    throw UsageError(fmt::format("{} with {} lists in a group of {} ranks", kKind.name,
                                 outputs.size(), getSize()));
  }
  for (const Tensors& list : outputs) check_pairs(list, inputs, kKind.name);
  Tensors all;
  Tensors read;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_dense(inputs[i], kKind.name);
    const Tensors parts = column(outputs, i);
    check_list(parts, inputs[i], getSize(), kKind.name);
    check_same_size(parts, inputs[i], kKind.name);
    all.insert(all.end(), parts.begin(), parts.end());
    if (!is_in_place(inputs[i], parts[static_cast<std::size_t>(getRank())])) {
      read.push_back(inputs[i]);
    }
  }
  check_apart(all, read, kKind.name);
  return run({kKind, inputs, all, inputs.size()}, options, [this, outputs, inputs] {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      all_gather_parts(*group_, inputs[i], Parts(column(outputs, i), Flat::Use::out));
    }
  });
}

PacelineBackend::WorkPtr PacelineBackend::all_gather_single(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& options) {
  return all_gather_whole(
      {OpType::_ALLGATHER_BASE, "all_gather_into_tensor", "paceline:all_gather"}, {output}, {input},
      options);
}

PacelineBackend::WorkPtr PacelineBackend::all_gather_single_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return all_gather_whole(
      {OpType::COALESCED, "all_gather_into_tensor_coalesced", "paceline:all_gather"}, outputs,
      inputs, options);
}

PacelineBackend::WorkPtr PacelineBackend::all_gather_whole(const Kind& kind, const Tensors& outputs,
                                                           const Tensors& inputs,
                                                           const c10d::AllgatherOptions& options) {
  check_pairs(outputs, inputs, kind.name);
  Tensors read;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_concatenation(outputs[i], inputs[i], getSize(), kind.name);
    if (!is_in_place(inputs[i], outputs[i], getRank())) read.push_back(inputs[i]);
  }
  check_apart(outputs, read, kind.name);
  return run({kind, inputs, outputs, inputs.size()}, options, [this, outputs, inputs] {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      all_gather_parts(*group_, inputs[i], Parts(outputs[i], getSize(), Flat::Use::out));
    }
  });
}

PacelineBackend::WorkPtr PacelineBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                 const c10d::GatherOptions& options) {
  constexpr Kind kKind{OpType::GATHER, "gather", "paceline:gather"};
  const at::Tensor input = single(inputs, kKind.name);
  const int root = checked_root(kKind, options.rootRank);
  Tensors parts;
  if (getRank() == root) {
    parts = single_list(outputs, input, getSize(), kKind.name);
    check_same_size(parts, input, kKind.name);
    check_apart(parts, without_own(inputs, 0, parts[static_cast<std::size_t>(root)]), kKind.name);
  } else if (!outputs.empty()) {
    throw UsageError("gather with outputs on a rank that is not the root: it must have none");
  }
  return run({kKind, inputs, parts}, options, [this, input, parts, root] {
    gather_parts(*group_, input, Parts(parts, Flat::Use::out), root);
  });
}

PacelineBackend::WorkPtr PacelineBackend::gather_single(at::Tensor& output, at::Tensor& input,
                                                        const c10d::GatherOptions& options) {
  constexpr Kind kKind{OpType::GATHER, "gather_single", "paceline:gather"};
  check_dense(input, kKind.name);
  const int root = checked_root(kKind, options.rootRank);
  if (getRank() == root) {
    check_concatenation(output, input, getSize(), kKind.name);
    check_apart({output}, is_in_place(input, output, root) ? Tensors() : Tensors{input},
                kKind.name);
  }
  return run({kKind, {input}, {output}}, options, [this, input, output, root] {
    const Parts to = getRank() == root ? Parts(output, getSize(), Flat::Use::out)
                                       : Parts(Tensors(), Flat::Use::out);
    gather_parts(*group_, input, to, root);
  });
}

PacelineBackend::WorkPtr PacelineBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                  const c10d::ScatterOptions& options) {
  constexpr Kind kKind{OpType::SCATTER, "scatter", "paceline:scatter"};
  const at::Tensor output = single(outputs, kKind.name);
  const int root = checked_root(kKind, options.rootRank);
  Tensors parts;
  if (getRank() == root) {
    parts = single_list(inputs, output, getSize(), kKind.name);
    check_same_size(parts, output, kKind.name);
    check_apart(outputs, without_own(parts, root, output), kKind.name);
  } else if (!inputs.empty()) {
    throw UsageError("scatter with inputs on a rank that is not the root: it must have none");
  }
  return run({kKind, parts, {output}}, options, [this, output, parts, root] {
    const Parts from(parts, Flat::Use::in);
    const Flat to(output, Flat::Use::out);
    group_->scatter(from.inputs(), to.output(), to.type(), root);
    to.write_back();
  });
}

PacelineBackend::WorkPtr PacelineBackend::all_to_all_single(
    at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
    std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  constexpr Kind kKind{OpType::ALLTOALL_BASE, "all_to_all_single", "paceline:all_to_all"};
  check_dense(output, kKind.name);
  check_dense(input, kKind.name);
  check_same_type(output, input, kKind.name);
  const auto to_counts = split_counts(output, output_splits, getSize(), kKind.name);
  const auto from_counts = split_counts(input, input_splits, getSize(), kKind.name);
  check_apart({output}, {input}, kKind.name);
  return run({kKind, {input}, {output}}, options, [this, output, input, to_counts, from_counts] {
    all_to_all_parts(*group_, Parts(input, from_counts, Flat::Use::in),
                     Parts(output, to_counts, Flat::Use::out));
  });
}

PacelineBackend::WorkPtr PacelineBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                   const c10d::AllToAllOptions& options) {
  constexpr Kind kKind{OpType::ALLTOALL, "all_to_all", "paceline:all_to_all"};
  const at::Tensor like = outputs.empty() ? at::Tensor() : outputs.front();
  check_dense(like, kKind.name);
  check_list(outputs, like, getSize(), kKind.name);
  check_list(inputs, like, getSize(), kKind.name);
  const at::Tensor& own = outputs[static_cast<std::size_t>(getRank())];
  check_apart(outputs, without_own(inputs, getRank(), own), kKind.name);
  return run({kKind, inputs, outputs}, options, [this, outputs, inputs] {
    all_to_all_parts(*group_, Parts(inputs, Flat::Use::in), Parts(outputs, Flat::Use::out));
  });
}

}  // namespace paceline::backends
