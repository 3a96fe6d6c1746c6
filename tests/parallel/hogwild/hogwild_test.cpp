#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/error.h>
#include <paceline/hogwild.h>

#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::expect_torch_ranks;
using test::RankContext;
using ::testing::AllOf;
using ::testing::HasSubstr;

torch::nn::Sequential make_net() {
  return torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
}

class SharedMemory : public test::SizeTest {};

TEST_P(SharedMemory, IsTheSameOnAllRanks) {
  expect_torch_ranks(GetParam(), "paceline", [](int rank, int size) {
    torch::manual_seed(rank);
    auto net = make_net();
    const auto weight = net->parameters().front();
    const auto expected = all_gather_bytes(
        std::string(static_cast<const char*>(weight.data_ptr()), weight.nbytes()))[0];
    share_memory(net);
    EXPECT_EQ(std::string(static_cast<const char*>(weight.data_ptr()), weight.nbytes()), expected);
    barrier();
    const torch::NoGradGuard no_grad;
    // Each rank writes an element, with no call afterwards but to wait.
    for (const auto& tensor : {weight, net->named_buffers()["1.running_mean"]}) {
      if (rank < 4) tensor.view(-1)[rank] = 100 + rank;
      barrier();
      for (int other = 0; other < std::min(size, 4); ++other) {
        EXPECT_EQ(tensor.view(-1)[other].item<float>(), 100.F + static_cast<float>(other));
      }
    }
  });
}

// The other ranks look on; the parameters are those of a training without Paceline.
TEST_P(SharedMemory, LosesNothingIfOneRankTrainsAlone) {
  expect_torch_ranks(GetParam(), "paceline", [](int rank, int size) {
    const auto train = [](torch::nn::Sequential& net) {
      torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < 20; ++step) {
        sgd.zero_grad();
        net->forward(torch::sin(torch::arange(15.F).reshape({5, 3}) + step))
            .square()
            .sum()
            .backward();
        sgd.step();
      }
    };
    torch::manual_seed(5);
    auto alone = make_net();
    torch::manual_seed(5);
    auto shared = make_net();
    train(alone);
    share_memory(shared);
    if (rank == size - 1) train(shared);
    barrier();
    for (std::size_t i = 0; i < alone->parameters().size(); ++i) {
      EXPECT_TRUE(torch::equal(alone->parameters()[i], shared->parameters()[i]));
    }
    EXPECT_TRUE(torch::equal(alone->named_buffers()["1.running_var"],
                             shared->named_buffers()["1.running_var"]));
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, SharedMemory, ::testing::Values(1, 2, 4, 8), test::CaseName());

// Also the memory of rank 0, which has it allocated.
TEST(Hogwild, MemoryOutlivesTheWorldAndOtherRanks) {
  const auto ends = test::run_torch_ranks(3, "paceline", [](const RankContext& context) {
    auto shared = torch::full({1000}, 1.0F + static_cast<float>(context.rank));
    {
      const World world = init_process_group(context.init);
      share_memory({{"shared", shared}});
      const auto later = allocate_tensor({1000});  // takes nothing that is shared
      later.fill_(-1);
      barrier();
    }
    if (context.rank == 1) {
      context.init.store->wait({"left"});
      EXPECT_TRUE(torch::equal(shared, torch::ones({1000})));
      shared.fill_(7);
      context.init.store->set("written", "");
    }
    if (context.rank == 0) context.init.store->set("left", "");
    if (context.rank == 2) {
      context.init.store->wait({"written"});
      EXPECT_TRUE(torch::equal(shared, torch::full({1000}, 7.F)));
    }
    return std::string();
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
}

// A linear model without noise, so that steps in any order lead to the one solution. The ranks
// train at the same time, each on samples of its own.
torch::nn::Linear make_linear() {
  torch::manual_seed(7);
  return torch::nn::Linear(torch::nn::LinearOptions(6, 1).bias(false));
}
at::Tensor solution() {
  return torch::arange(1.F, 7.F).reshape({1, 6});
}
void train_linear(torch::nn::Linear& linear, int steps) {
  torch::optim::SGD sgd(linear->parameters(), 0.02);
  for (int step = 0; step < steps; ++step) {
    const auto x = torch::randn({8, 6});
    sgd.zero_grad();
    (linear(x) - x.mm(solution().t())).square().mean().backward();
    sgd.step();
  }
}

TEST_P(SharedMemory, TrainsOneModelByAllRanksAtOnce) {
  expect_torch_ranks(GetParam(), "paceline", [](int rank, int /*size*/) {
    auto linear = make_linear();
    share_memory(linear);
    torch::manual_seed(100 + rank);
    train_linear(linear, 400);
    barrier();
    EXPECT_TRUE(torch::allclose(linear->weight, solution(), 1e-2, 1e-2)) << linear->weight;
    const auto own = linear->weight.detach().clone();
    broadcast(own, {.src = 0});
    EXPECT_TRUE(own.equal(linear->weight));
  });
}

// Whatever a rank was writing when it was killed, the others train on; the next call names it.
TEST(Hogwild, AKilledRankStopsNoOther) {
  const auto ends = test::run_torch_ranks(3, "paceline", [](const RankContext& context) {
    const World world = init_process_group(context.init);
    auto linear = make_linear();
    share_memory(linear);
    torch::manual_seed(100 + context.rank);
    if (context.rank == 1) {
      std::jthread trainer([&] { train_linear(linear, 1'000'000); });
      context.init.store->wait({"seen 0", "seen 2"});
      ::raise(SIGKILL);
    }
    context.init.store->set(fmt::format("seen {}", context.rank), "");
    train_linear(linear, 400);
    try {
      barrier();
    } catch (const PeerLost& error) {
      EXPECT_THAT(error.ranks(), ::testing::ElementsAre(1));
      train_linear(linear, 400);
      EXPECT_TRUE(torch::allclose(linear->weight, solution(), 1e-2, 1e-2)) << linear->weight;
      return std::string(error.what());
    }
    return std::string("no error");
  });
  EXPECT_TRUE(ends[1].killed());
  for (const std::size_t rank : {0U, 2U}) {
    EXPECT_TRUE(ends[rank].exited_cleanly()) << ends[rank].report;
    EXPECT_THAT(ends[rank].report, HasSubstr("rank 1 was lost"));
  }
}

template <typename E>
std::string thrown(const NamedTensors& tensors) {
  try {
    share_memory(tensors);
  } catch (const E& error) {
    return error.what();
  }
  return "nothing thrown";
}

TEST(Hogwild, DifferentTensorsAreAMismatch) {
  expect_torch_ranks(2, "paceline", [](int rank, int /*size*/) {
    EXPECT_THAT(thrown<Mismatch>({{"a", torch::ones({2})}, {"b", torch::ones({3 + rank})}}),
                AllOf(HasSubstr("b, a frozen parameter of shape [3]"), HasSubstr("[4]"),
                      HasSubstr("on rank 1")));
  });
}

TEST(Hogwild, NeedsDenseTensorsOnTheCpu) {
  expect_torch_ranks(2, "paceline", [](int /*rank*/, int /*size*/) {
    EXPECT_THAT(thrown<UsageError>({{"m", torch::ones({2}, torch::kMeta)}}),
                HasSubstr("share_memory: m is a Strided tensor on meta"));
    EXPECT_THAT(thrown<UsageError>({{"s", torch::eye(2).to_sparse()}}), HasSubstr("s is a Sparse"));
  });
}

TEST(Hogwild, RejectsTensorsThatOverlap) {
  expect_torch_ranks(2, "paceline", [](int /*rank*/, int /*size*/) {
    const auto base = torch::zeros({10});
    const auto part = base.narrow(0, 4, 6);
    EXPECT_THAT(thrown<UsageError>({{"v", base.narrow(0, 0, 6)}, {"w", part}}),
                HasSubstr("share_memory: v and w overlap in memory"));
    EXPECT_THAT(thrown<UsageError>({{"v", base}, {"w", base.detach()}}),
                HasSubstr("v and w overlap"));
    // The same tensor twice, and one beside it.
    share_memory(NamedTensors{{"v", part}, {"same", part}, {"beside", base.narrow(0, 0, 4)}});
  });
}

TEST(Hogwild, RanksOfANodeShareInAWorldOfSeveral) {
  expect_torch_ranks(4, test::kAcrossNodes, [](int rank, int /*size*/) {
    const ProcessGroup node = new_subgroups().current;
    auto w = torch::zeros({2});
    share_memory({{"w", w}}, node);
    w[rank % 2] = rank + 1;
    barrier({.group = node});
    const int first = rank / 2 * 2;
    EXPECT_TRUE(w.equal(torch::tensor({first + 1.0F, first + 2.0F}))) << w;
    barrier({.group = node});
  });
}

TEST(Hogwild, NeedsTheBackendPacelineOnOneNode) {
  EXPECT_THAT(thrown<UsageError>({{"w", torch::ones({2})}}), HasSubstr("there is no world"));
  expect_torch_ranks(2, test::kAcrossNodes, [](int /*rank*/, int /*size*/) {
    EXPECT_THAT(thrown<UsageError>({{"w", torch::ones({2})}}), HasSubstr("paceline on 2 nodes"));
  });
  if (!is_gloo_available()) return;
  expect_torch_ranks(2, "gloo", [](int /*rank*/, int /*size*/) {
    EXPECT_THAT(thrown<UsageError>({{"w", torch::ones({2})}}), HasSubstr("over the backend gloo"));
  });
}

}  // namespace
}  // namespace paceline
