// Worlds whose ranks change. python/tests/test_reconfigure.py tests the backend further, beside
// Gloo.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/error.h>
#include <paceline/reconfigure.h>
#include <paceline/record.h>

#include "support/temporary_directory.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::RankContext;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

RankContext reconfigurable(RankContext context) {
  context.init.enable_reconfigure = true;
  return context;
}

// Makes these processes the ranks of the world; each of them calls it.
void form(const RankContext& context, int uuid, const std::vector<int>& members) {
  const auto key = [&](int member) { return fmt::format("{} {}", uuid, member); };
  context.init.store->set(key(context.rank), get_reconfigure_handle());
  std::vector<std::string> handles;
  for (const int member : members) handles.push_back(context.init.store->get_to_str(key(member)));
  reconfigure(uuid, handles);
}

template <typename Function>
std::string refusal(Function function) {
  try {
    function();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no UsageError";
}

// Trains y = w x, whose gradient is x, the process's number, and returns w after some steps from 0.
double train(const RankContext& context, torch::nn::Linear& model, int steps, bool die = false) {
  DistributedDataParallel ddp(model);
  torch::optim::SGD optimizer(model->parameters(), 0.5);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    auto loss = ddp(torch::full({1, 1}, 1.0 * context.rank)).sum();
    if (die) ::raise(SIGKILL);
    loss.backward();
    optimizer.step();
  }
  return model->weight.item<double>();
}

TEST(Reconfigure, TrainingGoesOnWithAnotherProcessInTheLostOnesPlace) {
  const std::vector<int> first{0, 1, 2};
  const std::vector<int> second{3, 0, 2};
  const auto ends = test::run_torch_ranks(4, "paceline", [&](const RankContext& given) {
    const RankContext context = reconfigurable(given);
    const World world = init_process_group(context.init);
    torch::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
    torch::nn::init::zeros_(model->weight);
    std::string lost;
    if (context.rank != 3) {
      form(context, 1, first);
      EXPECT_NEAR(train(context, model, 2), -0.5 * 2 * (0 + 1 + 2) / 3, 1e-6);
      try {
        train(context, model, 1, context.rank == 1);
      } catch (const PeerLost& error) {
        lost = error.what();
        EXPECT_THAT(error.ranks(), ::testing::ElementsAre(1));
      }
    }
    form(context, 2, second);
    EXPECT_EQ(get_world_size(), 3);
    EXPECT_EQ(second.at(static_cast<std::size_t>(get_rank())), context.rank);
    EXPECT_EQ(get_local_rank(), get_rank());
    EXPECT_EQ(get_local_world_size(), 3);
    EXPECT_EQ(topology().front().ranks.size(), 3U);
    broadcast(model->weight.data(), {.src = 1});  // process 3 has not trained
    // What process 1 trained is in it, but not its unfinished step.
    EXPECT_NEAR(train(context, model, 2), -1 - 0.5 * 2 * (3 + 0 + 2) / 3.0, 1e-6);
    return lost;
  });
  EXPECT_TRUE(ends[1].killed());
  for (const std::size_t survivor : {0U, 2U}) {
    EXPECT_TRUE(ends[survivor].exited_cleanly()) << ends[survivor].report;
    EXPECT_THAT(ends[survivor].report, HasSubstr("rank 1 was lost"));
  }
  EXPECT_TRUE(ends[3].exited_cleanly()) << ends[3].report;
}

// In a smaller world ranks have other numbers, and the report needs all that it counts.
TEST(Reconfigure, TimelinesBeginAnewInAWorldOfAnotherSize) {
  const test::TemporaryDirectory directory;
  const auto read = [&](int rank) {
    std::ifstream file(directory.path() / fmt::format("rank{}.json", rank));
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const auto ends = test::run_torch_ranks(3, "paceline", [&](const RankContext& given) {
    ::setenv("PACELINE_TIMELINE", directory.path().c_str(), 1);
    const RankContext context = reconfigurable(given);
    const World world = init_process_group(context.init);
    torch::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
    form(context, 1, {0, 1, 2});
    train(context, model, 2);
    if (context.rank == 0) return std::string();
    form(context, 2, {1, 2});
    train(context, model, 2);
    return std::string();
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
  for (const int rank : {0, 1}) {
    EXPECT_THAT(read(rank), AllOf(HasSubstr(R"("size":2)"), Not(HasSubstr(R"("size":3)"))));
  }
  EXPECT_THAT(read(2), HasSubstr(R"("size":3)"));
}

TEST(Reconfigure, WaitsForNoRankThatHasFinished) {
  const auto ends = test::run_torch_ranks(3, "paceline", [&](const RankContext& given) {
    const RankContext context = reconfigurable(given);
    const int code = record([&] {
      const World world = init_process_group(context.init);
      reconfigure();
      if (context.rank == 1) return 0;
      EXPECT_THROW(barrier(), PeerLost);
      try {
        reconfigure();
        ADD_FAILURE() << "no error";
      } catch (const Mismatch& error) {
        // The last rank to see it names the others as well.
        EXPECT_THAT(error.ranks(), ::testing::Contains(1));
        EXPECT_THAT(error.what(), HasSubstr("finished (record returned without an error)"));
      }
      return 0;
    });
    EXPECT_EQ(code, 0);
    return std::string();
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
}

TEST(Reconfigure, LeavesNoFileOfItsStore) {
  const test::TemporaryDirectory directory;
  const auto file = directory.path() / "store";
  const auto ends = test::run_torch_ranks(2, "paceline", [&](const RankContext& given) {
    RankContext context = reconfigurable(given);
    context.init.store = nullptr;
    context.init.init_method = "file://" + file.string();
    context.init.rank = context.rank;
    context.init.world_size = context.size;
    EXPECT_EQ(record([&] {
                const World world = init_process_group(context.init);
                reconfigure();
                barrier();
              }),
              0);
    return std::string();
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
  EXPECT_FALSE(std::filesystem::exists(file));
}

// Another process takes its place, here after a while.
TEST(Reconfigure, WaitsForARankThatFailedAfterItsWorld) {
  const auto ends = test::run_torch_ranks(3, "paceline", [&](const RankContext& given) {
    RankContext context = reconfigurable(given);
    const auto store = context.init.store;
    const bool replaces = context.rank == 2;
    context.init.rank = replaces ? 1 : context.rank;
    context.init.world_size = 2;
    if (replaces) store->wait({"waits"});
    const int code = record([&] {
      const World world = init_process_group(context.init);
      if (!replaces) {
        reconfigure();
        if (context.rank == 1) return 3;
        EXPECT_THROW(barrier(), PeerLost);
        EXPECT_THROW(reconfigure(std::chrono::milliseconds(300)), Timeout);
        store->set("waits", "1");
      }
      reconfigure();
      barrier();
      return 0;
    });
    EXPECT_EQ(code, context.rank == 1 ? 3 : 0);
    return std::string();
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
}

TEST(Reconfigure, CallsNeedRanks) {
  const auto ends = test::run_torch_ranks(2, "paceline", [](const RankContext& given) {
    const RankContext context = reconfigurable(given);
    const World world = init_process_group(context.init);
    EXPECT_TRUE(supports_reconfigure());
    EXPECT_EQ(get_rank(), context.rank);
    EXPECT_EQ(get_world_size(), 2);
    EXPECT_THAT(refusal([] { barrier(); }),
                AllOf(HasSubstr("barrier on group world"), HasSubstr("call reconfigure first")));
    auto tensor = torch::ones({2});
    EXPECT_THAT(refusal([&] { all_reduce(tensor); }), HasSubstr("call reconfigure first"));
    torch::nn::Linear model(2, 2);
    EXPECT_THAT(refusal([&] { const DistributedDataParallel ddp(model); }),
                HasSubstr("call reconfigure first"));
    EXPECT_THAT(refusal([] { static_cast<void>(new_group({0})); }),
                HasSubstr("has no smaller groups"));
    EXPECT_THAT(refusal([] {
                  reconfigure(1, {get_reconfigure_handle()}, {}, std::chrono::milliseconds(0));
                }),
                HasSubstr("timeout of 0 ms"));
    EXPECT_THAT(refusal([] { reconfigure(1, {"rank 0"}); }),
                HasSubstr("'rank 0' is not a handle of the backend paceline"));
    form(context, 1, {1, 0});
    all_reduce(tensor);
    EXPECT_EQ(tensor[0].item<float>(), 2);
    EXPECT_EQ(get_rank(), 1 - context.rank);
    return std::string();
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
}

TEST(Reconfigure, OtherWorldsKeepTheirRanks) {
  for (const std::string& backend : test::backends()) {
    const auto ends = test::run_torch_ranks(2, backend, [&](const RankContext& context) {
      if (backend != "paceline") {
        EXPECT_THAT(
            refusal([&] { const World world = init_process_group(reconfigurable(context).init); }),
            HasSubstr("over the backend " + backend + " cannot change; use paceline"));
        return std::string();
      }
      const World world = init_process_group(context.init);
      EXPECT_FALSE(supports_reconfigure());
      EXPECT_THAT(refusal([] { static_cast<void>(get_reconfigure_handle()); }),
                  HasSubstr("the ranks of group world cannot change"));
      EXPECT_THAT(refusal([] { reconfigure(1, {""}); }), HasSubstr("enable_reconfigure"));
      return std::string();
    });
    for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
  }
}

}  // namespace
}  // namespace paceline
