#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <paceline/checkpoint_directory.h>
#include <paceline/error.h>
#include <paceline/logical_data_loader.h>

#include "checkpoint/trainings.h"
#include "support/torch_ranks.h"

// Runs that go on with another number of ranks, of logical ranks or of threads.
namespace paceline {
namespace {

using test::Checkpoints;
using test::DropoutNet;
using test::DropoutNetImpl;
using test::expect_equal;
using test::expect_torch_ranks;
using test::kEpochs;
using test::Points;
using test::Training;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

TEST_F(Checkpoints, AnotherNumberOfRanksGoesOn) {
  for (const int ranks : {3, 2, 1, 4}) {
    expect_torch_ranks(ranks, "paceline", [&](int rank, int) {
      Training training(ranks);
      const States states(training.states.begin(), training.states.end() - 1);  // without the last
      CheckpointDirectory checkpoints(path());
      const auto resumed = checkpoints.resume(states);
      EXPECT_EQ(resumed.has_value(), ranks != 3);
      EXPECT_THAT(resumed ? resumed->message : fmt::format("; ranks: {}, and", ranks),
                  HasSubstr(fmt::format("; ranks: {}, and", ranks)));
      const auto stop = training.step + 2;
      training.run([&] { return training.step < stop; });
      checkpoints.save(training.step, states);
      double own = rank;
      const States of_ranks{{"own", Stateful(own).per_rank()}};
      CheckpointDirectory others(path() / "own");
      if (ranks == 3) return others.save(1, of_ranks);
      EXPECT_THAT(
          [&] { others.resume(of_ranks); },
          ThrowsMessage<Error>(HasSubstr("'own' is of each rank by itself, of 3 ranks; this "
                                         "job has " +
                                         std::to_string(ranks))));
    });
  }
}

// Ranks may have different numbers of threads.
TEST_F(Checkpoints, AChangeOfThreadsIsNamedWhenARunGoesOn) {
  expect_torch_ranks(3, "paceline", [&](int rank, int) {
    at::set_num_threads(2 + rank);
    std::int64_t step = 1;
    const States states{{"step", step}};
    CheckpointDirectory checkpoints(path());
    checkpoints.save(1, states);
    EXPECT_THAT(checkpoints.resume(states)->message, Not(HasSubstr("changed")));
    if (rank > 0) at::set_num_threads(2);
    EXPECT_THAT(checkpoints.resume(states)->message,
                HasSubstr("; on rank 1, threads have changed from 3 to 2: last bits may differ"));
  });
}

TEST_F(Checkpoints, AnotherNumberOfLogicalRanksIsRefused) {
  expect_torch_ranks(2, "paceline", [&](int, int) {
    const auto with_ranks = [&](int logical_ranks, const auto& call) {
      DistributedDataParallel<DropoutNetImpl> model(DropoutNet(), {.logical_ranks = logical_ranks});
      CheckpointDirectory checkpoints(path());
      call(checkpoints, States{{"ranks", model.logical_ranks()}});
    };
    with_ranks(4, [](auto& checkpoints, const States& states) { checkpoints.save(1, states); });
    EXPECT_THAT([&] { with_ranks(0, [](auto&, const States&) {}); },
                ThrowsMessage<UsageError>(HasSubstr("set DdpOptions::logical_ranks")));
    for (const int other : {2, 8}) {
      EXPECT_THAT(
          [&] {
            with_ranks(other, [](auto& checkpoints, const States& states) {
              static_cast<void>(checkpoints.resume(states));
            });
          },
          ThrowsMessage<Error>(HasSubstr(
              fmt::format("it has 4 logical ranks, and DdpOptions::logical_ranks is {}", other))));
    }
  });
}

// With logical ranks, the same bits at any number of ranks.
TEST_F(Checkpoints, OfLogicalRanksAreForAnyNumberOfRanks) {
  constexpr int kLogical = 4;
  const auto train = [&](int seed, int stop, std::optional<CheckpointDirectory> checkpoints) {
    torch::manual_seed(seed);
    Points points;
    DistributedDataParallel<DropoutNetImpl> model(DropoutNet(), {.logical_ranks = kLogical});
    torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    data::LogicalDataLoader loader(points, model.logical_ranks(),
                                   [&](int rank) {
                                     return data::DistributedSampler(
                                         points.size(), {.num_replicas = kLogical, .rank = rank});
                                   },
                                   {.batch_size = 2});
    std::int64_t step = 0;
    const States states{
        {"model", model}, {"sgd", sgd}, {"ranks", model.logical_ranks()}, {"step", step}};
    if (checkpoints) checkpoints->resume(states);
    for (auto epoch = loader.epoch(); epoch < kEpochs; ++epoch) {
      for (auto& batches : loader.epoch(epoch)) {
        for (const int rank : model.logical_ranks()) {
          const auto& x = batches[rank];
          (model(x) - x.sum(1, true)).square().mean().backward();
        }
        sgd.step();
        sgd.zero_grad();
        ++step;
        if (step == stop) {
          checkpoints->save(step, states);
          return std::vector<at::Tensor>();
        }
      }
    }
    std::vector<at::Tensor> all;
    for (const auto& parameter : model.parameters()) all.push_back(parameter.detach().clone());
    return all;
  };
  int stop = 0;
  for (const int ranks : {1, 4, 2, 3}) {
    stop += 2;
    expect_torch_ranks(ranks, "paceline",
                       [&](int, int) { train(ranks, stop, CheckpointDirectory(path())); });
  }
  expect_torch_ranks(2, "paceline", [&](int, int) {
    const auto got = train(9, 100, CheckpointDirectory(path()));
    expect_equal(got, train(1, 100, std::nullopt));
  });
}

}  // namespace
}  // namespace paceline
