// Trains a small net for some steps, whoever has started it. Rank 0 prints its parameters' norms.
//
//   train BACKEND      as one of the ranks of a job; also "paceline over mpi"
//   train BACKEND HOW  the same, but rank 1 fails after some steps: it throws, or it leaves
//   train spawn RANKS  starts RANKS ranks itself
//   train alone RANKS  in one process without Paceline, on the batches of all RANKS ranks
#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdio>
#include <stdexcept>
#include <string>

#include <paceline/paceline.h>

#include "support/small_net.h"

namespace {

constexpr int kSteps = 5;

void print_norms(const std::vector<torch::Tensor>& parameters, int ranks) {
  std::string line = fmt::format("ranks={} norms=", ranks);
  for (const auto& parameter : parameters) {
    line += fmt::format("{:.15e} ", parameter.norm().item<double>());
  }
  std::puts(line.c_str());
}

void train_alone(int ranks) {
  auto net = paceline::test::make_net(at::kDouble);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad();
    for (int rank = 0; rank < ranks; ++rank) {
      const auto x = paceline::test::batch_of(rank, step, at::kDouble);
      (paceline::test::loss_of(net->forward(x), x) / ranks).backward();
    }
    sgd.step();
  }
  print_norms(net->parameters(), ranks);
}

paceline::InitOptions options_of(const std::string& backend) {
  if (backend != "paceline over mpi") return {.backend = backend};
  return {.backend_options = paceline::PacelineOptions{.engine = "mpi"}};
}

void train(const std::string& backend, const std::string& how = "") {
  const auto world = paceline::init_process_group(options_of(backend));
  paceline::DistributedDataParallel model(paceline::test::make_net(at::kDouble));
  torch::optim::SGD sgd(model.parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    if (paceline::get_rank() == 1 && step == 2 && how == "throws") {
      throw std::runtime_error("no more data");
    }
    if (paceline::get_rank() == 1 && step == 2 && how == "leaves") return;
    sgd.zero_grad();
    const auto x = paceline::test::batch_of(paceline::get_rank(), step, at::kDouble);
    paceline::test::loss_of(model(x), x).backward();
    sgd.step();
  }
  if (paceline::get_rank() == 0) print_norms(model.parameters(), paceline::get_world_size());
}

}  // namespace

int main(int argc, char** argv) {
  return paceline::record([&] {
    const std::string backend = argc > 1 ? argv[1] : "paceline";
    if (backend == "alone") {
      train_alone(std::stoi(argv[2]));
    } else if (backend == "spawn") {
      paceline::spawn([](int) { train("paceline"); }, {.nprocs = std::stoi(argv[2])});
    } else {
      train(backend, argc > 2 ? argv[2] : "");
    }
  });
}
