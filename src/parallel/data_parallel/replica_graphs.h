#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "parallel/data_parallel/gather.h"
#include "parallel/data_parallel/replica_team.h"

namespace paceline::data_parallel {

// A tensor outside of the replicas that requires a gradient, and the leaves that stand for it in
// their graphs, by replica.
struct GraphInput {
  at::Tensor whole;
  bool is_parameter;
  std::vector<std::vector<at::Tensor>> leaves;
};

// An output of the replicas that requires a gradient, by replica.
struct GraphOutput {
  Concatenation concatenation;
  std::vector<at::Tensor> parts;
};

// Gathers the outputs so that a backward through them runs through the graphs of all replicas, each
// on its own thread, and gives the inputs their gradients. `dim` is that of inputs which are no
// parameters.
std::vector<at::Tensor> gather_with_graphs(std::shared_ptr<ReplicaTeam> team, std::int64_t dim,
                                           std::vector<GraphInput> inputs,
                                           std::vector<GraphOutput> outputs);

}  // namespace paceline::data_parallel
