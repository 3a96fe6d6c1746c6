// The trainer of a simulation framework that averages gradients by one blocking MPI call for each
// parameter, after the backward, as MOOSE's does; beside the same loop on Paceline:
//
//     mpirun.mpich -n 2 build/release/bin/benchmark_simulation
//
// The network approximates a response of a simulation in float64. Each round times both loops; the
// lines have the median time of a step and the median of the ratios of the rounds with its 90 %
// confidence interval. In the end, both must have come to the same parameters.

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <mpi.h>

#include <paceline/mpi.h>
#include <paceline/paceline.h>

#include "measure/statistics.h"

namespace {

using Clock = std::chrono::steady_clock;
using Forward = std::function<torch::Tensor(const torch::Tensor&)>;

constexpr int kTimedRounds = 30;
constexpr int kSteps = 40;
constexpr int kSimulations = 32;
constexpr int kInputs = 32;
constexpr int kHiddenLayers = 6;

torch::nn::Sequential make_network(int width) {
  paceline::manual_seed(1);
  torch::nn::Sequential network;
  for (int layer = 0; layer < kHiddenLayers; ++layer) {
    network->push_back(torch::nn::Linear(layer == 0 ? kInputs : width, width));
    network->push_back(torch::nn::ReLU());
  }
  network->push_back(torch::nn::Linear(width, 1));
  network->to(torch::kDouble);
  return network;
}

struct Samples {
  torch::Tensor inputs;
  torch::Tensor responses;
};

// What the rank's own simulations have yielded.
Samples simulate() {
  paceline::manual_seed(2, {.per_rank = true});
  const auto inputs = torch::rand({kSimulations, kInputs}, torch::kDouble);
  return {inputs, inputs.pow(2).sum(1, true).sin()};
}

class Loop {
 public:
  Loop(const torch::nn::Sequential& network, Forward forward, std::function<void()> average)
      : forward_(std::move(forward)),
        average_(std::move(average)),
        optimizer_(network->parameters(), torch::optim::SGDOptions(1e-3)) {}

  // Milliseconds of a step.
  double run(const Samples& samples) {
    const auto begin = Clock::now();
    for (int step = 0; step < kSteps; ++step) {
      optimizer_.zero_grad();
      torch::mse_loss(forward_(samples.inputs), samples.responses).backward();
      average_();
      optimizer_.step();
    }
    return std::chrono::duration<double, std::milli>(Clock::now() - begin).count() / kSteps;
  }

 private:
  Forward forward_;
  std::function<void()> average_;
  torch::optim::SGD optimizer_;
};

void average_by_mpi(const torch::nn::Sequential& network, int ranks) {
  for (const auto& parameter : network->parameters()) {
    const auto gradient = parameter.grad();
    MPI_Allreduce(MPI_IN_PLACE, gradient.data_ptr<double>(), static_cast<int>(gradient.numel()),
                  MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    gradient.div_(ranks);
  }
}

void compare(int width) {
  const int ranks = paceline::get_world_size();
  const Samples samples = simulate();
  auto before = make_network(width);
  Loop by_mpi(
      before, [&](const torch::Tensor& x) { return before->forward(x); },
      [&] { average_by_mpi(before, ranks); });
  const auto after = make_network(width);
  paceline::DistributedDataParallel model(after);
  Loop by_paceline(
      after, [&](const torch::Tensor& x) { return model(x); }, [] {});

  std::vector<double> theirs;
  std::vector<double> ours;
  for (int round = -1; round < kTimedRounds; ++round) {  // the first is to warm up
    MPI_Barrier(MPI_COMM_WORLD);
    const double mpi = by_mpi.run(samples);
    paceline::barrier();
    const double paceline = by_paceline.run(samples);
    if (round < 0) continue;
    theirs.push_back(mpi);
    ours.push_back(paceline);
  }
  for (std::size_t i = 0; i < before->parameters().size(); ++i) {
    if (torch::allclose(before->parameters()[i], after->parameters()[i], 1e-9)) continue;
    throw std::runtime_error(fmt::format("the loops have come to different parameters: {}", i));
  }
  const auto ratio = paceline::bench::paired_speedup(ours, theirs);
  paceline::print(fmt::format(
      "{} ranks, {} layers of {}: {:.3f} ms by MPI, {:.3f} ms by Paceline: {:.2f} times as fast "
      "({:.2f} to {:.2f})",
      ranks, kHiddenLayers, width, paceline::bench::quantile(theirs, 0.5),
      paceline::bench::quantile(ours, 0.5), ratio.median, ratio.low, ratio.high));
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int code = paceline::record([] {
    const auto world = paceline::init_process_group(MPI_COMM_WORLD);
    for (const int width : {64, 256, 1024}) compare(width);
  });
  MPI_Finalize();
  return code;
}
