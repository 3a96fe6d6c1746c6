#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <sstream>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/error.h>
#include <paceline/log.h>

#include "support/small_net.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

// Ranks that do not do the same in a step are told so in the next one that is synchronised, all of
// them the same; what may differ does not disturb.
namespace paceline {
namespace {

using test::backends;
using test::batch_of;
using test::bytes_of;
using test::expect_torch_ranks;
using test::loss_of;
using test::make_net;
using test::NetImpl;
using test::RankContext;
using test::WorldCase;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Matcher;

constexpr int kSteps = 6;  // counted from 0
constexpr double kTinyBucket = 0.001;

using Model = DistributedDataParallel<NetImpl>;

// What a rank does before a step; returns whether the step is to be synchronised.
using Before = std::function<bool(Model& model, int rank, int step)>;

void train(Model& model, int rank, const Before& before) {
  torch::optim::SGD sgd(model.parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    const bool sync = before(model, rank, step);
    const auto guard = model.no_sync(!sync);
    const auto x = batch_of(rank, step, at::kDouble);
    sgd.zero_grad();
    loss_of(model(x), x).backward();
    if (sync) sgd.step();
  }
}

std::string text_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// All ranks end with the same text.
void expect_told(const WorldCase& world, const std::function<void(int rank, int size)>& body,
                 const Matcher<std::string>& matcher) {
  const auto ends =
      test::run_torch_ranks(world.size, world.backend, [&](const RankContext& context) {
        const World formed = init_process_group(context.init);
        return text_of([&] { body(context.rank, context.size); });
      });
  for (const auto& end : ends) {
    EXPECT_TRUE(end.exited_cleanly());
    EXPECT_THAT(end.report, matcher);
    EXPECT_EQ(end.report, ends[0].report);
  }
}

void expect_told(const WorldCase& world, const DdpOptions& options, const Before& before,
                 const Matcher<std::string>& matcher) {
  expect_told(
      world,
      [&](int rank, int) {
        Model model(make_net(at::kDouble), options);
        train(model, rank, before);
      },
      matcher);
}

void expect_legal(const WorldCase& world, const DdpOptions& options, const Before& before) {
  expect_torch_ranks(world, [&](int rank, int) {
    Model model(make_net(at::kDouble), options);
    train(model, rank, before);
    const auto all = all_gather_bytes(bytes_of(model.parameters()));
    for (const auto& one : all) EXPECT_EQ(one, all[0]);
  });
}

bool freeze_on_rank_1(Model& model, int rank, int step) {
  if (rank == 1 && step == 3) {
    model.module()->second->bias.requires_grad_(false);
    model.module()->last->weight.requires_grad_(false);
  }
  return true;
}

using DivergenceWorldsUpTo5 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, DivergenceWorldsUpTo5, test::worlds({2, 3, 5}), test::CaseName());

TEST_P(DivergenceWorldsUpTo5, NamesParametersFrozenOnOneRank) {
  const std::vector<DdpOptions> all{{},
                                    {.zero_copy = false},
                                    {.bucket_cap_mb = kTinyBucket},
                                    {.gradient_as_bucket_view = false},
                                    {.find_unused_parameters = true},
                                    {.static_graph = true},
                                    {.bucket_cap_mb = 0.00001,
                                     .find_unused_parameters = true,
                                     .skip_all_reduce_unused_params = true}};
  for (const auto& options : all) {
    expect_told(GetParam(), options, freeze_on_rank_1,
                AllOf(HasSubstr("step 4"),
                      HasSubstr("second.bias is frozen on rank 1, last.weight on rank 1"),
                      HasSubstr("2 of 6 parameters")));
  }
}

TEST_P(DivergenceWorldsUpTo5, NamesParametersFrozenOnOneRankWithAHook) {
  expect_told(
      GetParam(),
      [&](int rank, int) {
        Model model(make_net(at::kDouble));
        model.register_comm_hook(comm_hooks::all_reduce());
        train(model, rank, freeze_on_rank_1);
      },
      AllOf(HasSubstr("step 4"), HasSubstr("second.bias is frozen on rank 1")));
}

TEST_P(DivergenceWorldsUpTo5, NamesARankAloneUnderNoSync) {
  for (const bool view : {true, false}) {
    expect_told(
        GetParam(), {.gradient_as_bucket_view = view},
        [](Model&, int rank, int step) { return rank != 1 || step != 3; },
        AllOf(HasSubstr("step 4"), HasSubstr("rank 0 4, rank 1 4 and 1 under no_sync"),
              HasSubstr("Average::samples"), HasSubstr("closure")));
  }
}

TEST_P(DivergenceWorldsUpTo5, NamesARankWithAForwardWithoutBackward) {
  expect_told(
      GetParam(), {},
      [](Model& model, int rank, int step) {
        if (rank == 1 && step == 2) model(batch_of(rank, step, at::kDouble));
        return true;
      },
      AllOf(HasSubstr("step 3"), HasSubstr("rank 0 3, rank 1 4"), HasSubstr("closure")));
}

// Both ways in which a program may have it.
TEST_P(DivergenceWorldsUpTo5, NamesAModelLoadedOnOneRank) {
  expect_told(
      GetParam(), {},
      [](Model& model, int rank, int step) {
        if (rank != 0 || step != 4) return true;
        std::stringstream file;
        torch::save(make_net(at::kDouble, 9), file);
        std::shared_ptr<torch::nn::Module> module = model.module();
        torch::load(module, file);
        return true;
      },
      AllOf(HasSubstr("step 5"), HasSubstr("first.weight on rank"), HasSubstr("load")));
  expect_told(
      GetParam(), {},
      [](Model& model, int rank, int step) {
        if (rank != 1 || step != 4) return true;
        const torch::NoGradGuard no_grad;
        model.module()->second->bias.add_(1);
        return true;
      },
      AllOf(HasSubstr("step 5"), HasSubstr("second.bias on rank 1 differs")));
}

void train_by_line_search(int rank, int size, bool averaged) {
  Model model(make_net(at::kDouble));
  torch::optim::LBFGS lbfgs(model.parameters(),
                            torch::optim::LBFGSOptions(1).line_search_fn("strong_wolfe"));
  for (int step = 0; step < 4; ++step) {
    const auto x = batch_of(rank, step, at::kDouble) * (rank + 1);
    lbfgs.step([&] {
      lbfgs.zero_grad();
      const auto loss = loss_of(model(x), x);
      loss.backward();
      if (!averaged) return loss;
      auto mean = loss.detach() / size;
      all_reduce(mean);
      return mean;
    });
  }
}

// Each rank's line search calls the closure as often as its own loss wants.
TEST_P(DivergenceWorldsUpTo5, DetectsAClosureThatReturnsTheLocalLoss) {
  expect_told(
      GetParam(), [](int rank, int size) { train_by_line_search(rank, size, false); },
      AllOf(HasSubstr("differs from rank"), HasSubstr("closure")));
}

TEST(NoDivergence, IfAClosureReturnsTheAveragedLoss) {
  expect_torch_ranks(2, "paceline",
                     [](int rank, int size) { train_by_line_search(rank, size, true); });
}

using DivergenceRanksUpTo2 = test::SizeTest;
INSTANTIATE_TEST_SUITE_P(, DivergenceRanksUpTo2, ::testing::Values(1, 2), test::CaseName());

TEST_P(DivergenceRanksUpTo2, NamesAParameterThatIsNoLongerFrozen) {
  expect_torch_ranks(GetParam(), "paceline", [](int rank, int) {
    auto net = make_net(at::kDouble);
    net->second->weight.requires_grad_(false);
    Model model(net);
    const auto unfreeze = [](Model& self, int, int step) {
      if (step == 3) self.module()->second->weight.requires_grad_(true);
      return true;
    };
    EXPECT_THAT(text_of([&] { train(model, rank, unfreeze); }),
                AllOf(HasSubstr("second.weight"), HasSubstr("wrap")));
  });
}

// Those that have joined are told too.
TEST_P(DivergenceWorldsUpTo5, NamesRanksUnderNoSyncInAStepOfJoin) {
  expect_told(
      GetParam(),
      [](int rank, int) {
        Model model(make_net(at::kDouble));
        model.join([&] {
          if (rank == 4) return;
          train(model, rank, [](Model&, int of, int step) { return of != 1 || step != 3; });
        });
      },
      AllOf(HasSubstr("rank 1 "), HasSubstr("no_sync")));
}

std::vector<std::string> warnings_of(const std::function<void()>& body) {
  std::vector<std::string> warnings;
  set_log_callback([&](LogLevel level, std::string_view text) {
    if (level == LogLevel::warning) warnings.emplace_back(text);
  });
  body();
  set_log_callback({});
  return warnings;
}

using DivergenceWorldsUpTo2 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, DivergenceWorldsUpTo2, test::worlds({1, 2}), test::CaseName());

TEST_P(DivergenceWorldsUpTo2, WarnsOfAWrapperThatWasNeverCalled) {
  expect_torch_ranks(GetParam(), [](int rank, int) {
    const auto x = batch_of(rank, 0, at::kDouble);
    const auto warnings = warnings_of([&] {
      auto net = make_net(at::kDouble);
      const Model model(net);
      loss_of(net(x), x).backward();
    });
    ASSERT_EQ(warnings.size(), 1u);
    EXPECT_THAT(warnings[0], AllOf(HasSubstr("first.weight"), HasSubstr("call the wrapper")));
    EXPECT_TRUE(warnings_of([&] {
                  Model model(make_net(at::kDouble));
                  loss_of(model(x), x).backward();
                }).empty());
    EXPECT_TRUE(warnings_of([&] { const Model model(make_net(at::kDouble)); }).empty());
    EXPECT_TRUE(warnings_of([&] {
                  auto net = make_net(at::kDouble);
                  Model model(net);
                  {
                    const torch::NoGradGuard evaluation;
                    model(x);
                  }
                  loss_of(net(x), x).backward();
                }).empty());
    EXPECT_TRUE(warnings_of([&] {
                  try {
                    auto net = make_net(at::kDouble);
                    const Model model(net);
                    loss_of(net(x), x).backward();
                    throw std::runtime_error("no such file");
                  } catch (const std::runtime_error&) {
                  }
                }).empty());
  });
}

bool nothing(Model&, int, int) {
  return true;
}

struct BranchesImpl : torch::nn::Module {
  torch::nn::Linear base{register_module("base", torch::nn::Linear(9, 4))};
  torch::nn::Linear extra{register_module("extra", torch::nn::Linear(9, 4))};
  torch::Tensor forward(const torch::Tensor& x, bool both) {
    return both ? base(x) + extra(x) : base(x);
  }
};
TORCH_MODULE(Branches);

using WorldOfOneBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, WorldOfOneBackends, ::testing::ValuesIn(backends()), test::CaseName());

TEST_P(WorldOfOneBackends, FailsWhereSeveralRanksFail) {
  expect_torch_ranks(1, GetParam(), [](int, int) {
    DistributedDataParallel model(Branches{});
    EXPECT_THAT(text_of([&] {
                  model(torch::ones({1, 9}), false).sum().backward();
                }),
                AllOf(HasSubstr("2 of 4 parameters got no gradient"), HasSubstr("extra.weight")));
  });
  expect_torch_ranks(1, GetParam(), [](int, int) {
    DistributedDataParallel model(Branches{}, {.average = Average::samples});
    EXPECT_THAT(text_of([&] {
                  model(torch::ones({1, 9}), true).sum().backward();
                }),
                HasSubstr("call set_samples"));
  });
}

struct SingleImpl : torch::nn::Module {
  torch::Tensor w;
  // No leaf, so that its gradient passes through autograd.
  torch::Tensor forward() { return w.view_as(w); }
};

// Whatever the type, also values that an average could change: NaN with a payload, and -0.
TEST_P(WorldOfOneBackends, LeavesGradientsUnchanged) {
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat}) {
    for (const bool large : {true, false}) {
      expect_torch_ranks(1, GetParam(), [=](int, int) {
        torch::manual_seed(2);
        const auto bits = torch::randint(256, {large ? 80'000 : 64}, at::kByte);
        auto net = std::make_shared<SingleImpl>();
        net->w = net->register_parameter("w", torch::zeros_like(bits.view(type)));
        DistributedDataParallel model(net);
        for (int step = 0; step < 2; ++step) {
          net->zero_grad();
          model().backward(bits.view(type).clone());
          EXPECT_EQ(bytes_of({net->w.grad()}), bytes_of({bits}));
        }
      });
    }
  }
}

struct OnMetaImpl : torch::nn::Module {
  torch::Tensor w{register_parameter("w", torch::ones({3}, at::kMeta))};
  torch::Tensor v{register_parameter("v", torch::ones({3}, at::kMeta))};
  torch::Tensor forward(bool both) { return both ? w * v : w * 2; }
};
TORCH_MODULE(OnMeta);

// A device that every LibTorch has, and no backend serves.
TEST_P(WorldOfOneBackends, NeedsNoBackendForItsDevice) {
  expect_torch_ranks(1, GetParam(), [](int, int) {
    OnMeta net;
    DistributedDataParallel model(net, {.device_ids = {at::kMeta}, .find_unused_parameters = true});
    torch::optim::SGD sgd(model.parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      sgd.zero_grad();
      model(step == 1).sum().backward();
      EXPECT_TRUE(net->w.grad().is_meta());
      EXPECT_EQ(net->v.grad().defined(), step == 1);
      sgd.step();
    }
    EXPECT_EQ(model.stats().steps, 3U);
  });
  expect_torch_ranks(1, GetParam(), [](int, int) {
    DistributedDataParallel model(OnMeta{});
    EXPECT_THAT(text_of([&] { model(false).sum().backward(); }),
                HasSubstr("1 of 2 parameters got no gradient in this backward: v."));
  });
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
INSTANTIATE_TEST_SUITE_P(, NoDivergenceBackends, ::testing::ValuesIn(backends()), test::CaseName());

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
      const auto all = all_gather_bytes(bytes_of(model.parameters()));
      for (const auto& one : all) EXPECT_EQ(one, all[0]);
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
