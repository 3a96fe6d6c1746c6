// Saving and loading beside torch::save and torch::load, and what an asynchronous save costs a
// step:
//
//     build/release/bin/benchmark_checkpoint [DIRECTORY]
//
// A model of 12.6 million parameters, 50 MB, and its AdamW, 101 MB. Nothing waits for the disk, as
// torch::save does not. In each of 20 rounds everything is timed once; each line has the median
// time and the median of the ratios of the rounds with its 90 % confidence interval.

#include <paceline/record.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <paceline/checkpoint.h>
#include <paceline/checkpoint_directory.h>

#include "measure/statistics.h"

namespace {

using namespace paceline;
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr int kContestRounds = 20;

double milliseconds(const std::function<void()>& body) {
  const auto begin = Clock::now();
  body();
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

class Contest {
 public:
  // `than`: the name of an earlier one to compare with, or empty.
  void add(const std::string& name, const std::string& than, std::function<void()> body) {
    entries_.push_back({name, than, std::move(body), {}});
  }
  void run() {
    for (int round = -1; round < kContestRounds; ++round) {  // the first is to warm up
      for (Entry& entry : entries_) {
        const double time = milliseconds(entry.body);
        if (round >= 0) entry.times.push_back(time);
      }
    }
    for (const Entry& entry : entries_) {
      std::printf("%-34s %8.1f ms", entry.name.c_str(), bench::quantile(entry.times, 0.5));
      for (const Entry& other : entries_) {
        if (other.name != entry.than) continue;
        const auto ratio = bench::paired_speedup(entry.times, other.times);
        std::printf("   %5.2f times as fast as %s (%.2f to %.2f)", ratio.median, other.name.c_str(),
                    ratio.low, ratio.high);
      }
      std::printf("\n");
    }
  }

 private:
  struct Entry {
    std::string name;
    std::string than;
    std::function<void()> body;
    std::vector<double> times;
  };
  std::vector<Entry> entries_;
};

}  // namespace

int main(int argc, char** argv) {
  return record([&] {
    const auto world = init_process_group();
    const fs::path directory = (argc > 1 ? fs::path(argv[1]) : fs::temp_directory_path()) /
                               "paceline-benchmark-checkpoint";
    fs::create_directories(directory);
    torch::nn::Sequential net(torch::nn::Linear(2048, 2048), torch::nn::Linear(2048, 2048),
                              torch::nn::Linear(2048, 2048));
    torch::optim::AdamW adam(net->parameters());
    net->forward(torch::ones({1, 2048})).sum().backward();
    adam.step();

    const States states{{"model", *net}, {"adam", adam}};
    CheckpointDirectory checkpoints(directory / "run",
                                    {.keep_last = 1, .asynchronous = true, .fsync = false});
    CheckpointDirectory synchronous(directory / "synchronous", {.keep_last = 1, .fsync = false});
    std::vector<at::Tensor> all = net->parameters();
    for (const auto& one : adam.state()) {
      const auto& state = dynamic_cast<const torch::optim::AdamWParamState&>(*one.second);
      all.push_back(state.exp_avg());
      all.push_back(state.exp_avg_sq());
    }
    std::vector<at::Tensor> copies;
    for (const at::Tensor& tensor : all) copies.push_back(tensor.detach().clone());

    Contest contest;
    const auto file = [&](const char* name) { return (directory / name).string(); };
    contest.add("torch::save", "", [&] { torch::save(net, file("torch")); });
    contest.add("paceline::save, .pt", "torch::save",
                [&] { paceline::save(*net, file("net.pt"), {.fsync = false}); });
    contest.add("paceline::save, .safetensors", "torch::save",
                [&] { paceline::save(*net, file("net.safetensors"), {.fsync = false}); });
    contest.add("torch::load", "", [&] { torch::load(net, file("torch")); });
    contest.add("paceline::load, .pt", "torch::load",
                [&] { paceline::load(*net, file("net.pt")); });
    contest.add("paceline::load, .safetensors", "torch::load",
                [&] { paceline::load(*net, file("net.safetensors")); });
    contest.add("torch::save, model and optimizer", "", [&] {
      torch::save(net, file("torch"));
      torch::save(adam, file("torch-adam"));
    });
    contest.add("CheckpointDirectory::save", "torch::save, model and optimizer",
                [&] { synchronous.save(1, states); });
    contest.add("memcpy of the state", "", [&] {
      for (std::size_t i = 0; i < all.size(); ++i) {
        std::memcpy(copies[i].data_ptr(), all[i].data_ptr(), all[i].nbytes());
      }
    });
    contest.add("the same, asynchronous", "memcpy of the state",
                [&] { checkpoints.save(1, states); });
    contest.add("waiting for it", "", [&] { checkpoints.wait(); });
    contest.run();
    fs::remove_all(directory);
  });
}
