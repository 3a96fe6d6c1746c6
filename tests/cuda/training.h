#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include <paceline/ddp.h>

#include "support/small_net.h"

namespace paceline::test {

inline constexpr int kSteps = 5;
inline constexpr double kRate = 0.05;

inline std::vector<torch::Tensor> on_cpu(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.detach().to(at::kCPU));
  return copies;
}

// The parameters after steps of one process with the batches of all ranks.
inline std::vector<torch::Tensor> trained_alone(int size, at::Device device,
                                                int micro_batches = 1) {
  Net net = make_net(at::kDouble);
  net->to(device);
  torch::optim::SGD sgd(net->parameters(), kRate);
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad();
    for (int rank = 0; rank < size; ++rank) {
      for (int micro = 0; micro < micro_batches; ++micro) {
        const auto x = batch_of(rank, step * micro_batches + micro, at::kDouble).to(device);
        (loss_of(net(x), x) / size).backward();
      }
    }
    sgd.step();
  }
  return on_cpu(net->parameters());
}

// The parameters after steps of this rank and the others.
inline std::vector<torch::Tensor> trained(const DdpOptions& options, int rank, at::Device device,
                                          int micro_batches = 1) {
  Net net = make_net(at::kDouble, 3 + static_cast<std::uint64_t>(rank));  // rank 0's is broadcast
  net->to(device);
  DistributedDataParallel model(net, options);
  torch::optim::SGD sgd(net->parameters(), kRate);
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad();
    for (int micro = 0; micro < micro_batches; ++micro) {
      const auto guard = model.no_sync(micro + 1 < micro_batches);
      const auto x = batch_of(rank, step * micro_batches + micro, at::kDouble).to(device);
      loss_of(model(x), x).backward();
    }
    sgd.step();
  }
  return on_cpu(net->parameters());
}

}  // namespace paceline::test
