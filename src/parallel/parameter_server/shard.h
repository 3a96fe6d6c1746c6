#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "parallel/parameter_server/flat_tensors.h"

namespace paceline::parameter_server {

// The parameters of one server, with their optimizer. For one thread at a time.
class Shard {
 public:
  Shard(Tensors parameters, std::unique_ptr<torch::optim::Optimizer> optimizer);

  const Tensors& parameters() const { return parameters_; }
  // One step with the average of some workers' gradients, added up in this order. Changes the
  // first of them.
  void step(const std::vector<const FlatTensors*>& gradients);

 private:
  Tensors parameters_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace paceline::parameter_server
