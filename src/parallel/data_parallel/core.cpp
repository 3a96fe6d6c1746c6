#include "parallel/data_parallel/core.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <paceline/error.h>

#include "parallel/data_parallel/gather.h"
#include "parallel/data_parallel/replica_graphs.h"

namespace paceline::detail {
namespace {

using data_parallel::Concatenation;
using data_parallel::GraphInput;
using data_parallel::GraphOutput;

// The parts of one tensor, by replica.
std::vector<at::Tensor> column(const std::vector<std::vector<at::Tensor>>& rows,
                               std::size_t index) {
  std::vector<at::Tensor> parts;
  for (const auto& row : rows) parts.push_back(row[index]);
  return parts;
}

void check_same_number(const std::vector<std::vector<at::Tensor>>& outputs) {
  for (std::size_t i = 1; i < outputs.size(); ++i) {
    if (outputs[i].size() == outputs[0].size()) continue;
    throw UsageError(fmt::format(
        "DataParallel: replica 0 returned {} tensors and replica {} {}; they must return as many",
        outputs[0].size(), i, outputs[i].size()));
  }
}

bool requires_gradient(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

// What gradients flow to: parameters, and tensors of the arguments.
std::vector<GraphInput> graph_inputs(const data_parallel::Replicas& replicas,
                                     const std::vector<at::Tensor>& tensors,
                                     const data_parallel::ScatteredBatch& batch) {
  std::vector<GraphInput> inputs;
  for (const auto& parameter : replicas.parameters()) {
    if (!parameter.original.requires_grad()) continue;
    inputs.push_back({parameter.original, true, parameter.leaves});
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!requires_gradient(tensors[i])) continue;
    GraphInput input{tensors[i], false, {}};
    for (const auto& parts : batch.parts) input.leaves.push_back({parts[i]});
    inputs.push_back(std::move(input));
  }
  return inputs;
}

}  // namespace

DataParallelCore::DataParallelCore(std::shared_ptr<torch::nn::Module> module,
                                   data_parallel::Replicas::Modules replicas,
                                   const std::vector<at::Device>& devices,
                                   const DataParallelOptions& options)
    : replicas_(std::move(module), std::move(replicas), devices),
      team_(std::make_shared<data_parallel::ReplicaTeam>(devices)),
      dim_(options.dim),
      output_device_(options.output_device.value_or(devices.front())) {}

DataParallelCore::Tensors DataParallelCore::run(const Tensors& tensors, std::size_t most,
                                                const DataParallelHandle::Call& call) {
  const data_parallel::ReplicaTeam::Use use(*team_);
  const auto batch = scatter(tensors, most);
  std::vector<Tensors> outputs(batch.parts.size());
  team_->run(outputs.size(), &DataParallelStats::Replica::forward,
             [&](std::size_t i) { outputs[i] = call(i, batch.parts[i]); });
  replicas_.after_forward(outputs.size());
  return gather(outputs, tensors, batch);
}

data_parallel::ScatteredBatch DataParallelCore::scatter(const Tensors& tensors, std::size_t most) {
  const data_parallel::Stopwatch watch(team_->stats().scatter);
  const auto& all = team_->devices();
  auto batch = data_parallel::scatter(
      tensors, dim_, {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(most)});
  for (std::size_t i = 0; i < batch.samples.size(); ++i) {
    team_->stats().replicas[i].samples += batch.samples[i];
  }
  replicas_.before_forward(batch.parts.size());
  return batch;
}

DataParallelCore::Tensors DataParallelCore::gather(const std::vector<Tensors>& outputs,
                                                   const Tensors& tensors,
                                                   const data_parallel::ScatteredBatch& batch) {
  check_same_number(outputs);
  Tensors gathered(outputs[0].size());
  std::vector<GraphOutput> with_graphs;
  std::vector<std::size_t> their_places;
  for (std::size_t i = 0; i < gathered.size(); ++i) {
    auto parts = column(outputs, i);
    Concatenation concatenation(parts, dim_, i);
    if (at::GradMode::is_enabled() && std::ranges::any_of(parts, requires_gradient)) {
      with_graphs.push_back({std::move(concatenation), std::move(parts)});
      their_places.push_back(i);
    } else {
      const data_parallel::Stopwatch watch(team_->stats().gather);
      gathered[i] = concatenation.join(std::move(parts));
    }
  }
  if (!with_graphs.empty()) {
    auto wholes = data_parallel::gather_with_graphs(
        team_, dim_, graph_inputs(replicas_, tensors, batch), std::move(with_graphs));
    for (std::size_t i = 0; i < wholes.size(); ++i)
      gathered[their_places[i]] = std::move(wholes[i]);
  }
  // Not a part of the graphs above: on an accelerator, autograd's thread of the first device waits
  // for those of the others in their backward.
  for (at::Tensor& tensor : gathered) {
    if (tensor.defined()) tensor = tensor.to(output_device_);
  }
  return gathered;
}

}  // namespace paceline::detail
