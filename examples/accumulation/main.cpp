// Trains a network twice, step by step: on N ranks with DistributedDataParallel, and on rank 0
// alone with N accumulation steps. Both see the same samples, so both hold the same parameters.

#include <torch/torch.h>

#include <paceline/paceline.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>

namespace F = torch::nn::functional;

constexpr int kSteps = 20;
constexpr std::int64_t kSamples = 16;  // per rank and step
constexpr std::int64_t kInputs = 64;
constexpr std::int64_t kClasses = 10;
constexpr double kRounding = 1e-6;  // see README.md

using Model = paceline::DistributedDataParallel<torch::nn::SequentialImpl>;

struct Batch {
  torch::Tensor x;
  torch::Tensor y;
};

// No BatchNorm: its running statistics would be updated N times in one process, once on N ranks.
torch::nn::Sequential make_net() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(kInputs, 128), torch::nn::ReLU(),
                               torch::nn::Linear(128, kClasses));
}

torch::optim::SGD make_sgd(const std::vector<torch::Tensor>& parameters) {
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
}

// The samples of a step, the same on all ranks. The class of a sample is the index of the largest
// of its first inputs, so that there is something to learn.
Batch global_batch(int step) {
  torch::manual_seed(step);
  const torch::Tensor x = torch::randn({paceline::get_world_size() * kSamples, kInputs});
  return {x, x.narrow(1, 0, kClasses).argmax(1)};
}

Batch share_of(const Batch& batch, int rank) {
  return {batch.x.narrow(0, rank * kSamples, kSamples),
          batch.y.narrow(0, rank * kSamples, kSamples)};
}

// On N ranks: each trains on its share, and backward averages the gradients of all ranks.
double step_together(Model& model, torch::optim::SGD& sgd, const Batch& batch) {
  sgd.zero_grad();
  const auto [x, y] = share_of(batch, paceline::get_rank());
  const torch::Tensor loss = F::cross_entropy(model(x), y);
  loss.backward();
  sgd.step();
  const torch::Tensor average = loss.detach().clone();
  paceline::all_reduce(average, {.op = paceline::ReduceOp::AVG});
  return average.item<double>();
}

// In one process: trains on one share after the other. The gradients of losses divided by N add up
// to the same average.
double step_alone(torch::nn::Sequential& net, torch::optim::SGD& sgd, const Batch& batch) {
  const int n = paceline::get_world_size();
  torch::Tensor average = torch::zeros({});
  sgd.zero_grad();
  for (int rank = 0; rank < n; ++rank) {
    const auto [x, y] = share_of(batch, rank);
    const torch::Tensor loss = F::cross_entropy(net->forward(x), y) / n;
    loss.backward();
    average += loss.detach();
  }
  sgd.step();
  return average.item<double>();
}

double largest_difference(const std::vector<torch::Tensor>& a,
                          const std::vector<torch::Tensor>& b) {
  const torch::NoGradGuard no_grad;
  using torch::nn::utils::parameters_to_vector;
  return (parameters_to_vector(a) - parameters_to_vector(b)).abs().max().item<double>();
}

// Returns the exit code. Dividing by a power of two is exact, so then there must be no difference.
int judge(double difference) {
  const auto n = static_cast<unsigned>(paceline::get_world_size());
  const double allowed = std::has_single_bit(n) ? 0 : kRounding;
  if (difference == 0) {
    std::puts("equal, bit for bit");
  } else if (difference <= allowed) {
    std::printf("equal within rounding: %.1g is less than %.0g\n", difference, allowed);
  } else {
    std::printf("not equal: the parameters differ by %.1g; the tolerance is %.0g\n", difference,
                allowed);
    return 1;
  }
  return 0;
}

int train() {
  const auto world = paceline::init_process_group();
  Model model(make_net());
  torch::optim::SGD sgd = make_sgd(model.parameters());
  torch::nn::Sequential lone_net = make_net();
  torch::optim::SGD lone_sgd = make_sgd(lone_net->parameters());

  const bool first = paceline::get_rank() == 0;
  if (first) std::puts("step  loss: together         alone  largest difference of a parameter");
  double largest = 0;
  for (int step = 1; step <= kSteps; ++step) {
    const Batch batch = global_batch(step);
    const double loss = step_together(model, sgd, batch);
    if (!first) continue;
    const double lone_loss = step_alone(lone_net, lone_sgd, batch);
    const double difference = largest_difference(model.parameters(), lone_net->parameters());
    std::printf("%4d  %14.9f  %12.9f  %.1g\n", step, loss, lone_loss, difference);
    largest = std::max(difference, largest);
  }
  return first ? judge(largest) : 0;
}

int main() {
  return paceline::record(train);
}
