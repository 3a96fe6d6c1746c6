// A training step of DataParallel with two replicas, beside the module in one process and
// DistributedDataParallel on two ranks, all with the same global batch:
//
//     paceline run --nproc-per-node 2 build/release/bin/benchmark_data_parallel [MODEL...]
//
// Each line has the median time of a step, and how many times as fast as the module on one thread
// it is in the same round, with its 90 % confidence interval. Rank 1 sleeps in a barrier while rank
// 0 runs alone. Then come, for DataParallel with the loss inside, the times of each replica in a
// step, what else replica 0's thread does, and the most memory that each thread had allocated.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <paceline/data_parallel.h>
#include <paceline/ddp.h>
#include <paceline/distributed.h>
#include <paceline/record.h>
#include <torch/optim/sgd.h>

#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <paceline/error.h>

#include "measure/rounds.h"
#include "measure/statistics.h"
#include "models/models.h"
#include "peak_memory.h"
#include "unrolled_rnn.h"

namespace {

using namespace paceline;
using models::Classifier;

constexpr int kReplicas = 2;

const std::vector<models::Model>& compared_models() {
  static const std::vector<models::Model> models{
      *models::find_model("lenet"),
      {"rnn",
       32,
       {bench::UnrolledRnn::kSteps, bench::UnrolledRnn::kFeatures},
       bench::UnrolledRnn::kClasses,
       [] { return std::make_shared<bench::UnrolledRnn>(); }},
      *models::find_model("wide_mlp"),
      *models::find_model("resnet18"),
  };
  return models;
}

// The batch of both ranks together.
models::Batch whole_batch(models::Model model) {
  model.batch *= kReplicas;
  return models::make_batch(model);
}

// A step on rank 0 alone, with this number of intra-op threads.
bench::Contender alone(std::string name, std::string variant, int threads,
                       std::function<void()> step) {
  if (get_rank() != 0) step = [] {};
  return {std::move(name), std::move(variant), [threads] { at::set_num_threads(threads); },
          std::move(step)};
}

// The contenders' states. Rank 1 uses the one of DistributedDataParallel only.
class Trainers {
 public:
  explicit Trainers(const models::Model& model)
      : batch_(whole_batch(model)),
        share_(models::make_batch(model)),
        module_(model.make()),
        outside_(model.make, kReplicas),
        inside_(model.make, kReplicas),
        ddp_(model.make()) {}

  std::vector<bench::Contender> contenders() {
    return {
        alone("module", "1 thread", 1, [this] { step(*module_); }),
        alone("module", "2 threads", 2, [this] { step(*module_); }),
        alone("DataParallel", "loss outside", 1, [this] { step(outside_); }),
        alone("DataParallel", "loss inside", 1, [this] { step_inside(); }),
        {"DistributedDataParallel", "2 ranks", [] { at::set_num_threads(1); },
         [this] { step(ddp_); }},
    };
  }

  void step_inside() {
    train(inside_sgd_, [&] {
      const auto loss = [](Classifier& net, const at::Tensor& x, const at::Tensor& y) {
        return at::cross_entropy_loss(net.forward(x), y);
      };
      return inside_.parallel_apply(loss, batch_.input, batch_.target).mean();
    });
  }
  void step_alone() { step(*module_); }
  // Frees memory that the next steps would free.
  void zero_grad() {
    module_->zero_grad();
    inside_.zero_grad();
  }
  const DataParallelStats& stats() const { return inside_.stats(); }

 private:
  template <typename Loss>
  static void train(torch::optim::SGD& sgd, Loss loss) {
    sgd.zero_grad();
    loss().backward();
    sgd.step();
  }
  void step(Classifier& net) {
    train(module_sgd_,
          [&] { return at::cross_entropy_loss(net.forward(batch_.input), batch_.target); });
  }
  void step(DistributedDataParallel<Classifier>& net) {
    train(ddp_sgd_, [&] { return at::cross_entropy_loss(net(share_.input), share_.target); });
  }
  void step(DataParallel<Classifier>& net) {
    train(outside_sgd_, [&] { return at::cross_entropy_loss(net(batch_.input), batch_.target); });
  }

  models::Batch batch_;
  models::Batch share_;
  std::shared_ptr<Classifier> module_;
  DataParallel<Classifier> outside_;
  DataParallel<Classifier> inside_;
  DistributedDataParallel<Classifier> ddp_;
  torch::optim::SGD module_sgd_{module_->parameters(), 1e-3};
  torch::optim::SGD outside_sgd_{outside_.parameters(), 1e-3};
  torch::optim::SGD inside_sgd_{inside_.parameters(), 1e-3};
  torch::optim::SGD ddp_sgd_{ddp_.parameters(), 1e-3};
};

void print_speedups(const std::vector<bench::Series>& all) {
  for (const bench::Series& one : all) {
    const auto ratio = bench::paired_speedup(one.wall_us, all.front().wall_us);
    fmt::print("  {:23} {:12} {:9.0f} us  {:.2f} times as fast ({:.2f} to {:.2f})\n",
               one.implementation, one.variant, bench::quantile(one.wall_us, 0.5), ratio.median,
               ratio.low, ratio.high);
  }
}

void print_replicas(Trainers& trainers) {
  constexpr int kSteps = 100;
  at::set_num_threads(1);
  const DataParallelStats before = trainers.stats();
  for (int i = 0; i < kSteps; ++i) trainers.step_inside();
  const DataParallelStats& after = trainers.stats();
  const auto per_step = [&](auto duration_of) {
    return std::chrono::duration<double, std::micro>(duration_of(after) - duration_of(before))
               .count() /
           kSteps;
  };
  for (std::size_t i = 0; i < after.replicas.size(); ++i) {
    fmt::print("  replica {}: forward {:.0f} us, backward {:.0f} us\n", i,
               per_step([&](const auto& stats) { return stats.replicas[i].forward; }),
               per_step([&](const auto& stats) { return stats.replicas[i].backward; }));
  }
  fmt::print("  besides: scatter {:.0f} us, gather {:.0f} us, sum {:.0f} us\n",
             per_step([](const auto& stats) { return stats.scatter; }),
             per_step([](const auto& stats) { return stats.gather; }),
             per_step([](const auto& stats) { return stats.sum; }));
}

void print_memory(Trainers& trainers) {
  trainers.zero_grad();
  const auto megabytes = [](const std::function<void()>& step) {
    std::vector<std::string> peaks;
    for (const auto bytes : bench::peak_memory_by_thread(step)) {
      peaks.push_back(fmt::format("{:.2f}", static_cast<double>(bytes) / 1e6));
    }
    return fmt::format("{}", fmt::join(peaks, " + "));
  };
  fmt::print("  memory by thread: module {} MB, DataParallel {} MB\n",
             megabytes([&] { trainers.step_alone(); }), megabytes([&] { trainers.step_inside(); }));
}

void compare(const std::string& name, int rounds) {
  const auto model = std::ranges::find(compared_models(), name, &models::Model::name);
  if (model == compared_models().end()) throw UsageError("there is no model " + name);
  Trainers trainers(*model);
  const auto all = bench::measure(trainers.contenders(),
                                  {.rounds = rounds, .length = std::chrono::milliseconds(200)});
  if (get_rank() != 0) return;
  fmt::print("{}, a batch of {}\n", name, kReplicas * model->batch);
  print_speedups(all);
  print_replicas(trainers);
  print_memory(trainers);
  std::fflush(stdout);
}

int compare_all(int argc, char** argv) {
  std::vector<std::string> names{"lenet", "rnn"};
  int rounds = 40;
  CLI::App app("Compares DataParallel with one process and with DistributedDataParallel.");
  app.option_defaults()->always_capture_default();
  app.add_option("models", names, "lenet, rnn or resnet18");
  app.add_option("--rounds", rounds, "Rounds of measurement")->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  const auto world = init_process_group();
  if (get_world_size() != kReplicas) throw UsageError("run it on 2 ranks");
  for (const std::string& name : names) compare(name, rounds);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return record([&] { return compare_all(argc, argv); });
}
