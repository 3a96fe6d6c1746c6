// Trains a network twice, step by step: on N ranks, and on rank 0 alone. N logical ranks do the
// work both times, so both hold the same parameters, bit for bit.

#include <torch/torch.h>

#include <paceline/paceline.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>

namespace F = torch::nn::functional;

constexpr int kSteps = 20;
constexpr std::int64_t kSamples = 16;  // of a logical rank, per step
constexpr std::int64_t kInputs = 64;
constexpr std::int64_t kClasses = 10;

using Model = paceline::DistributedDataParallel<torch::nn::SequentialImpl>;

struct Batch {
  torch::Tensor x;
  torch::Tensor y;
};

torch::nn::Sequential make_net() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(kInputs, 128), torch::nn::BatchNorm1d(128),
                               torch::nn::ReLU(), torch::nn::Dropout(0.2),
                               torch::nn::Linear(128, kClasses));
}

struct Trainee {
  explicit Trainee(const paceline::DdpOptions& options)
      : model(make_net(), options),
        sgd(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)) {}

  Model model;
  torch::optim::SGD sgd;
};

// The samples of a step, the same on all ranks. The class of a sample is the index of the largest
// of its first inputs, so that there is something to learn.
Batch global_batch(int step) {
  torch::manual_seed(step);
  const torch::Tensor x = torch::randn({paceline::get_world_size() * kSamples, kInputs});
  return {x, x.narrow(1, 0, kClasses).argmax(1)};
}

Batch share_of(const Batch& batch, int logical_rank) {
  return {batch.x.narrow(0, logical_rank * kSamples, kSamples),
          batch.y.narrow(0, logical_rank * kSamples, kSamples)};
}

// A step of this rank's logical ranks: one of them on each rank of the world, or all of them on
// rank 0 alone. Returns the sum of their losses.
double train_step(Trainee& trainee, const Batch& batch) {
  double losses = 0;
  trainee.sgd.zero_grad();
  for (const int logical_rank : trainee.model.logical_ranks()) {
    const auto [x, y] = share_of(batch, logical_rank);
    const torch::Tensor loss = F::cross_entropy(trainee.model(x), y);
    loss.backward();
    losses += loss.item<double>();
  }
  trainee.sgd.step();
  return losses;
}

double largest_difference(const torch::nn::Module& a, const torch::nn::Module& b) {
  const torch::NoGradGuard no_grad;
  double largest = 0;
  const auto compare = [&](const auto& ours, const auto& theirs) {
    for (std::size_t i = 0; i < ours.size(); ++i) {
      largest = std::max(largest, (ours[i] - theirs[i]).abs().max().template item<double>());
    }
  };
  compare(a.parameters(), b.parameters());
  compare(a.buffers(), b.buffers());
  return largest;
}

// Unlike a difference, also distinguishes NaNs, and zeros of different signs.
bool have_equal_bits(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto equal = [](const torch::Tensor& x, const torch::Tensor& y) {
    return std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
  };
  return std::ranges::equal(a.parameters(), b.parameters(), equal) &&
         std::ranges::equal(a.buffers(), b.buffers(), equal);
}

int train() {
  const auto world = paceline::init_process_group();
  const auto only_rank_0 = paceline::new_group({0});
  const bool first = paceline::get_rank() == 0;
  const int n = paceline::get_world_size();
  Trainee together({.logical_ranks = n});
  std::optional<Trainee> alone;
  if (first) {
    alone.emplace(paceline::DdpOptions{.process_group = only_rank_0, .logical_ranks = n});
    std::puts("step  loss: together         alone  largest difference");
  }
  bool is_equal = true;
  for (int step = 1; step <= kSteps; ++step) {
    const Batch batch = global_batch(step);
    const torch::Tensor losses = torch::full({1}, train_step(together, batch), torch::kDouble);
    paceline::all_reduce(losses);
    if (!first) continue;
    const double lone_losses = train_step(*alone, batch);
    const double difference = largest_difference(*together.model.module(), *alone->model.module());
    std::printf("%4d  %14.9f  %12.9f  %.1g\n", step, losses.item<double>() / n, lone_losses / n,
                difference);
    is_equal = is_equal && have_equal_bits(*together.model.module(), *alone->model.module());
  }
  if (first) std::puts(is_equal ? "equal, bit for bit" : "not equal");
  return is_equal ? 0 : 1;
}

int main(int argc, char** argv) {
  return paceline::record([&] {
    paceline::Config config("Compares N ranks to N logical ranks of one. It has no options.");
    if (const auto text = config.parse(argc, argv)) {
      paceline::print(*text);
      return 0;
    }
    return train();
  });
}
