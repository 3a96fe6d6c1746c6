#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>

#include <paceline/collectives.h>
#include <paceline/comm_hooks.h>
#include <paceline/ddp.h>
#include <paceline/error.h>
#include <paceline/sync_batch_norm.h>

#include "support/small_net.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::batch_of;
using test::expect_torch_ranks;
using test::loss_of;
using test::make_net;
using test::run_torch_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

template <typename Model>
void run_backward(Model& model, int logical) {
  const auto x = batch_of(logical, 0, at::kFloat);
  loss_of(model(x), x).backward();
}

TEST(LogicalRanksErrors, OptionsThatCannotBeCombined) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    const auto make = [](DdpOptions options) {
      return [=] { DistributedDataParallel(make_net(at::kFloat), options); };
    };
    const auto says = [](const char* text) { return ThrowsMessage<UsageError>(HasSubstr(text)); };
    EXPECT_THAT(
        make({.logical_ranks = 1}),
        says("logical_ranks of 1: it must be at least 2, the number of ranks, and at most 64"));
    EXPECT_THAT(make({.logical_ranks = 65}), says("logical_ranks of 65"));
    EXPECT_THAT(make({.logical_ranks = -1}), says("logical_ranks of -1"));
    EXPECT_THAT(make({.broadcast_buffers = false, .logical_ranks = 2}),
                says("needs broadcast_buffers"));
    EXPECT_THAT(make({.find_unused_parameters = true,
                      .skip_all_reduce_unused_params = true,
                      .logical_ranks = 2}),
                says("skip_all_reduce_unused_params cannot be combined"));
    DistributedDataParallel model(make_net(at::kFloat), {.logical_ranks = 4});
    EXPECT_THAT([&] { model.register_comm_hook(comm_hooks::fp16_compress()); },
                says("cannot be combined: a hook gets a rank's sum"));
    EXPECT_THAT([&] { model(batch_of(0, 0, at::kFloat)); }, says("inside a loop over"));
    EXPECT_THAT(
        [&] {
          model.join([&] {
            for (const int r : model.logical_ranks()) run_backward(model, r);
          });
        },
        says("cannot be used in join"));
  });
}

// Types that the kernels move, but do not add.
TEST(LogicalRanksErrors, GradientsThatCannotBeAdded) {
  struct Net : torch::nn::Module {
    torch::Tensor weight = register_parameter("weight", torch::zeros({4}, at::kComplexHalf));
    torch::Tensor forward(const torch::Tensor& x) { return weight * x; }
  };
  for (const char* const backend : {"paceline", "gloo"}) {
    for (const int ranks : {1, 2}) {
      expect_torch_ranks(ranks, backend, [](int, int) {
        EXPECT_THAT([] { DistributedDataParallel(std::make_shared<Net>(), {.logical_ranks = 2}); },
                    ThrowsMessage<UsageError>(HasSubstr("ComplexHalf")));
      });
    }
  }
}

TEST(LogicalRanksErrors, SyncBatchNormNeedsARankForEach) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    const auto make = [](int logical) {
      return [=] {
        DistributedDataParallel(torch::nn::Sequential(torch::nn::Linear(9, 3), SyncBatchNorm(3)),
                                {.logical_ranks = logical});
      };
    };
    EXPECT_NO_THROW(make(2)());
    EXPECT_THAT(make(3), ThrowsMessage<UsageError>(HasSubstr("Run 3 ranks, or use BatchNorm")));
  });
}

TEST(LogicalRanksErrors, TheOptionMustBeTheSameOnAllRanks) {
  expect_torch_ranks(2, "gloo", [](int rank, int) {
    EXPECT_THAT(
        [&] {
          DistributedDataParallel(make_net(at::kFloat), {.logical_ranks = rank == 0 ? 4 : 0});
        },
        ThrowsMessage<Mismatch>(
            HasSubstr("and logical_ranks = 0 on rank 1: it must be the same on all ranks")));
  });
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    at::set_num_threads(rank + 1);
    EXPECT_THAT([&] { DistributedDataParallel(make_net(at::kFloat), {.logical_ranks = 4}); },
                ThrowsMessage<Mismatch>(HasSubstr("logical_ranks = 4 with 2 threads")));
  });
}

// `body` runs a logical rank of rank 0 wrongly; every rank must throw this.
template <typename Body>
void expect_failure(const char* text, Body body) {
  expect_torch_ranks(2, "paceline", [&](int, int) {
    DistributedDataParallel model(make_net(at::kFloat), {.logical_ranks = 4});
    EXPECT_THAT(
        [&] {
          for (const int logical : model.logical_ranks()) body(model, logical);
        },
        ThrowsMessage<Mismatch>(HasSubstr(text)));
  });
}

TEST(LogicalRanksErrors, ALogicalRankWithoutABackward) {
  expect_failure("logical rank 1 ran no synchronised backward in this step, and logical rank 0 did",
                 [](auto& model, int logical) {
                   if (logical != 1) run_backward(model, logical);
                 });
  expect_failure(
      "logical rank 1 ran a synchronised backward in this step, and logical rank 0 did "
      "not",
      [](auto& model, int logical) {
        if (logical != 0) run_backward(model, logical);
      });
}

TEST(LogicalRanksErrors, ALogicalRankWithTwoBackwards) {
  expect_failure("logical rank 0 ran a second synchronised backward in this step",
                 [](auto& model, int logical) {
                   run_backward(model, logical);
                   if (logical == 0) run_backward(model, logical);
                 });
}

TEST(LogicalRanksErrors, LogicalRanksThatDifferInWhatTheyRun) {
  expect_failure(
      "logical rank 1 and logical rank 0 have run different numbers of training forwards",
      [](auto& model, int logical) {
        if (logical == 1) model(batch_of(0, 0, at::kFloat));
        run_backward(model, logical);
      });
  expect_failure(
      "logical rank 1 and logical rank 0 have run different numbers of training forwards",
      [](auto& model, int logical) {
        if (logical == 1) {
          const auto guard = model.no_sync();
          run_backward(model, logical);
        }
        run_backward(model, logical);
      });
  // Between ranks, as ever.
  expect_failure("ranks have run different numbers of training forwards",
                 [](auto& model, int logical) {
                   if (logical < 2) model(batch_of(0, 0, at::kFloat));
                   run_backward(model, logical);
                 });
}

TEST(LogicalRanksErrors, ParametersWithoutAGradientAreNamed) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    auto net = make_net(at::kFloat);
    DistributedDataParallel model(net, {.logical_ranks = 4});
    EXPECT_THAT(
        [&] {
          for (const int logical : model.logical_ranks()) {
            if (logical == 0) {
              model(batch_of(0, 0, at::kFloat));
              net->last->weight.sum().backward();
            } else {
              run_backward(model, logical);
            }
          }
        },
        ThrowsMessage<Mismatch>(HasSubstr("got no gradient in this backward: first.weight")));
  });
}

TEST(LogicalRanksErrors, StatesAreChecked) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    DistributedDataParallel model(make_net(at::kFloat), {.logical_ranks = 4});
    LogicalRanks logical(model.logical_ranks());
    const auto says = [](const char* text) { return ThrowsMessage<UsageError>(HasSubstr(text)); };
    const int own = 2 * rank;
    EXPECT_THAT([&] { logical.state(2 - own); }, says("has no state here: this rank runs 2 from"));
    EXPECT_THAT([&] { logical.state(4); }, says("logical rank 4 has no state here"));
    auto state = logical.state(own);
    state.registered["moments"] = torch::zeros({1});
    EXPECT_THAT([&] { logical.set_state(own, state); },
                says("has moments, which was not registered here"));
    state = logical.state(own);
    state.random = torch::zeros({3});
    EXPECT_THAT([&] { logical.set_state(own, state); },
                says("is not that of the generator of cpu: "));
    // As of a model on an accelerator, whose generator's state follows.
    state = logical.state(own);
    const auto of_cpu = state.random.clone();
    state.random = torch::cat({of_cpu, torch::ones({16}, at::kByte)});
    logical.set_state(own, state);
    EXPECT_TRUE(at::equal(logical.state(own).random, of_cpu));
    state = logical.state(own);
    const auto get = [](int) { return torch::zeros({1}); };
    const auto set = [](int, const at::Tensor&) {};
    logical.register_state("a", get, set);
    EXPECT_THAT([&] { logical.set_state(own, state); }, says("lacks a, which was registered here"));
    EXPECT_THAT([&] { logical.register_state("a", get, set); }, says("the name is in use"));
    EXPECT_THAT([&] { logical.register_state("b", {}, set); }, says("it needs both functions"));
  });
}

TEST(LogicalRanksErrors, RangesAreChecked) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    DistributedDataParallel model(make_net(at::kFloat), {.logical_ranks = 4});
    LogicalRanks logical(model.logical_ranks());
    const auto says = [](const char* text) { return ThrowsMessage<UsageError>(HasSubstr(text)); };
    EXPECT_THAT(
        [&] {
          logical.assign({0, 2});
        },
        says("assign(): rank 0 wants [0, 2), rank 1 wants [0, 2): each of the 4 logical"));
    EXPECT_THAT([&] { logical.assign({3 * rank, 3}); }, says("rank 1 wants [3, 6)"));
    EXPECT_THAT([&] { logical.assign({4 * rank, rank == 0 ? 4 : 0}); }, says("at least one"));
    EXPECT_THAT([&] { logical.assign({-1, 2}); }, says("rank 0 wants [-1, 1)"));
    DistributedDataParallel fixed(make_net(at::kFloat), {.static_graph = true, .logical_ranks = 4});
    EXPECT_THAT([&] { fixed.logical_ranks().assign({2 * rank, 2}); }, says("with static_graph"));
    EXPECT_THAT(
        [&] {
          for (const int one : model.logical_ranks()) logical.assign({one, 1});
        },
        says("assign() inside a loop over logical ranks"));
    EXPECT_THAT(
        [&] {
          for (const int one : model.logical_ranks()) {
            for (const int other : model.logical_ranks()) run_backward(model, one + other);
          }
        },
        says("inside a loop over logical ranks"));
    for (const int one : model.logical_ranks()) run_backward(model, one);
  });
}

TEST(LogicalRanksErrors, TheSynchronisedBackwardIsTheLast) {
  constexpr const char* kText =
      "ran a backward under no_sync after its synchronised one in this step";
  const auto run = [](auto& model, int logical, int failing) {
    run_backward(model, logical);
    if (logical != failing) return;
    const auto guard = model.no_sync();
    run_backward(model, logical);
  };
  expect_failure(kText, [&](auto& model, int logical) { run(model, logical, 0); });
  expect_torch_ranks(1, "paceline", [&](int, int) {  // the step is complete then
    DistributedDataParallel model(make_net(at::kFloat), {.logical_ranks = 2});
    EXPECT_THAT(
        [&] {
          for (const int logical : model.logical_ranks()) run(model, logical, 1);
        },
        ThrowsMessage<Mismatch>(HasSubstr(kText)));
  });
}

TEST(LogicalRanksErrors, AccumulationBelongsIntoTheLoop) {
  expect_failure("ran backwards under no_sync and then none that is synchronised",
                 [](auto& model, int logical) {
                   const auto guard = model.no_sync();
                   run_backward(model, logical);
                 });
}

TEST(LogicalRanksErrors, TheBackwardBelongsIntoTheLoop) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    DistributedDataParallel model(make_net(at::kFloat), {.logical_ranks = 2});
    torch::Tensor loss;
    const auto x = batch_of(0, 0, at::kFloat);
    for ([[maybe_unused]] const int rank : model.logical_ranks()) loss = loss_of(model(x), x);
    EXPECT_THAT(
        [&] { loss.backward(); },
        ThrowsMessage<UsageError>(HasSubstr("run a synchronised backward inside the loop")));
  });
}

// With the gradient that the exception left, a second backward would add to the program's tensor.
TEST(LogicalRanksErrors, ABackwardThatThrewIsNotRepeatedInTheLoop) {
  for (const int failing : {0, 1}) {
    expect_torch_ranks(1, "paceline", [=](int, int) {
      auto net = make_net(at::kFloat);
      DistributedDataParallel model(net, {.logical_ranks = 2});
      for (const int logical : model.logical_ranks()) run_backward(model, logical);
      net->zero_grad(false);
      const auto run = [&] {
        for (const int logical : model.logical_ranks()) {
          if (logical == failing) {
            const auto x = batch_of(logical, 0, at::kFloat);
            const auto hidden = torch::tanh(net->first(x));
            hidden.register_hook(
                [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("no gradient"); });
            model(x);  // for the step
            EXPECT_THROW(net->last(torch::tanh(net->second(hidden))).sum().backward(),
                         std::runtime_error);
          }
          run_backward(model, logical);
        }
      };
      EXPECT_THAT(run, ThrowsMessage<UsageError>(HasSubstr("repeat the step with a new loop")));
      for (const int logical : model.logical_ranks()) run_backward(model, logical);
      EXPECT_EQ(model.stats().steps, 2u);
    });
  }
}

TEST(LogicalRanksErrors, ALoopOverANamedObjectEndsWithTheLoop) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    DistributedDataParallel model(make_net(at::kFloat), {.logical_ranks = 3});
    auto ranks = model.logical_ranks();
    torch::manual_seed(4);
    const auto expected = torch::randn({3});
    torch::manual_seed(4);
    EXPECT_THROW(
        {
          for (const int logical : ranks) {
            run_backward(model, logical);
            if (logical == 1) throw std::runtime_error("a sample is broken");
          }
        },
        std::runtime_error);
    EXPECT_TRUE(torch::randn({3}).equal(expected));
    for (const int logical : ranks) run_backward(model, logical);
    EXPECT_EQ(model.stats().steps, 1u);
    for (const int logical : ranks) {
      if (logical == 1) break;
    }
    EXPECT_THAT([&] { ranks.begin(); },
                ThrowsMessage<UsageError>(HasSubstr("was left by break or return")));
  });
}

TEST(LogicalRanksErrors, ALoopThatWasBrokenOff) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    DistributedDataParallel model(make_net(at::kFloat), {.logical_ranks = 3});
    for (const int logical : model.logical_ranks()) {
      run_backward(model, logical);
      if (logical == 1) break;
    }
    EXPECT_THAT([&] { model.logical_ranks().begin(); },
                ThrowsMessage<UsageError>(HasSubstr("was left by break or return")));
    for (int step = 0; step < 2; ++step) {
      for (const int logical : model.logical_ranks()) {
        run_backward(model, logical);
        if (logical == 2) break;  // of a complete step
      }
    }
    EXPECT_EQ(model.stats().steps, 2u);
  });
}

TEST(LogicalRanksErrors, LoopsOfTwoModelsOneAfterTheOther) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    DistributedDataParallel one(make_net(at::kFloat), {.logical_ranks = 2});
    DistributedDataParallel other(make_net(at::kFloat), {.logical_ranks = 2});
    EXPECT_THAT([&] { run_backward(one, 0); },
                ThrowsMessage<UsageError>(HasSubstr("inside a loop over logical_ranks()")));
    for (const int logical : one.logical_ranks()) {
      EXPECT_THAT([&] { other.logical_ranks().begin(); },
                  ThrowsMessage<UsageError>(HasSubstr("of another model is under way")));
      EXPECT_THAT([&] { run_backward(other, logical); },
                  ThrowsMessage<UsageError>(HasSubstr("over the logical ranks of another model")));
      // All threads share the default generator.
      std::thread([&] {
        EXPECT_THAT([&] { other.logical_ranks().begin(); },
                    ThrowsMessage<UsageError>(HasSubstr("is under way in this process")));
      }).join();
      run_backward(one, logical);
    }
    for (const int logical : other.logical_ranks()) run_backward(other, logical);
  });
}

TEST(LogicalRanksErrors, AModelThatWasDestroyed) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    std::optional<LogicalRanks> logical;
    {
      DistributedDataParallel model(make_net(at::kFloat), {.logical_ranks = 2});
      logical.emplace(model.logical_ranks());
    }
    EXPECT_THAT([&] { logical->total(); }, ThrowsMessage<UsageError>(HasSubstr("was destroyed")));
    EXPECT_THAT([&] { logical->begin(); }, ThrowsMessage<UsageError>(HasSubstr("was destroyed")));
  });
}

TEST(LogicalRanksErrors, StatesThatCannotBeRead) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    DistributedDataParallel model(make_net(at::kFloat), {.logical_ranks = 2});
    const auto get = [=](int) -> at::Tensor {
      if (rank == 1) throw std::runtime_error("the simulation has ended");
      return torch::zeros({1});
    };
    model.logical_ranks().register_state("a", get, [](int, const at::Tensor&) {});
    EXPECT_THAT(
        [&] {
          model.logical_ranks().assign({1 - rank, 1});
        },
        ThrowsMessage<UsageError>(
            HasSubstr("cannot read the states of rank 1: the simulation has ended")));
    for (const int logical : model.logical_ranks()) run_backward(model, logical);
  });
}

TEST(LogicalRanksErrors, StatesThatCannotBeTakenOver) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    DistributedDataParallel model(make_net(at::kFloat), {.logical_ranks = 4});
    auto logical = model.logical_ranks();
    const auto get = [](int) { return torch::zeros({1}); };
    const auto says = [](const char* text) { return ThrowsMessage<UsageError>(HasSubstr(text)); };
    const LogicalRange reversed{rank == 0 ? 2 : 0, 2};
    const auto before = logical.range();
    if (rank == 1) logical.register_state("a", get, [](int, const at::Tensor&) {});
    EXPECT_THAT([&] { logical.assign(reversed); }, says("cannot use the new states of rank 0"));
    EXPECT_EQ(logical.range(), before);
    logical.unregister_state("a");
    for ([[maybe_unused]] const int one : logical) torch::randn({1});
    const auto own =
        torch::stack({logical.state(2 * rank).random, logical.state(2 * rank + 1).random});
    const auto all = torch::empty({4, own.size(1)}, at::kByte);
    all_gather_into_tensor(all, own);
    logical.register_state("a", get, [=](int, const at::Tensor&) {
      if (rank == 1) throw std::runtime_error("the simulation has ended");
    });
    EXPECT_THAT([&] { logical.assign(reversed); },
                says("cannot set the new states of rank 1: the simulation has ended"));
    EXPECT_EQ(logical.range(), reversed);
    for (int one = reversed.first; one < reversed.first + 2; ++one) {
      EXPECT_TRUE(logical.state(one).random.equal(all[one])) << one;
    }
    for (const int one : logical) run_backward(model, one);
  });
}

// It decides how a rank adds up its logical ranks. Without init_sync, options are not compared.
TEST(LogicalRanksErrors, ZeroCopyMustBeTheSameOnAllRanks) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    EXPECT_THAT(
        [&] {
          DistributedDataParallel(make_net(at::kFloat),
                                  {.init_sync = false, .zero_copy = rank == 0, .logical_ranks = 4});
        },
        ThrowsMessage<Mismatch>(HasSubstr("zero_copy must be the same on all ranks")));
  });
}

// The rest of a killed rank's step must not reach this rank's gradients.
TEST(LogicalRanksErrors, AKilledRankLeavesPrivateGradients) {
  for (const int phase : {0, 1, 2}) {
    const auto ends = run_torch_ranks(2, "paceline", [=](const test::RankContext& context) {
      auto net = make_net(at::kFloat);
      std::vector<const void*> buckets;
      {
        const auto world = init_process_group(context.init);
        DistributedDataParallel model(net, {.logical_ranks = 4});
        for (const int logical : model.logical_ranks()) run_backward(model, logical);
        for (const auto& one : net->parameters()) buckets.push_back(one.grad().data_ptr());
        net->zero_grad(false);
        EXPECT_THROW(
            {
              for (const int logical : model.logical_ranks()) {
                const bool dies = context.rank == 1 && logical == 3;
                if (dies && phase == 0) ::raise(SIGKILL);
                const auto x = batch_of(logical, 0, at::kFloat);
                const auto loss = loss_of(model(x), x);
                if (dies && phase == 1) ::raise(SIGKILL);
                loss.backward();
                if (dies) ::raise(SIGKILL);
              }
              barrier();
            },
            PeerLost);
        for (std::size_t i = 0; phase < 2 && i < buckets.size(); ++i) {
          EXPECT_NE(net->parameters()[i].grad().data_ptr(), buckets[i]) << i;
        }
      }
      return std::string();
    });
    EXPECT_TRUE(ends[0].exited_cleanly()) << ends[0].report;
    EXPECT_TRUE(ends[1].killed());
  }
}

}  // namespace
}  // namespace paceline
