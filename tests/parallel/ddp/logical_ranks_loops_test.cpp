#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <stdexcept>
#include <string>

#include <paceline/ddp.h>

#include "parallel/ddp/step_by.h"
#include "support/same_everywhere.h"
#include "support/small_net.h"
#include "support/torch_ranks.h"

// Loops over logical ranks that an exception leaves, or that run other forwards and backwards, too.
namespace paceline {
namespace {

using test::batch_of;
using test::bytes_of;
using test::cpu_generator;
using test::expect_same_everywhere;
using test::expect_torch_ranks;
using test::loss_of;
using test::make_net;
using test::step_by;

enum class Failure { before_forward, forward, backward };

torch::nn::Sequential make_stateful_net() {
  torch::manual_seed(2);
  return torch::nn::Sequential(torch::nn::Linear(9, 20), torch::nn::BatchNorm1d(20),
                               torch::nn::Dropout(0.3), torch::nn::Linear(20, 2));
}

// Runs a step; the logical rank `failing` throws.
template <typename Model>
void run_step(Model& model, int step, int failing, Failure failure) {
  for (const int rank : model.logical_ranks()) {
    const auto random = cpu_generator().get_state();
    const auto x = batch_of(rank, step, at::kFloat);
    cpu_generator().set_state(random);
    if (rank == failing && failure == Failure::before_forward) throw std::runtime_error("no data");
    const auto output = model(x);
    if (rank == failing && failure == Failure::forward) throw std::runtime_error("no loss");
    if (rank == failing) {
      output.register_hook(
          [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("no gradient"); });
    }
    loss_of(output, x).backward();
  }
}

// A step that an exception ends on one rank, and then on all, is repeated.
std::string train_with_failures(bool trains, Failure failure) {
  constexpr int kOf = 5;
  auto net = make_stateful_net();
  torch::manual_seed(9);
  DistributedDataParallel model(net, {.logical_ranks = kOf});
  net->train(trains);
  for (int step = 0; step < 3; ++step) {
    for (const int failing : {0, 1, 4}) {
      EXPECT_ANY_THROW(run_step(model, step, failing, failure)) << failing;
      EXPECT_TRUE(net[0]->as<torch::nn::Linear>()->weight.grad().defined() == (step > 0));
    }
    run_step(model, step, -1, failure);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.sub_(parameter.grad() * 0.1);
    net->zero_grad(false);
  }
  auto tensors = net->parameters();
  for (const auto& buffer : net->buffers()) tensors.push_back(buffer);
  return std::to_string(std::hash<std::string>{}(bytes_of(tensors)));
}

TEST(LogicalRanks, GoOnAfterAnExceptionInAStep) {
  for (const auto failure : {Failure::before_forward, Failure::forward, Failure::backward}) {
    SCOPED_TRACE(static_cast<int>(failure));
    expect_same_everywhere({1, 2, 3, 5}, [=] { return train_with_failures(true, failure); });
  }
  expect_same_everywhere({1, 2, 5}, [] { return train_with_failures(false, Failure::backward); });
}

// The step is complete then, on all ranks.
TEST(LogicalRanks, GoOnAfterAnExceptionBehindTheLastBackward) {
  expect_same_everywhere({1, 2, 3}, [] {
    auto net = make_stateful_net();
    torch::manual_seed(9);
    DistributedDataParallel model(net, {.logical_ranks = 3});
    for (int step = 0; step < 3; ++step) {
      const auto run = [&] {
        for (const int rank : model.logical_ranks()) {
          const auto random = cpu_generator().get_state();
          const auto x = batch_of(rank, step, at::kFloat);
          cpu_generator().set_state(random);
          loss_of(model(x), x).backward();
          if (rank == 2) throw std::runtime_error("cannot write the log");
        }
      };
      const auto [first, count] = model.logical_ranks().range();
      if (first + count == 3) {
        EXPECT_THROW(run(), std::runtime_error);
      } else {
        run();
      }
      step_by(0.1, net->parameters());
    }
    auto tensors = net->parameters();
    for (const auto& buffer : net->buffers()) tensors.push_back(buffer);
    return std::to_string(std::hash<std::string>{}(bytes_of(tensors)));
  });
}

TEST(LogicalRanks, MayBeAssignedAnewAfterAnException) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    DistributedDataParallel model(make_stateful_net(), {.logical_ranks = 4});
    EXPECT_ANY_THROW(run_step(model, 0, 1, Failure::forward));
    model.logical_ranks().assign(rank == 0 ? LogicalRange{0, 3} : LogicalRange{3, 1});
    for (int step = 0; step < 2; ++step) run_step(model, step, -1, Failure::forward);
    EXPECT_EQ(model.stats().steps, 2u);
  });
}

template <typename Model>
torch::Tensor forward_of(Model& model, int rank, int step) {
  const auto state = cpu_generator().get_state();
  const auto x = batch_of(rank, step, at::kFloat);
  cpu_generator().set_state(state);
  return loss_of(model(x), x);
}

std::string train_stateful(bool with_other_forwards) {
  auto net = make_stateful_net();
  net[2]->as<torch::nn::Dropout>()->options.p(0);
  DistributedDataParallel model(net, {.logical_ranks = 4});
  for (int step = 0; step < 3; ++step) {
    if (with_other_forwards) {
      const torch::NoGradGuard no_grad;
      for (const int rank : model.logical_ranks()) forward_of(model, rank, step);
    }
    for (const int rank : model.logical_ranks()) {
      forward_of(model, rank, step).backward();
      const torch::NoGradGuard no_grad;
      if (with_other_forwards) forward_of(model, rank, step + 1);
    }
    step_by(0.1, net->parameters());
  }
  auto tensors = net->parameters();
  for (const auto& buffer : net->buffers()) tensors.push_back(buffer);
  return std::to_string(std::hash<std::string>{}(bytes_of(tensors)));
}

// Neither a loop without a backward nor a forward after it changes buffers, on any number of ranks.
TEST(LogicalRanks, KeepTheBuffersOfTheSynchronisedBackward) {
  expect_same_everywhere({1, 2, 3, 4}, [] {
    const auto result = train_stateful(true);
    EXPECT_EQ(result, train_stateful(false));
    return result;
  });
}

// What is allowed with one logical rank each is allowed with several.
TEST(LogicalRanks, MayRunForwardsBehindTheBackwardAndAccumulateOutside) {
  for (const auto average : {Average::ranks, Average::samples}) {
    expect_same_everywhere({1, 2, 3}, [=] {
      auto net = make_net(at::kFloat);
      DistributedDataParallel model(net, {.average = average, .logical_ranks = 3});
      for (int step = 0; step < 3; ++step) {
        {
          net->eval();
          const auto guard = model.no_sync();
          forward_of(model, 7, step).backward();
          net->train();
        }
        for (const int rank : model.logical_ranks()) {
          if (average == Average::samples) model.set_samples(rank + 1);
          forward_of(model, rank, step).backward();
          forward_of(model, rank, step);
        }
        step_by(0.1, net->parameters());
      }
      return std::to_string(std::hash<std::string>{}(bytes_of(net->parameters())));
    });
  }
}

}  // namespace
}  // namespace paceline
