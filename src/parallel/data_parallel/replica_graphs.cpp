#include "parallel/data_parallel/replica_graphs.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <paceline/error.h>

namespace paceline::data_parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Not in place: other tensors may share the memory of either.
void add_to(at::Tensor& total, const at::Tensor& gradient) {
  if (gradient.defined()) total = total.defined() ? total + gradient : gradient;
}

class ReplicaGraphs : public torch::CustomClassHolder {
 public:
  ReplicaGraphs(std::shared_ptr<ReplicaTeam> team, std::int64_t dim, std::vector<GraphInput> inputs,
                std::vector<GraphOutput> outputs)
      : team_(std::move(team)),
        dim_(dim),
        inputs_(std::move(inputs)),
        outputs_(std::move(outputs)),
        count_(outputs_[0].parts.size()) {}

  variable_list gather() const;
  // The gradients of the inputs; those of outputs may be undefined.
  variable_list backward(const variable_list& gradients);

 private:
  // By replica, then by input.
  using Gradients = std::vector<variable_list>;

  variable_list differentiate(std::size_t replica, const variable_list& gradients, bool keep) const;
  at::Tensor sum(const GraphInput& input, std::size_t index, const Gradients& gradients) const;
  at::Tensor join(const GraphInput& input, std::size_t index, const Gradients& gradients) const;

  std::shared_ptr<ReplicaTeam> team_;
  std::int64_t dim_;
  std::vector<GraphInput> inputs_;
  std::vector<GraphOutput> outputs_;
  std::size_t count_;  // of replicas
};

class GatherFunction : public torch::autograd::Function<GatherFunction> {
 public:
  static variable_list forward(AutogradContext* context,
                               const c10::intrusive_ptr<ReplicaGraphs>& graphs,
                               at::TensorList /*inputs*/) {
    context->set_materialize_grads(false);
    context->saved_data["graphs"] = at::IValue::make_capsule(graphs);
    return graphs->gather();
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto capsule = context->saved_data["graphs"].toCapsule();
    variable_list all = static_cast<ReplicaGraphs&>(*capsule).backward(gradients);
    all.insert(all.begin(), at::Tensor());  // of `graphs`
    return all;
  }
};

variable_list ReplicaGraphs::gather() const {
  const Stopwatch watch(team_->stats().gather);
  variable_list wholes;
  for (const GraphOutput& output : outputs_) {
    wholes.push_back(output.concatenation.join(output.parts));
  }
  return wholes;
}

variable_list ReplicaGraphs::backward(const variable_list& gradients) {
  if (at::GradMode::is_enabled()) {
    throw UsageError(
        "DataParallel: a backward with create_graph = true is not supported; differentiate within "
        "the replicas by parallel_apply, or run the module itself");
  }
  if (outputs_.empty()) {
    throw UsageError(
        "DataParallel: backward has run through these outputs before and freed their graph; pass "
        "retain_graph = true to the first backward, or add the losses up and run one");
  }
  const auto team = team_;
  const ReplicaTeam::Use use(*team);
  const bool keep = torch::autograd::get_current_graph_task_keep_graph();
  Gradients parts(count_);
  team_->run(count_, &DataParallelStats::Replica::backward, [&](std::size_t replica) {
    parts[replica] = differentiate(replica, gradients, keep);
    if (keep) return;
    // Here each replica's thread frees what it has allocated.
    for (GraphOutput& output : outputs_) output.parts[replica].reset();
  });
  variable_list results;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    results.push_back(inputs_[i].is_parameter ? sum(inputs_[i], i, parts)
                                              : join(inputs_[i], i, parts));
  }
  if (!keep) {
    inputs_.clear();
    outputs_.clear();
    team_.reset();
  }
  return results;
}

variable_list ReplicaGraphs::differentiate(std::size_t replica, const variable_list& gradients,
                                           bool keep) const {
  variable_list parts;
  variable_list their_gradients;
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    const at::Tensor& part = outputs_[i].parts[replica];
    if (!gradients[i].defined() || !part.requires_grad()) continue;
    parts.push_back(part);
    their_gradients.push_back(
        outputs_[i].concatenation.part_of(gradients[i], replica).to(part.device()));
  }
  variable_list leaves;
  std::vector<std::size_t> owners;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    for (const at::Tensor& leaf : inputs_[i].leaves[replica]) {
      if (!leaf.requires_grad()) continue;  // frozen by a later forward
      leaves.push_back(leaf);
      owners.push_back(i);
    }
  }
  variable_list sums(inputs_.size());
  if (parts.empty() || leaves.empty()) return sums;
  const auto all = torch::autograd::grad(parts, leaves, their_gradients, keep, false, true);
  for (std::size_t i = 0; i < all.size(); ++i) {
    add_to(sums[owners[i]], all[i]);
  }
  return sums;
}

at::Tensor ReplicaGraphs::sum(const GraphInput& input, std::size_t index,
                              const Gradients& gradients) const {
  const Stopwatch watch(team_->stats().sum);
  at::Tensor total;
  for (const variable_list& of_replica : gradients) {
    const at::Tensor& gradient = of_replica[index];
    add_to(total, gradient.defined() ? gradient.to(input.whole.device()) : gradient);
  }
  return total;
}

at::Tensor ReplicaGraphs::join(const GraphInput& input, std::size_t index,
                               const Gradients& gradients) const {
  const Stopwatch watch(team_->stats().gather);
  const auto is_defined = [&](const variable_list& of_replica) {
    return of_replica[index].defined();
  };
  if (std::ranges::none_of(gradients, is_defined)) return {};
  variable_list parts;
  for (std::size_t i = 0; i < count_; ++i) {
    const at::Tensor& part = gradients[i][index];
    parts.push_back(
        (part.defined() ? part : at::zeros_like(input.leaves[i][0])).to(input.whole.device()));
  }
  return at::cat(parts, dim_);
}

using Leaves = std::unordered_map<const at::TensorImpl*, at::Tensor>;

// Those in the graph of one replica's outputs.
Leaves leaves_of(const std::vector<GraphOutput>& outputs, std::size_t replica) {
  using torch::autograd::AccumulateGrad;
  using torch::autograd::Node;
  Leaves leaves;
  std::vector<Node*> open;
  std::unordered_set<const Node*> seen;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const GraphOutput& output : outputs) {
    const at::Tensor& part = output.parts[replica];
    if (part.grad_fn()) {
      visit(part.grad_fn().get());
    } else if (part.requires_grad()) {
      leaves.emplace(part.unsafeGetTensorImpl(), part);
    }
  }
  while (!open.empty()) {
    Node* const node = open.back();
    open.pop_back();
    if (const auto* const end = dynamic_cast<const AccumulateGrad*>(node)) {
      leaves.emplace(end->variable.unsafeGetTensorImpl(), end->variable);
    }
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  return leaves;
}

// A leaf in the graphs of two replicas comes from outside, and would get no gradient. One that a
// replica makes for itself, as to differentiate within its forward, needs none.
void check_leaves(const std::vector<GraphInput>& inputs, const std::vector<GraphOutput>& outputs) {
  if (outputs[0].parts.size() < 2) return;
  Leaves first = leaves_of(outputs, 0);
  for (const GraphInput& input : inputs) {
    for (const at::Tensor& leaf : input.leaves[0]) first.erase(leaf.unsafeGetTensorImpl());
  }
  if (first.empty()) return;
  for (const auto& [leaf, tensor] : leaves_of(outputs, 1)) {
    if (!first.contains(leaf)) continue;
    throw UsageError(fmt::format(
        "DataParallel: the replicas have used a tensor of shape [{}] that requires a gradient and "
        "is neither a parameter of the module nor an argument, so that it would get none: register "
        "it as a parameter, pass it as an argument, or detach() it",
        fmt::join(tensor.sizes(), ", ")));
  }
}

}  // namespace

variable_list gather_with_graphs(std::shared_ptr<ReplicaTeam> team, std::int64_t dim,
                                 std::vector<GraphInput> inputs, std::vector<GraphOutput> outputs) {
  check_leaves(inputs, outputs);
  variable_list wholes;
  for (const GraphInput& input : inputs) wholes.push_back(input.whole);
  const auto graphs = c10::make_intrusive<ReplicaGraphs>(std::move(team), dim, std::move(inputs),
                                                         std::move(outputs));
  return GatherFunction::apply(graphs, at::TensorList(wholes));
}

}  // namespace paceline::data_parallel
