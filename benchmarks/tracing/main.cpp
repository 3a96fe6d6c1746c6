// What a timeline costs a training step:
//
//     paceline run --nproc-per-node 2 build/release/bin/benchmark_tracing [MODEL...]
//
// Steps with and without one take turns, two seconds each, for 40 rounds. A line gives the median
// time of a step without, and what one with takes more, in % of the same round, with its 90 %
// confidence interval. What is written when the timeline is stopped is not part of it. The first
// line gives what recording a span takes.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/distributed.h>
#include <paceline/record.h>
#include <torch/optim/sgd.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include <paceline/error.h>

#include "models/models.h"
#include "trace/timeline.h"

namespace {

using namespace paceline;
using Clock = std::chrono::steady_clock;
using Microseconds = std::chrono::duration<double, std::micro>;

constexpr int kRounds = 40;
constexpr std::size_t kLow = 14;  // of 40 sorted values: the binomial 90 % interval of the median
constexpr std::size_t kHigh = 25;
constexpr int kWarmUp = 10;
constexpr Microseconds kTurn{2e6};

class TracedTrainer {
 public:
  explicit TracedTrainer(const models::Model& model)
      : batch_(models::make_batch(model)), ddp_(model.make()), sgd_(ddp_.parameters(), 1e-3) {
    steps_ = kWarmUp;
    for (int guess = 0; guess < 3; ++guess) {
      const at::Tensor slowest = at::scalar_tensor(turn(), at::kDouble);
      all_reduce(slowest, {.op = ReduceOp::MAX});
      steps_ = static_cast<int>(kTurn.count() / slowest.item<double>()) + 1;
    }
  }

  // What a step takes, in microseconds.
  double turn() {
    barrier();
    const auto begin = Clock::now();
    for (int i = 0; i < steps_; ++i) {
      sgd_.zero_grad();
      at::cross_entropy_loss(ddp_(batch_.input), batch_.target).backward();
      sgd_.step();
    }
    return Microseconds(Clock::now() - begin).count() / steps_;
  }

 private:
  models::Batch batch_;
  DistributedDataParallel<models::Classifier> ddp_;
  torch::optim::SGD sgd_;
  int steps_ = 0;
};

std::filesystem::path directory() {
  return std::filesystem::temp_directory_path() /
         ("paceline-tracing-" + std::to_string(::getpid()));
}

// What recording a span takes, in nanoseconds: the best of several rounds.
double time_of_a_span() {
  trace::Timeline::start(directory(), get_rank(), get_world_size());
  auto best = Clock::duration::max();
  constexpr int kSpans = 1000;
  for (int round = 0; round < 15; ++round) {
    const auto begin = Clock::now();
    for (int i = 0; i < kSpans; ++i) {
      trace::Timeline::current()->record(
          {.kind = trace::Kind::step, .model = 0, .step = 1, .begin = begin, .end = begin});
    }
    best = std::min(best, Clock::now() - begin);
  }
  trace::Timeline::stop();
  std::filesystem::remove_all(directory());
  return std::chrono::duration<double, std::nano>(best).count() / kSpans;
}

void measure(const std::string& name) {
  const models::Model* const model = models::find_model(name);
  if (model == nullptr) throw UsageError("there is no model " + name);
  TracedTrainer trainer(*model);
  const auto turn = [&](bool traced) {
    if (traced) trace::Timeline::start(directory(), get_rank(), get_world_size());
    const double step = trainer.turn();
    trace::Timeline::stop();
    return step;
  };
  std::vector<double> plain;
  std::vector<double> cost;
  for (int round = 0; round < kRounds; ++round) {
    const bool first = round % 2 == 0;
    const double one = turn(first);
    const double other = turn(!first);
    plain.push_back(first ? other : one);
    cost.push_back(100 * ((first ? one : other) / plain.back() - 1));
  }
  std::filesystem::remove_all(directory());
  if (get_rank() != 0) return;
  std::ranges::sort(plain);
  std::ranges::sort(cost);
  std::printf("%-9s step %9.1f us, with a timeline %+.2f %% (%+.2f to %+.2f)\n", name.c_str(),
              plain[kRounds / 2], cost[kRounds / 2], cost[kLow], cost[kHigh]);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  return record([&] {
    std::vector<std::string> names(argv + 1, argv + argc);
    if (names.empty()) names = {"tiny_mlp", "lenet", "wide_mlp"};
    at::set_num_threads(1);
    const auto world = init_process_group();
    const double span = time_of_a_span();
    if (get_rank() == 0) std::printf("recording a span %.0f ns\n", span);
    for (const std::string& name : names) measure(name);
  });
}
