// A rank of benchmarks/compression/run: trains one model with several communication hooks, one
// after the other, until its loss on held-out samples is below a target, and reports the time that
// this takes. Times are of training steps only, without evaluations.

#include <torch/torch.h>

#include <paceline/paceline.h>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/paceline-bench/measure/statistics.h"
#include "drawing/line_chart.h"
#include "drawing/save_svg.h"
#include "topology/link_counters.h"

namespace compression {
namespace {

using namespace paceline;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kInputs = 256;
constexpr std::int64_t kHidden = 512;
constexpr std::int64_t kClasses = 16;
constexpr std::int64_t kHeldOut = 4096;
constexpr int kEvaluateEvery = 5;
constexpr int kWarmUpSteps = 10;  // before compression starts

struct Options {
  double target = 0.9;
  double seconds = 120;  // the limit of a run
  int rounds = 3;
  std::int64_t batch = 64;
  std::filesystem::path svg;  // empty: none
};

torch::nn::Sequential make_net() {
  return torch::nn::Sequential(torch::nn::Linear(kInputs, kHidden), torch::nn::ReLU(),
                               torch::nn::Linear(kHidden, kHidden), torch::nn::ReLU(),
                               torch::nn::Linear(kHidden, kClasses));
}

// Classes that a network of random weights chooses.
class Teacher {
 public:
  Teacher() {
    torch::manual_seed(1);
    net_->push_back(torch::nn::Linear(kInputs, 2 * kClasses));
    net_->push_back(torch::nn::Tanh());
    net_->push_back(torch::nn::Linear(2 * kClasses, kClasses));
  }
  at::Tensor classes_of(const at::Tensor& x) {
    const torch::NoGradGuard no_grad;
    return net_->forward(x).argmax(1);
  }

 private:
  torch::nn::Sequential net_;
};

using Model = DistributedDataParallel<torch::nn::SequentialImpl>;

// How gradients are communicated.
struct Mode {
  std::string name;
  std::function<CommHook()> hook;  // returns none for DistributedDataParallel's own
  bool averages_model = false;     // every fourth step, in place of gradients
};

std::vector<Mode> all_modes() {
  const auto power_sgd = [](int rank) {
    return [rank] {
      return comm_hooks::power_sgd(comm_hooks::PowerSgdState(
          {.matrix_approximation_rank = rank, .start_power_sgd_iter = kWarmUpSteps}));
    };
  };
  return {{"float32", [] { return CommHook(); }},
          {"float16", [] { return comm_hooks::fp16_compress(); }},
          {"PowerSGD, rank 1", power_sgd(1)},
          {"PowerSGD, rank 2", power_sgd(2)},
          {"PowerSGD, rank 4", power_sgd(4)},
          {"post-local SGD",
           [] {
             return comm_hooks::post_local_sgd(comm_hooks::PostLocalSgdState(
                 {.start_local_sgd_iter = kWarmUpSteps, .post_local_gradient_all_reduce = false}));
           },
           true}};
}

struct Run {
  bool reached = false;
  int steps = 0;
  double seconds = 0;
  double bytes_sent = 0;  // by a node's link, in a step after the warm-up
  std::vector<drawing::Point> curve;
};

class Trainer {
 public:
  Trainer(const Options& options, const Mode& mode, int round) : options_(options), mode_(mode) {
    torch::manual_seed(100 + static_cast<std::uint64_t>(round));
    model_.emplace(make_net());
    if (auto hook = mode.hook()) model_->register_comm_hook(std::move(hook));
    sgd_.emplace(model_->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    torch::manual_seed(7);
    held_out_ = torch::randn({kHeldOut, kInputs});
    held_out_classes_ = teacher_.classes_of(held_out_);
    torch::manual_seed(1000 * static_cast<std::uint64_t>(round + 1) +
                       static_cast<std::uint64_t>(get_rank()));
  }

  Run train() {
    Run run;
    add_point(run);
    std::int64_t sent_before = 0;
    while (run.seconds < options_.seconds && !run.reached) {
      barrier();
      if (run.steps == kWarmUpSteps) sent_before = bench::read_counters().sent;
      const auto begin = Clock::now();
      for (int i = 0; i < kEvaluateEvery; ++i) step();
      run.seconds += std::chrono::duration<double>(Clock::now() - begin).count();
      run.steps += kEvaluateEvery;
      if (run.steps > kWarmUpSteps) {
        run.bytes_sent = static_cast<double>(bench::read_counters().sent - sent_before) /
                         (run.steps - kWarmUpSteps);
      }
      run.reached = add_point(run) <= options_.target;
    }
    return run;
  }

 private:
  void step() {
    const auto x = torch::randn({options_.batch, kInputs});
    const auto y = teacher_.classes_of(x);
    sgd_->zero_grad();
    torch::nn::functional::cross_entropy((*model_)(x), y).backward();
    sgd_->step();
    if (mode_.averages_model) averager_.average_parameters(model_->parameters());
  }
  // Rank 0's values, so that all ranks stop together.
  double add_point(Run& run) {
    const torch::NoGradGuard no_grad;
    const auto values = torch::zeros({2}, torch::kDouble);
    if (get_rank() == 0) {
      const auto loss = torch::nn::functional::cross_entropy(model_->module()->forward(held_out_),
                                                             held_out_classes_);
      values[0] = loss.to(torch::kDouble);
      values[1] = run.seconds;
    }
    broadcast(values);
    run.seconds = values[1].item<double>();
    run.curve.push_back({run.seconds, values[0].item<double>()});
    return run.curve.back().y;
  }

  const Options& options_;
  const Mode& mode_;
  Teacher teacher_;
  std::optional<Model> model_;
  std::optional<torch::optim::SGD> sgd_;
  PeriodicModelAverager averager_{{.period = 4, .warmup_steps = kWarmUpSteps}};
  at::Tensor held_out_;
  at::Tensor held_out_classes_;
};

// `plain`: the times of float32, in the same rounds.
void print_row(const Mode& mode, const std::vector<Run>& runs, const std::vector<Run>& plain) {
  std::vector<double> seconds;
  std::vector<double> plain_seconds;
  std::vector<double> steps;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (!runs[i].reached) {
      fmt::print("{:<18} did not reach the target in round {}: loss {:.3f} after {:.1f} s\n",
                 mode.name, i, runs[i].curve.back().y, runs[i].seconds);
      return;
    }
    seconds.push_back(runs[i].seconds);
    plain_seconds.push_back(plain[i].seconds);
    steps.push_back(runs[i].steps);
  }
  const bool has_plain = std::ranges::all_of(plain, &Run::reached);
  const auto speedup = bench::paired_speedup(seconds, plain_seconds);
  const auto& last = runs.back();
  fmt::print(
      "{:<18} {:>10.1f} {:>9.1f} {:>7.0f} {:>8.1f} {:>24}\n", mode.name, last.bytes_sent / 1e3,
      1e3 * last.seconds / last.steps, bench::quantile(steps, 0.5), bench::quantile(seconds, 0.5),
      has_plain ? fmt::format("{:.2f} ({:.2f}-{:.2f})", speedup.median, speedup.low, speedup.high)
                : "-");
  std::fflush(stdout);
}

void compare(const Options& options) {
  const auto world = init_process_group();
  const std::vector<Mode> modes = all_modes();
  std::vector<std::vector<Run>> runs(modes.size());
  for (int round = 0; round < options.rounds; ++round) {
    for (std::size_t i = 0; i < modes.size(); ++i) {
      runs[i].push_back(Trainer(options, modes[i], round).train());
    }
  }
  if (get_rank() != 0) return;
  drawing::LineChart chart{.title = fmt::format("Loss over time, {} ranks", get_world_size()),
                           .x = {.label = "seconds of training"},
                           .y = {.label = "loss on held-out samples"},
                           .lines = {}};
  fmt::print("{:<18} {:>10} {:>9} {:>7} {:>8} {:>24}\n", "gradients", "KB a step", "ms a step",
             "steps", "seconds", "times as fast as float32");
  for (std::size_t i = 0; i < modes.size(); ++i) {
    print_row(modes[i], runs[i], runs[0]);
    chart.lines.push_back({.name = modes[i].name, .points = runs[i].back().curve});
  }
  constexpr int kColumns = 100;
  fmt::print("\n{}", chart.to_terminal(kColumns));
  if (!options.svg.empty()) drawing::save_svg(chart.to_svg(), options.svg);
}

}  // namespace

int run(int argc, char** argv) {
  Options options;
  CLI::App app("Compares communication hooks by the time until a loss is reached.");
  app.option_defaults()->always_capture_default();
  app.add_option("--target", options.target, "The loss at which a run ends")
      ->check(CLI::PositiveNumber);
  app.add_option("--seconds", options.seconds, "The longest run")->check(CLI::PositiveNumber);
  app.add_option("--rounds", options.rounds, "Runs of each hook")->check(CLI::Range(1, 1000));
  app.add_option("--batch", options.batch, "Samples of a rank")->check(CLI::Range(1, 65536));
  app.add_option("--svg", options.svg, "A file for the chart");
  CLI11_PARSE(app, argc, argv);
  compare(options);
  return 0;
}

}  // namespace compression

int main(int argc, char** argv) {
  return paceline::record([&] { return compression::run(argc, argv); });
}
