// Trains a small net for some steps, whoever has started it. Rank 0 prints its parameters' norms.
//
//   train BACKEND      as one of the ranks of a job; also "paceline over mpi". Each rank prints a
//       hash of its parameters' bits
//   train logical RANKS  the same over the default backend, with so many logical ranks
//   train BACKEND HOW  the same, but rank 1 fails after some steps: it throws, or it leaves
//   train replaced FILE  as a rank that may be replaced, until FILE exists; says how many steps
//   train served FILE  by a parameter server, rank 0, whose workers may be lost, until FILE exists
//   train preempted DIRECTORY STEPS  goes on from the checkpoint in DIRECTORY, saves one if it is
//       asked to end
//   train spawn RANKS  starts RANKS ranks itself
//   train alone RANKS [STEPS]  in one process without Paceline, on the batches of all RANKS ranks
#include <fmt/format.h>
#include <torch/torch.h>

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

#include <paceline/paceline.h>

#include "base/hash.h"
#include "support/small_net.h"

namespace {

constexpr int kSteps = 5;
constexpr double kLearningRate = 0.01;

void print_norms(const std::vector<torch::Tensor>& parameters, int ranks) {
  std::string line = fmt::format("ranks={} norms=", ranks);
  for (const auto& parameter : parameters) {
    line += fmt::format("{:.15e} ", parameter.norm().item<double>());
  }
  std::puts(line.c_str());
}

void train_alone(int ranks, int steps) {
  auto net = paceline::test::make_net(at::kDouble);
  torch::optim::SGD sgd(net->parameters(), kLearningRate);
  for (int step = 0; step < steps; ++step) {
    if (step % 1000 == 999) fmt::print(stderr, "step {}\n", step);  // a test waits for some output
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

void train(const std::string& backend, const std::string& how = "", int logical_ranks = 0) {
  const auto world = paceline::init_process_group(options_of(backend));
  paceline::DistributedDataParallel model(
      paceline::test::make_net(at::kDouble),
      {.bucket_cap_mb = paceline::test::kTinyBucket, .logical_ranks = logical_ranks});
  torch::optim::SGD sgd(model.parameters(), kLearningRate);
  for (int step = 0; step < kSteps; ++step) {
    if (paceline::get_rank() == 1 && step == 2 && how == "throws") {
      throw std::runtime_error("no more data");
    }
    if (paceline::get_rank() == 1 && step == 2 && how == "leaves") return;
    sgd.zero_grad();
    for (const int rank : model.logical_ranks()) {
      const auto x = paceline::test::batch_of(rank, step, at::kDouble);
      paceline::test::loss_of(model(x), x).backward();
    }
    sgd.step();
  }
  const auto bytes = paceline::test::bytes_of(model.parameters());
  std::puts(fmt::format("bits={:016x}", paceline::base::hash(bytes)).c_str());
  if (paceline::get_rank() == 0) print_norms(model.parameters(), model.logical_ranks().total());
}

// Copies the parameters of the rank that has trained most steps, and returns how many it has: a
// death may end a step on some ranks only.
int synchronise(const std::vector<torch::Tensor>& parameters, int steps) {
  const torch::NoGradGuard no_grad;
  auto all = torch::empty({paceline::get_world_size()}, torch::kInt);
  paceline::all_gather_into_tensor(all, torch::full({1}, steps, torch::kInt));
  const int furthest = all.argmax().item<int>();
  // As a whole or not at all: this may throw, too.
  std::vector<torch::Tensor> received;
  for (const auto& parameter : parameters) {
    received.push_back(parameter.clone());
    paceline::broadcast(received.back(), {.src = furthest});
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(received[i]);
  return all[furthest].item<int>();
}

void print_start() {
  const char* const replacement = std::getenv("PACELINE_REPLACEMENT");
  fmt::print("started={} ({})\n", ::getpid(), replacement != nullptr ? replacement : "0");
  std::fflush(stdout);
}

struct NoMoreData {};

// Rank 1 also has an exception of its own, after which it goes on.
void train_replaced(const std::filesystem::path& file) {
  print_start();
  const auto world = paceline::init_process_group({.enable_reconfigure = true});
  auto net = paceline::test::make_net(at::kDouble);
  int steps = 0;
  bool has_thrown = false;
  for (bool stopped = false; !stopped;) {
    paceline::reconfigure();
    try {
      steps = synchronise(net->parameters(), steps);
      paceline::DistributedDataParallel model(net);
      torch::optim::SGD sgd(model.parameters(), kLearningRate);
      while (!stopped) {
        sgd.zero_grad();
        const auto x = paceline::test::batch_of(paceline::get_rank(), steps, at::kDouble);
        const auto loss = paceline::test::loss_of(model(x), x);
        if (paceline::get_rank() == 1 && !std::exchange(has_thrown, true)) throw NoMoreData();
        loss.backward();
        sgd.step();
        ++steps;
        auto stop = torch::full({1}, std::filesystem::exists(file) ? 1 : 0);
        paceline::all_reduce(stop, {.op = paceline::ReduceOp::MAX});
        stopped = stop.item<bool>();
      }
    } catch (const paceline::PeerLost&) {
    } catch (const NoMoreData&) {
    }
  }
  if (paceline::get_rank() != 0) return;
  fmt::print("steps={}\n", steps);
  print_norms(net->parameters(), paceline::get_world_size());
}

// Each step adds 1 to the parameter.
void train_served(const std::filesystem::path& file) {
  print_start();
  auto count = torch::zeros({1}, torch::TensorOptions(torch::kDouble).requires_grad(true));
  paceline::ParameterServer server({{"count", count}}, [](auto parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters), 1);
  });
  if (server.is_server()) {
    server.serve();
    const auto stats = server.stats();
    std::puts(fmt::format("count={} version={}", count.item<double>(), stats.version).c_str());
    return;
  }
  while (!std::filesystem::exists(file)) {
    count.mutable_grad() = -torch::ones({1}, torch::kDouble);
    server.step();
  }
}

int train_until_preempted(const std::filesystem::path& directory, int steps) {
  const auto world = paceline::init_process_group();
  paceline::DistributedDataParallel model(paceline::test::make_net(at::kDouble));
  torch::optim::SGD sgd(model.parameters(), kLearningRate);
  int step = 0;
  const paceline::States states{{"model", model}, {"optimizer", sgd}, {"step", step}};
  paceline::CheckpointDirectory checkpoints(directory);
  if (const auto resumed = checkpoints.resume(states)) std::puts(resumed->message.c_str());
  paceline::Preemption preemption;
  fmt::print("process={}\n", ::getpid());
  for (; step < steps; ++step) {
    if (preemption.requested()) {
      checkpoints.save(step, states);
      fmt::print("saved={}\n", step);
      return paceline::Preemption::exit_code;
    }
    sgd.zero_grad();
    const auto x = paceline::test::batch_of(paceline::get_rank(), step, at::kDouble);
    paceline::test::loss_of(model(x), x).backward();
    sgd.step();
  }
  if (paceline::get_rank() == 0) print_norms(model.parameters(), paceline::get_world_size());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return paceline::record([&]() -> int {
    const std::string backend = argc > 1 ? argv[1] : "paceline";
    if (backend == "preempted") return train_until_preempted(argv[2], std::stoi(argv[3]));
    if (backend == "alone") {
      train_alone(std::stoi(argv[2]), argc > 3 ? std::stoi(argv[3]) : kSteps);
    } else if (backend == "logical") {
      train("paceline", "", std::stoi(argv[2]));
    } else if (backend == "replaced") {
      train_replaced(argv[2]);
    } else if (backend == "served") {
      train_served(argv[2]);
    } else if (backend == "spawn") {
      paceline::spawn([](int) { train("paceline"); }, {.nprocs = std::stoi(argv[2])});
    } else {
      train(backend, argc > 2 ? argv[2] : "");
    }
    return 0;
  });
}
