#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <stdexcept>

#include <paceline/ddp.h>
#include <paceline/error.h>
#include <paceline/logical_data_loader.h>

#include "support/small_net.h"
#include "support/torch_ranks.h"

namespace paceline::data {
namespace {

using test::expect_torch_ranks;
using test::make_net;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kLogical = 6;
constexpr std::int64_t kSamples = 100;

struct Numbers {
  std::int64_t get(std::int64_t i) {
    if (i == broken) throw std::runtime_error("a broken sample");
    return i;
  }
  std::int64_t broken = -1;
};

auto sampler_of(int rank) {
  return DistributedSampler(kSamples, {.num_replicas = kLogical, .rank = rank});
}

auto make_model() {
  return DistributedDataParallel(make_net(at::kFloat), {.logical_ranks = kLogical});
}

using Seen = std::map<int, std::vector<std::int64_t>>;  // by logical rank

std::vector<std::int64_t> numbers_of(const torch::Tensor& batch) {
  return {batch.data_ptr<std::int64_t>(), batch.data_ptr<std::int64_t>() + batch.numel()};
}

template <typename Batches>
void add(Seen& seen, Batches& batches, const LogicalRange& range) {
  for (int rank = range.first; rank < range.first + range.count; ++rank) {
    for (const auto number : numbers_of(batches[rank])) seen[rank].push_back(number);
  }
}

// What an epoch has for a logical rank.
std::vector<std::int64_t> expected(int rank, std::int64_t epoch) {
  auto sampler = sampler_of(rank);
  sampler.set_epoch(epoch);
  return sampler.indices();
}

TEST(LogicalDataLoader, GivesEachLogicalRankItsShare) {
  for (const int size : {1, 2, 3, 4}) {
    expect_torch_ranks(size, "paceline", [](int, int) {
      auto model = make_model();
      Numbers set;
      for (const int workers : {0, 2}) {
        LogicalDataLoader loader(set, model.logical_ranks(), sampler_of,
                                 {.batch_size = 4, .num_workers = workers}, {},
                                 std::to_string(workers));
        EXPECT_EQ(loader.size(), 5);
        for (const std::int64_t epoch : {0, 1}) {
          Seen seen;
          for (auto& batches : loader.epoch(epoch)) {
            add(seen, batches, model.logical_ranks().range());
          }
          for (const auto& [rank, numbers] : seen) EXPECT_EQ(numbers, expected(rank, epoch));
          EXPECT_EQ(static_cast<int>(seen.size()), model.logical_ranks().range().count);
        }
      }
    });
  }
}

// Twice within one epoch, each time in a new model.
TEST(LogicalDataLoader, GoesOnWhereAStateWasTaken) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    Numbers set;
    Seen seen;
    std::map<int, LogicalRankState> states;
    for (const int steps : {2, 1, 100, 100}) {  // the last begins after the epoch's last step
      auto model = make_model();
      LogicalDataLoader loader(set, model.logical_ranks(), sampler_of, {.batch_size = 4});
      for (const auto& [rank, state] : states) model.logical_ranks().set_state(rank, state);
      EXPECT_EQ(loader.epoch(), states.empty() ? 0 : 3);
      int taken = 0;
      for (auto& batches : states.empty() ? loader.epoch(3) : loader) {
        add(seen, batches, model.logical_ranks().range());
        if (++taken == steps) break;
      }
      const auto [first, count] = model.logical_ranks().range();
      for (int rank = first; rank < first + count; ++rank) {
        states[rank] = model.logical_ranks().state(rank);
      }
    }
    for (const auto& [rank, numbers] : seen) EXPECT_EQ(numbers, expected(rank, 3));
    EXPECT_EQ(states.begin()->second.registered.at("data_loader")[1].item<std::int64_t>(), 5);
  });
}

// Of the step at which the loader is.
TEST(LogicalDataLoader, GoesOnWhereItIsIfThatIsSet) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    auto model = make_model();
    Numbers set;
    LogicalDataLoader loader(set, model.logical_ranks(), sampler_of, {.batch_size = 4});
    const auto [first, count] = model.logical_ranks().range();
    Seen seen;
    int taken = 0;
    for (auto& batches : loader.epoch(3)) {
      add(seen, batches, model.logical_ranks().range());
      if (++taken == 2) break;
    }
    for (int rank = first; rank < first + count; ++rank) {
      model.logical_ranks().set_state(rank, model.logical_ranks().state(rank));
    }
    for (auto& batches : loader.epoch(3)) add(seen, batches, model.logical_ranks().range());
    for (const auto& [rank, numbers] : seen) EXPECT_EQ(numbers, expected(rank, 3));
  });
}

TEST(LogicalDataLoader, BeginsAnewInAnotherEpochThanTheStates) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    auto model = make_model();
    Numbers set;
    LogicalDataLoader loader(set, model.logical_ranks(), sampler_of, {.batch_size = 4});
    const auto [first, count] = model.logical_ranks().range();
    loader.epoch(3).begin();
    std::vector<LogicalRankState> states;
    for (int rank = first; rank < first + count; ++rank) {
      states.push_back(model.logical_ranks().state(rank));
    }
    loader.epoch(4).begin();
    for (int k = 0; k < count; ++k) {
      model.logical_ranks().set_state(first + k, states[static_cast<std::size_t>(k)]);
    }
    EXPECT_EQ(loader.epoch(), 3);
    EXPECT_EQ(loader.epoch(5).epoch(), 5);
    Seen seen;
    for (auto& batches : loader) add(seen, batches, model.logical_ranks().range());
    for (const auto& [rank, numbers] : seen) EXPECT_EQ(numbers, expected(rank, 5));
  });
}

TEST(LogicalDataLoader, RefusesAPositionBeyondTheEpoch) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    auto model = make_model();
    Numbers set;
    LogicalDataLoader loader(set, model.logical_ranks(), sampler_of, {.batch_size = 4});
    for (const std::int64_t steps : {6, 7, -1}) {
      for (int rank = 0; rank < kLogical; ++rank) {
        auto state = model.logical_ranks().state(rank);
        state.registered["data_loader"] = torch::tensor({std::int64_t{2}, steps, std::int64_t{4}});
        model.logical_ranks().set_state(rank, state);
      }
      EXPECT_THAT([&] { loader.epoch(2).begin(); },
                  ThrowsMessage<UsageError>(HasSubstr(
                      std::to_string(steps) + " steps of epoch 2 were taken, which has 5")));
    }
  });
}

TEST(LogicalDataLoader, BeginsAnewWithoutAState) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    auto model = make_model();
    Numbers set;
    LogicalDataLoader loader(set, model.logical_ranks(), sampler_of, {.batch_size = 4});
    for (auto& batches : loader.epoch(3)) {
      static_cast<void>(batches);
      break;
    }
    Seen seen;
    for (auto& batches : loader.epoch(3)) add(seen, batches, model.logical_ranks().range());
    for (const auto& [rank, numbers] : seen) EXPECT_EQ(numbers, expected(rank, 3));
  });
}

TEST(LogicalDataLoader, FollowsLogicalRanksThatAreAssignedAnew) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    auto model = make_model();
    Numbers set;
    LogicalDataLoader loader(set, model.logical_ranks(), sampler_of, {.batch_size = 4});
    Seen seen;
    int step = 0;
    for (auto& batches : loader.epoch(1)) {
      add(seen, batches, model.logical_ranks().range());
      if (++step == 2) {
        model.logical_ranks().assign(rank == 0 ? LogicalRange{4, 2} : LogicalRange{0, 4});
      }
    }
    EXPECT_EQ(step, 5);
    for (const auto& [logical, numbers] : seen) {
      const auto all = expected(logical, 1);
      const bool before = (logical < 3) == (rank == 0);
      const bool after = (logical < 4) == (rank == 1);
      const std::vector<std::int64_t> own(all.begin() + (before ? 0 : 8),
                                          all.begin() + (after ? 17 : 8));
      EXPECT_EQ(numbers, own) << logical;
    }
  });
}

TEST(LogicalDataLoader, BeginsAnewAfterLogicalRanksWereAssignedAnew) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    auto model = make_model();
    Numbers set;
    for (int once = 0; once < 2; ++once) {  // a new loader may take the name
      LogicalDataLoader loader(set, model.logical_ranks(), sampler_of, {.batch_size = 4});
      for (auto& batches : loader.epoch(0)) {
        static_cast<void>(batches);
        model.logical_ranks().assign(rank == once ? LogicalRange{0, 4} : LogicalRange{4, 2});
        break;
      }
      Seen seen;
      for (auto& batches : loader.epoch(0)) add(seen, batches, model.logical_ranks().range());
      for (const auto& [logical, numbers] : seen) EXPECT_EQ(numbers, expected(logical, 0));
    }
  });
}

TEST(LogicalDataLoader, NamesWhatIsWrong) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    auto model = make_model();
    Numbers set;
    const auto says = [](const char* text) { return ThrowsMessage<UsageError>(HasSubstr(text)); };
    LogicalDataLoader loader(set, model.logical_ranks(), sampler_of, {.batch_size = 4});
    EXPECT_THAT(
        [&] { LogicalDataLoader(set, model.logical_ranks(), sampler_of, {.batch_size = 4}); },
        says("the name is in use"));
    EXPECT_THAT(
        [&] {
          LogicalDataLoader(set, model.logical_ranks(), sampler_of, {.batch_size = 0}, {}, "b");
        },
        says("batch_size is 0"));
    for (auto& batches : loader.epoch(0)) {
      EXPECT_THAT([&] { batches[rank == 0 ? 3 : 2]; }, says("this rank ran 3 logical ranks from"));
      EXPECT_THAT([&] { batches[-1]; }, says("no batch for logical rank -1"));
    }
    LogicalDataLoader uneven(
        set, model.logical_ranks(),
        [](int logical) { return SequentialSampler(logical % 3 == 2 ? 9 : 4); }, {.batch_size = 4},
        {}, "uneven");
    EXPECT_THAT([&] { uneven.begin(); }, says("has 3 batches in an epoch, and another one"));
    const int own = 3 * rank;
    auto state = model.logical_ranks().state(own + 1);
    state.registered["data_loader"] = torch::tensor({0, 2, 4}, at::kLong);
    model.logical_ranks().set_state(own + 1, state);
    EXPECT_THAT([&] { loader.epoch(0).begin(); }, says("are of different steps"));
    state.registered["data_loader"] = torch::tensor({0, 2, 3}, at::kLong);
    EXPECT_THAT([&] { model.logical_ranks().set_state(own, state); },
                says("how many batches of 3 were taken, and data_loader has batches of 4"));
    state.registered["data_loader"] = torch::tensor({0.5});
    EXPECT_THAT([&] { model.logical_ranks().set_state(own, state); },
                says("has no position of a LogicalDataLoader as data_loader"));
  });
}

TEST(LogicalDataLoader, ThrowsAtABrokenSample) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    auto model = make_model();
    Numbers set{.broken = sampler_of(2).indices()[5]};
    LogicalDataLoader loader(set, model.logical_ranks(), sampler_of, {.batch_size = 4});
    auto step = loader.begin();
    EXPECT_THAT([&] { ++step; }, ThrowsMessage<Error>(HasSubstr("a broken sample")));
  });
}

}  // namespace
}  // namespace paceline::data
