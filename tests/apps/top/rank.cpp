// A rank of the jobs that command_test.cpp watches: rank DIRECTORY. It wraps a model once
// DIRECTORY/wrap exists, and trains until DIRECTORY/stop does. Rank 1 is slow. After a step, rank 0
// says which of DIRECTORY/mark1, mark2, ... it has found.

#include <torch/torch.h>

#include <paceline/paceline.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>

#include "support/eventually.h"

namespace {

struct Net : torch::nn::Module {
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(8, 1));
  at::Tensor forward(const at::Tensor& x) {
    if (paceline::get_rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return linear(x);
  }
};

// The same on all ranks.
bool goes_on(const std::filesystem::path& stop) {
  const at::Tensor stops = at::scalar_tensor(std::filesystem::exists(stop) ? 1 : 0, at::kInt);
  paceline::all_reduce(stops, {.op = paceline::ReduceOp::MAX});
  return stops.item<int>() == 0;
}

void train(const std::filesystem::path& directory) {
  const auto world = paceline::init_process_group();
  if (paceline::get_rank() == 0) std::puts("waits;");
  std::fflush(stdout);
  paceline::test::eventually([&] { return std::filesystem::exists(directory / "wrap"); });
  paceline::DistributedDataParallel model(std::make_shared<Net>());
  paceline::Progress progress({});
  for (int mark = 1; goes_on(directory / "stop");) {
    model(at::ones({4, 8})).sum().backward();
    progress.step(4, 0);
    const std::string name = "mark" + std::to_string(mark);
    if (paceline::get_rank() != 0 || !std::filesystem::exists(directory / name)) continue;
    std::puts((name + ';').c_str());
    std::fflush(stdout);
    ++mark;
  }
}

}  // namespace

int main(int, char** argv) {
  return paceline::record([&] { train(argv[1]); });
}
