// What ranks may do differently in a step.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include <paceline/collectives.h>
#include <paceline/ddp.h>

#include "parallel/ddp/branches.h"
#include "parallel/ddp/steps.h"
#include "support/small_net.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using test::batch_of;
using test::Before;
using test::Branches;
using test::bytes_of;
using test::expect_torch_ranks;
using test::kSteps;
using test::kTinyBucket;
using test::loss_of;
using test::make_net;
using test::Model;
using test::train;
using test::WorldCase;

void expect_same_on_all_ranks(const std::vector<torch::Tensor>& tensors) {
  const auto all = all_gather_bytes(bytes_of(tensors));
  for (const auto& one : all) EXPECT_EQ(one, all[0]);
}

void expect_legal(const WorldCase& world, const DdpOptions& options, const Before& before) {
  expect_torch_ranks(world, [&](int rank, int) {
    Model model(make_net(at::kDouble), options);
    train(model, rank, before);
    expect_same_on_all_ranks(model.parameters());
  });
}

bool nothing(Model&, int, int) {
  return true;
}

using NoDivergenceWorldsUpTo3 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, NoDivergenceWorldsUpTo3, test::worlds({1, 2, 3}), test::CaseName());

TEST_P(NoDivergenceWorldsUpTo3, IfAllRanksDoTheSame) {
  for (const auto& options : std::vector<DdpOptions>{{},
                                                     {.bucket_cap_mb = kTinyBucket},
                                                     {.gradient_as_bucket_view = false},
                                                     {.find_unused_parameters = true},
                                                     {.bucket_cap_mb = 0.00001,
                                                     .find_unused_parameters = true,
                                                     .skip_all_reduce_unused_params = true}}) {
    expect_legal(GetParam(), options, nothing);
    expect_legal(GetParam(), options, [](Model& model, int, int step) {
      model.module()->second->bias.requires_grad_(step % 2 == 0);
      return true;
    });
    expect_legal(GetParam(), options, [](Model&, int, int step) { return step % 3 == 2; });
  }
  expect_legal(GetParam(), {.static_graph = true}, nothing);
}

// As a metric has it: nothing is accumulated, so nothing differs.
TEST_P(NoDivergenceWorldsUpTo3, IfOneRankRunsAForwardWithoutBackwardUnderNoSync) {
  for (const bool accumulates : {false, true}) {
    expect_legal(GetParam(), {}, [=](Model& model, int rank, int step) {
      if (rank == 1) {
        const auto guard = model.no_sync();
        model(batch_of(rank, step, at::kDouble));
      }
      return !accumulates || step % 3 == 2;
    });
  }
}

// As programs have it that evaluate averaged weights on one rank.
TEST_P(NoDivergenceWorldsUpTo3, IfOneRankSwapsParametersAndBack) {
  for (const bool in_place : {true, false}) {
    expect_legal(GetParam(), {}, [=](Model& model, int rank, int step) {
      if (rank != 0 || step % 2 == 0) return true;
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model.parameters()) {
        const auto own = parameter.clone();
        in_place ? parameter.zero_() : (parameter.set_data(torch::zeros_like(parameter)), own);
        in_place ? parameter.copy_(own) : (parameter.set_data(own), own);
      }
      return true;
    });
  }
}

using NoDivergenceBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, NoDivergenceBackends, test::backends_and_nodes(), test::CaseName());

TEST_P(NoDivergenceBackends, IfOptionsAllowDifferentUnusedParameters) {
  expect_torch_ranks(3, GetParam(), [](int rank, int) {
    torch::manual_seed(1);
    DistributedDataParallel model(Branches{}, {.find_unused_parameters = true});
    torch::optim::SGD sgd(model.parameters(), 0.1);
    for (int step = 0; step < kSteps; ++step) {
      sgd.zero_grad();
      model(torch::ones({1, 9}), step % 3 == rank).sum().backward();
      sgd.step();
    }
    expect_same_on_all_ranks(model.parameters());
  });
}

TEST_P(NoDivergenceBackends, IfMicroBatchesDifferWithAverageSamples) {
  expect_torch_ranks(3, GetParam(), [](int rank, int) {
    Model model(make_net(at::kDouble), {.average = Average::samples});
    torch::optim::SGD sgd(model.parameters(), 0.1);
    for (int step = 0; step < kSteps; ++step) {
      sgd.zero_grad();
      for (int micro = 0; micro <= rank; ++micro) {
        const auto guard = model.no_sync(micro < rank);
        const auto x = batch_of(rank, 10 * step + micro, at::kDouble);
        model.set_samples(rank + 1);
        loss_of(model(x), x).backward();
      }
      sgd.step();
    }
  });
}

// Ranks that have joined neither change their models nor freeze anything.
TEST_P(NoDivergenceBackends, IfLaterStepsOfJoinFreezeParameters) {
  expect_torch_ranks(3, GetParam(), [](int rank, int) {
    Model model(make_net(at::kDouble));
    torch::optim::SGD sgd(model.parameters(), 0.1);
    for (int epoch = 0; epoch < 2; ++epoch) {
      model.join([&] {
        for (int step = 0; step < 2 + 2 * rank; ++step) {
          model.module()->second->bias.requires_grad_(step < 3);
          const auto x = batch_of(rank, step, at::kDouble);
          const auto guard = model.no_sync(step % 2 == 0);
          loss_of(model(x), x).backward();
          if (step % 2 == 0) continue;
          sgd.step();
          sgd.zero_grad();
        }
      });
      model.module()->second->bias.requires_grad_(true);
      expect_same_on_all_ranks(model.parameters());
    }
    train(model, rank, nothing);
  });
}

// What is accumulated at its end, ranks that joined earlier have not.
TEST_P(NoDivergenceBackends, IfJoinEndsUnderNoSync) {
  expect_torch_ranks(3, GetParam(), [](int rank, int) {
    Model model(make_net(at::kDouble));
    for (int epoch = 0; epoch < 2; ++epoch) {
      model.join([&] {
        for (int step = 0; step < 2 + 2 * rank; ++step) {
          const auto guard = model.no_sync(step % 2 == 1);
          const auto x = batch_of(rank, step, at::kDouble);
          loss_of(model(x), x).backward();
        }
      });
    }
    train(model, rank, nothing);
  });
}

}  // namespace
}  // namespace paceline
