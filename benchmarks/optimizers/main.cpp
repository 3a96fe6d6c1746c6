// A step of AdamW beside LibTorch's:
//
//     build/release/bin/benchmark_optimizers
//
// The parameters are those of an MLP, 12.6 million in 6 tensors, and of a ResNet-18, 11.7 million
// in 62 tensors. In each of 30 rounds both step once; each line has the median times and the median
// of the ratios of the rounds with its 90 % confidence interval. OMP_NUM_THREADS sets the threads.

#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <paceline/optimizers.h>

#include "measure/statistics.h"

namespace {

using Shapes = std::vector<std::vector<std::int64_t>>;

constexpr int kStepRounds = 30;

Shapes mlp_shapes() {
  Shapes shapes;
  for (int layer = 0; layer < 3; ++layer) {
    shapes.push_back({2048, 2048});
    shapes.push_back({2048});
  }
  return shapes;
}

Shapes resnet18_shapes() {
  Shapes shapes;
  const auto convolution = [&](std::int64_t outputs, std::int64_t inputs, std::int64_t size) {
    shapes.push_back({outputs, inputs, size, size});
    shapes.push_back({outputs});  // of the batch norm
    shapes.push_back({outputs});
  };
  convolution(64, 3, 7);
  std::int64_t inputs = 64;
  for (const std::int64_t outputs : {64, 128, 256, 512}) {
    convolution(outputs, inputs, 3);
    convolution(outputs, outputs, 3);
    if (inputs != outputs) convolution(outputs, inputs, 1);
    convolution(outputs, outputs, 3);
    convolution(outputs, outputs, 3);
    inputs = outputs;
  }
  shapes.push_back({1000, 512});
  shapes.push_back({1000});
  return shapes;
}

std::vector<at::Tensor> parameters_of(const Shapes& shapes) {
  std::vector<at::Tensor> parameters;
  for (const auto& shape : shapes) {
    parameters.push_back(torch::randn(shape, at::requires_grad()));
    parameters.back().mutable_grad() = torch::randn(shape);
  }
  return parameters;
}

double step_milliseconds(torch::optim::Optimizer& optimizer) {
  const auto begin = std::chrono::steady_clock::now();
  optimizer.step();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

void compare_steps(const char* name, const Shapes& shapes, bool amsgrad) {
  const auto options = torch::optim::AdamWOptions().amsgrad(amsgrad);
  torch::optim::AdamW theirs(parameters_of(shapes), options);
  paceline::optim::AdamW ours(parameters_of(shapes), options);
  std::vector<double> their_times;
  std::vector<double> our_times;
  for (int round = -2; round < kStepRounds; ++round) {  // the first two are to warm up
    const double their_time = step_milliseconds(theirs);
    const double our_time = step_milliseconds(ours);
    if (round < 0) continue;
    their_times.push_back(their_time);
    our_times.push_back(our_time);
  }
  const auto ratio = paceline::bench::paired_speedup(our_times, their_times);
  std::printf("%-20s torch::optim %6.1f ms   paceline::optim %6.1f ms   %5.2f times as fast ", name,
              paceline::bench::quantile(their_times, 0.5),
              paceline::bench::quantile(our_times, 0.5), ratio.median);
  std::printf("(%.2f to %.2f)\n", ratio.low, ratio.high);
}

}  // namespace

int main() {
  std::printf("AdamW, %d threads\n", at::get_num_threads());
  compare_steps("MLP", mlp_shapes(), false);
  compare_steps("ResNet-18", resnet18_shapes(), false);
  compare_steps("ResNet-18, AMSGrad", resnet18_shapes(), true);
  return 0;
}
