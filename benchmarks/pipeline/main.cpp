// Schedules of pipelines: drawn, on ideal stages; and measured, on real ones.
//
//     build/release/bin/benchmark_pipeline                     # 4 stages, 8 micro-batches
//     build/release/bin/paceline run --nproc-per-node 2 build/release/bin/benchmark_pipeline
//
// With several ranks it trains a model of as many equal stages. All schedules, and one rank that
// trains the whole model while the others sleep, take turns, step by step. A line gives the median
// time of a step, how many times as fast it is as that of one rank with its 90 % confidence
// interval, the bubble (the part of the stages' time in which they do not compute) beside
// (p - 1) / (m + p - 1), and the bytes that all stages send beside those of
// DistributedDataParallel's all-reduce of the same model.

#include <torch/torch.h>

#include <paceline/paceline.h>

#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "benchmarks/paceline-bench/measure/gather_records.h"
#include "benchmarks/paceline-bench/measure/statistics.h"
#include "drawing/save_svg.h"
#include "drawing/span_chart.h"
#include "simulate.h"

namespace pipeline_schedules {
namespace {

using namespace paceline;
using bench::IdealSchedule;
using drawing::SpanChart;
using Clock = std::chrono::steady_clock;

struct Options {
  int stages = 4;
  std::int64_t microbatches = 8;
  int rounds = 20;
  std::int64_t width = 1024;
  std::int64_t samples = 256;
  std::filesystem::path svg;  // a directory; empty: none
};

double theory(int stages, std::int64_t microbatches) {
  return static_cast<double>(stages - 1) / static_cast<double>(microbatches + stages - 1);
}

void draw(const SpanChart& chart, const Options& options, const std::string& name) {
  constexpr int kColumns = 110;
  fmt::print("{}\n", chart.to_terminal(kColumns));
  if (!options.svg.empty()) drawing::save_svg(chart.to_svg(), options.svg / (name + ".svg"));
}

// Its place in the legend.
std::size_t kind_of(bench::IdealSpan::Work work) {
  using Work = bench::IdealSpan::Work;
  return work == Work::forward ? 0 : work == Work::weight_gradients ? 2 : 1;
}

void draw_ideal(const Options& options) {
  struct Drawing {
    IdealSchedule schedule;
    const char* title;
    const char* name;
    std::int64_t theory_microbatches;  // 0: no formula
  };
  const std::int64_t m = options.microbatches;
  for (const auto& [schedule, title, name, of] :
       {Drawing{IdealSchedule::model_parallel, "One micro-batch: model parallelism",
                "pipeline_model_parallel", 1},
        Drawing{IdealSchedule::gpipe, "GPipe", "pipeline_gpipe", m},
        Drawing{IdealSchedule::one_f_one_b, "1F1B", "pipeline_1f1b", m},
        Drawing{IdealSchedule::zero_bubble, "Zero bubble (ZB-H1), which Pipeline does not have",
                "pipeline_zero_bubble", 0}}) {
    const auto step = bench::simulate(schedule, options.stages, m);
    const bool splits_backward = schedule == IdealSchedule::zero_bubble;
    SpanChart chart{.title = title,
                    .axis_label = "time, in forwards of a micro-batch",
                    .legend = {"forward", "backward"},
                    .rows = {},
                    .note = fmt::format("bubble {:.1f} %", 100 * bench::bubble_of(step))};
    if (splits_backward) chart.legend = {"forward", "backward, inputs", "backward, weights"};
    if (of > 0) {
      chart.note +=
          fmt::format(", (p - 1) / (m + p - 1) = {:.1f} %", 100 * theory(options.stages, of));
    }
    for (std::size_t stage = 0; stage < step.size(); ++stage) {
      auto& row = chart.rows.emplace_back();
      row.name = fmt::format("stage {}", stage);
      for (const auto& span : step[stage]) {
        row.spans.push_back({.label = std::to_string(span.microbatch),
                             .begin = span.begin,
                             .end = span.end,
                             .kind = kind_of(span.work)});
      }
    }
    draw(chart, options, name);
  }
}

torch::nn::Sequential make_stage(const Options& options) {
  constexpr int kLayers = 4;
  torch::nn::Sequential stage;
  for (int i = 0; i < kLayers; ++i) {
    stage->push_back(torch::nn::Linear(options.width, options.width));
    stage->push_back(torch::nn::Tanh());
  }
  return stage;
}

at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

// A schedule that is measured, on all ranks.
class Measured {
 public:
  Measured(const Options& options, PipelineSchedule schedule, std::int64_t microbatches)
      : schedule_(schedule),
        microbatches_(microbatches),
        stage_(make_stage(options)),
        pipeline_(stage_, loss_of, {.n_microbatches = microbatches, .schedule = schedule}) {}

  std::string name() const {
    return microbatches_ == 1                     ? "one micro-batch"
           : schedule_ == PipelineSchedule::gpipe ? "GPipe"
                                                  : "1F1B";
  }
  std::int64_t microbatches() const { return microbatches_; }
  void step(const at::Tensor& x, const at::Tensor& y) {
    stage_->zero_grad();
    pipeline_.step(x, y);
  }
  // Of the last step, over all stages. Collective.
  double bubble() const {
    std::chrono::nanoseconds busy{};
    for (const auto& action : pipeline_.stats().last) busy += action.end - action.begin;
    const auto share =
        at::scalar_tensor(static_cast<double>(busy.count()) /
                              static_cast<double>(pipeline_.stats().last_time.count()),
                          at::kDouble);
    all_reduce(share, {.op = ReduceOp::AVG});
    return 1 - share.item<double>();
  }
  // Of a step, of all stages. Collective.
  std::int64_t bytes() const {
    const auto& stats = pipeline_.stats();
    const auto sum =
        at::scalar_tensor(stats.bytes_sent / static_cast<std::int64_t>(stats.steps), at::kLong);
    all_reduce(sum);
    return sum.item<std::int64_t>();
  }
  // The last step's actions of all stages, in milliseconds. Collective; complete on rank 0.
  SpanChart chart() const {
    const auto milliseconds = [](std::chrono::nanoseconds time) {
      return std::chrono::duration<double, std::milli>(time).count();
    };
    SpanChart chart{.title = fmt::format("{}, {} micro-batches, measured", name(), microbatches_),
                    .axis_label = "ms",
                    .legend = {"forward", "backward"},
                    .rows = {},
                    .note = ""};
    for (const auto& actions : bench::gather_records(std::span(pipeline_.stats().last))) {
      auto& row = chart.rows.emplace_back();
      row.name = fmt::format("stage {}", chart.rows.size() - 1);
      for (const PipelineAction& action : actions) {
        row.spans.push_back({.label = std::to_string(action.microbatch),
                             .begin = milliseconds(action.begin),
                             .end = milliseconds(action.end),
                             .kind = static_cast<std::size_t>(action.kind)});
      }
    }
    return chart;
  }

 private:
  PipelineSchedule schedule_;
  std::int64_t microbatches_;
  torch::nn::Sequential stage_;
  Pipeline<torch::nn::SequentialImpl> pipeline_;
};

// Of the slowest rank, in milliseconds. Collective.
double time_of(const std::function<void()>& step) {
  barrier();
  const auto begin = Clock::now();
  step();
  const auto time = at::scalar_tensor(
      std::chrono::duration<double, std::milli>(Clock::now() - begin).count(), at::kDouble);
  all_reduce(time, {.op = ReduceOp::MAX});
  return time.item<double>();
}

void measure(const Options& options) {
  const int stages = get_world_size();
  std::vector<Measured> all;
  all.emplace_back(options, PipelineSchedule::gpipe, 1);
  for (const std::int64_t m : {4, 8, 16}) {
    all.emplace_back(options, PipelineSchedule::gpipe, m);
    all.emplace_back(options, PipelineSchedule::one_f_one_b, m);
  }
  torch::nn::Sequential whole;
  for (int stage = 0; stage < stages; ++stage) {
    const auto layers = make_stage(options);
    for (const auto& layer : *layers) whole->push_back(layer);
  }
  torch::manual_seed(0);  // the same batch on all ranks
  const auto x = torch::randn({options.samples, options.width});
  const auto y = torch::randn({options.samples, options.width});
  const auto alone = [&] {
    if (get_rank() != 0) return;
    whole->zero_grad();
    loss_of(whole->forward(x), y).backward();
  };
  std::vector<double> alone_ms;
  std::vector<std::vector<double>> ms(all.size());
  std::vector<std::vector<double>> bubbles(all.size());
  constexpr int kWarmUp = 2;
  for (int round = 0; round < options.rounds + kWarmUp; ++round) {
    if (round == kWarmUp) {
      alone_ms.clear();
      for (auto* series : {&ms, &bubbles}) series->assign(all.size(), {});
    }
    alone_ms.push_back(time_of(alone));
    for (std::size_t i = 0; i < all.size(); ++i) {
      ms[i].push_back(time_of([&] { all[i].step(x, y); }));
      bubbles[i].push_back(all[i].bubble());
    }
  }
  std::int64_t parameters = 0;
  for (const auto& parameter : whole->parameters()) parameters += parameter.numel();
  const bool prints = get_rank() == 0;
  if (prints) {
    fmt::print(
        "{} stages, {} samples of {} numbers; one rank alone: {:.1f} ms a step\n"
        "DistributedDataParallel of the model on {} ranks sends {:.1f} MB a step\n\n",
        stages, options.samples, options.width, bench::quantile(alone_ms, 0.5), stages,
        2.0 * (stages - 1) * static_cast<double>(parameters) * sizeof(float) / 1e6);
    fmt::print("{:<16} {:>4} {:>9} {:>22} {:>8} {:>8} {:>8}\n", "schedule", "m", "ms", "x one rank",
               "bubble", "theory", "MB sent");
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto speedup = bench::paired_speedup(ms[i], alone_ms);
    const auto bytes = all[i].bytes();
    const auto m = all[i].microbatches();
    if (!prints) continue;
    fmt::print("{:<16} {:>4} {:>9.1f} {:>8.2f} ({:.2f}-{:.2f}) {:>6.1f} % {:>6.1f} % {:>8.2f}\n",
               all[i].name(), m, bench::quantile(ms[i], 0.5), speedup.median, speedup.low,
               speedup.high, 100 * bench::quantile(bubbles[i], 0.5), 100 * theory(stages, m),
               static_cast<double>(bytes) / 1e6);
  }
  for (const auto& one : all) {
    const auto chart = one.chart();
    if (prints && one.microbatches() == options.microbatches) {
      fmt::print("\n");
      draw(chart, options,
           one.name() == "GPipe" ? "pipeline_measured_gpipe" : "pipeline_measured_1f1b");
    }
  }
}

}  // namespace

int run(int argc, char** argv) {
  Options options;
  CLI::App app("Draws schedules of pipelines, and measures them on the ranks of a job.");
  app.option_defaults()->always_capture_default();
  app.add_option("--stages", options.stages, "Stages of the drawings")->check(CLI::Range(1, 32));
  app.add_option("--micro-batches", options.microbatches, "Micro-batches of the drawings")
      ->check(CLI::Range(1, 64));
  app.add_option("--rounds", options.rounds, "Measured steps")->check(CLI::Range(1, 10000));
  app.add_option("--width", options.width, "Numbers of a sample")->check(CLI::Range(1, 65536));
  app.add_option("--samples", options.samples, "Samples of a batch, a multiple of 16")
      ->check(CLI::Range(16, 65536));
  app.add_option("--svg", options.svg, "A directory for the drawings as SVG")
      ->check(CLI::ExistingDirectory);
  CLI11_PARSE(app, argc, argv);
  const auto world = init_process_group();
  at::set_num_threads(1);
  if (get_world_size() == 1) {
    draw_ideal(options);
  } else {
    measure(options);
  }
  return 0;
}

}  // namespace pipeline_schedules

int main(int argc, char** argv) {
  return paceline::record([&] { return pipeline_schedules::run(argc, argv); });
}
