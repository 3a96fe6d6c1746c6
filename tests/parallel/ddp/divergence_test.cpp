// If ranks differ in a step, the next synchronised step fails, with the same error on all ranks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <memory>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/checkpoint.h>
#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/error.h>
#include <paceline/log.h>

#include "parallel/ddp/steps.h"
#include "support/small_net.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using test::batch_of;
using test::Before;
using test::expect_torch_ranks;
using test::kTinyBucket;
using test::loss_of;
using test::make_net;
using test::Model;
using test::RankContext;
using test::text_of;
using test::train;
using test::WorldCase;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Matcher;

// Across nodes, errors name the nodes of ranks too.
std::string without_nodes(const std::string& text) {
  return std::regex_replace(text, std::regex(" on node [0-9]+"), "");
}

// Another node's failure may reach a rank in its hook, which it then adds.
std::string without_hook(const std::string& text) {
  return text.substr(0, text.find(" (DistributedDataParallel was running the communication hook"));
}

// All ranks end with the same text.
void expect_error(const WorldCase& world, const std::function<void(int rank, int size)>& body,
                  const Matcher<std::string>& matcher) {
  const auto ends =
      test::run_torch_ranks(world.size, world.backend, [&](const RankContext& context) {
        const World formed = init_process_group(context.init);
        return text_of([&] { body(context.rank, context.size); });
      });
  for (const auto& end : ends) {
    EXPECT_TRUE(end.exited_cleanly());
    EXPECT_THAT(without_nodes(end.report), matcher);
    EXPECT_EQ(without_hook(end.report), without_hook(ends[0].report));
  }
}

void expect_error(const WorldCase& world, const DdpOptions& options, const Before& before,
                  const Matcher<std::string>& matcher) {
  expect_error(
      world,
      [&](int rank, int) {
        Model model(make_net(at::kDouble), options);
        train(model, rank, before);
      },
      matcher);
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
    expect_error(GetParam(), options, freeze_on_rank_1,
                 AllOf(HasSubstr("step 4"),
                       HasSubstr("second.bias is frozen on rank 1, last.weight on rank 1"),
                       HasSubstr("2 of 6 parameters")));
  }
}

TEST_P(DivergenceWorldsUpTo5, NamesParametersFrozenOnOneRankWithAHook) {
  expect_error(
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
    expect_error(
        GetParam(), {.gradient_as_bucket_view = view},
        [](Model&, int rank, int step) { return rank != 1 || step != 3; },
        AllOf(HasSubstr("step 4"), HasSubstr(": 4; rank 1: 4 and 1 under no_sync"),
              HasSubstr("Average::samples"), HasSubstr("closure")));
  }
}

TEST_P(DivergenceWorldsUpTo5, NamesARankWithAForwardWithoutBackward) {
  expect_error(
      GetParam(), {},
      [](Model& model, int rank, int step) {
        if (rank == 1 && step == 2) model(batch_of(rank, step, at::kDouble));
        return true;
      },
      AllOf(HasSubstr("step 3"), HasSubstr(": 3; rank 1: 4"), HasSubstr("closure")));
}

bool load_on_rank_0(Model& model, int rank, int step) {
  if (rank == 0 && step == 4) {
    std::stringstream file;
    torch::save(make_net(at::kDouble, 9), file);
    std::shared_ptr<torch::nn::Module> module = model.module();
    torch::load(module, file);
  }
  return true;
}

// Both ways in which a program may have it.
TEST_P(DivergenceWorldsUpTo5, NamesAModelLoadedOnOneRank) {
  expect_error(GetParam(), {}, load_on_rank_0,
               AllOf(HasSubstr("step 5"), HasSubstr("first.weight on rank"), HasSubstr("load")));
  expect_error(
      GetParam(), {},
      [](Model& model, int rank, int step) {
        if (rank != 1 || step != 4) return true;
        const torch::NoGradGuard no_grad;
        model.module()->second->bias.add_(1);
        return true;
      },
      AllOf(HasSubstr("step 5"), HasSubstr("second.bias on rank 1 differs")));
}

TEST_P(DivergenceWorldsUpTo5, NamesAModelLoadedOnOneRankWithAHook) {
  expect_error(
      GetParam(),
      [&](int rank, int) {
        Model model(make_net(at::kDouble));
        model.register_comm_hook(comm_hooks::fp16_compress());
        train(model, rank, load_on_rank_0);
      },
      AllOf(HasSubstr("step 5"), HasSubstr("first.weight on rank")));
}

// As from files of different age on the ranks' machines.
TEST_P(DivergenceWorldsUpTo5, NamesDifferentModelsLoadedOnAllRanks) {
  expect_error(
      GetParam(), {},
      [](Model& model, int rank, int step) {
        if (step == 4) {
          const auto loaded = make_net(at::kDouble, rank == 1 ? 8 : 9);
          load_state_dict(*model.module(), state_dict(*loaded));
        }
        return true;
      },
      AllOf(HasSubstr("step 5"), HasSubstr("first.weight on rank"), HasSubstr("load")));
}

void train_by_line_search(int rank, bool averaged) {
  Model model(make_net(at::kDouble));
  torch::optim::LBFGS lbfgs(model.parameters(),
                            torch::optim::LBFGSOptions(1).line_search_fn("strong_wolfe"));
  for (int step = 0; step < 4; ++step) {
    const auto x = batch_of(rank, step, at::kDouble) * (rank + 1);
    const auto local = [&] {
      lbfgs.zero_grad();
      const auto loss = loss_of(model(x), x);
      loss.backward();
      return loss;
    };
    if (averaged) {
      lbfgs.step(closure(model, local));
    } else {
      lbfgs.step(local);
    }
  }
}

// Each rank's line search calls the closure as often as its own loss wants.
TEST_P(DivergenceWorldsUpTo5, DetectsAClosureThatReturnsTheLocalLoss) {
  expect_error(
      GetParam(), [](int rank, int) { train_by_line_search(rank, false); },
      AllOf(HasSubstr("differs from rank"), HasSubstr("closure")));
}

TEST(NoDivergence, IfAClosureReturnsTheAveragedLoss) {
  expect_torch_ranks(2, "paceline", [](int rank, int) { train_by_line_search(rank, true); });
}

TEST(Closure, ThatRanksCallDifferentlyOftenIsAnErrorOnAll) {
  const auto ends = test::run_torch_ranks(3, "paceline", [](const RankContext& context) {
    const World formed = init_process_group(context.init);
    return text_of([&] {
      Model model(make_net(at::kDouble));
      const auto x = batch_of(context.rank, 0, at::kDouble);
      const auto loss = closure(model, [&] {
        const auto local = loss_of(model(x), x);
        local.backward();
        return local;
      });
      for (int call = 0; call < (context.rank == 1 ? 2 : 1); ++call) loss();
      all_reduce(torch::ones({3}));
    });
  });
  for (const auto& end : ends) {
    EXPECT_TRUE(end.exited_cleanly());
    EXPECT_THAT(end.report, HasSubstr("ranks 0 and 2 called all_reduce of 3 float32, rank 1 "));
  }
}

TEST(Closure, ReturnsTheLossThatTheGradientsAreOf) {
  expect_torch_ranks(3, "paceline", [](int rank, int) {
    for (const bool weighs : {false, true}) {
      Model model(make_net(at::kDouble), {.average = weighs ? Average::samples : Average::ranks});
      if (weighs) model.set_samples(rank);
      const at::Tensor loss = model.average_loss(torch::full({}, rank + 1.0));
      EXPECT_EQ(loss.scalar_type(), at::kFloat);
      EXPECT_FLOAT_EQ(loss.item<float>(), weighs ? (2 * 1 + 3 * 2) / 3.0F : 2);
      // A rank without samples has the mean of none.
      const double own = weighs && rank == 0 ? std::numeric_limits<double>::quiet_NaN() : 3;
      EXPECT_EQ(model.average_loss(torch::full({}, own)).item<float>(), 3);
      EXPECT_THROW(model.average_loss(torch::ones({2})), UsageError);
    }
    Model empty(make_net(at::kDouble), {.average = Average::samples});
    EXPECT_THROW(empty.average_loss(torch::ones({})), UsageError);
    Model adds(make_net(at::kDouble), {.average = Average::sum});
    EXPECT_EQ(adds.average_loss(torch::full({}, rank + 1.0)).item<float>(), 6);
    Model logical(make_net(at::kDouble), {.logical_ranks = 3});
    EXPECT_THROW(logical.average_loss(torch::ones({})), UsageError);
  });
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

// Ranks that have joined fail too.
TEST_P(DivergenceWorldsUpTo5, NamesRanksUnderNoSyncInAStepOfJoin) {
  expect_error(
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
    auto trained = make_net(at::kDouble);
    const Model outlives(trained);
    const auto early = warnings_of([&] {
      for (int step = 0; step < 3; ++step) loss_of(trained(x), x).backward();
    });
    EXPECT_EQ(early.size(), 1u);
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

}  // namespace
}  // namespace paceline
