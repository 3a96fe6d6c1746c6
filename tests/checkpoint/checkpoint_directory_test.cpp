#include <paceline/checkpoint_directory.h>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/time.h>
#include <torch/torch.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/data_loader.h>
#include <paceline/error.h>
#include <paceline/local_sgd.h>

#include "checkpoint/trainings.h"
#include "support/temporary_directory.h"
#include "support/thoroughness.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

namespace fs = std::filesystem;
using test::Checkpoints;
using test::expect_equal;
using test::expect_torch_ranks;
using test::kEpochs;
using test::names_in;
using test::Points;
using test::Training;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

std::vector<at::Tensor> uninterrupted() {
  Training training;
  training.run([] { return true; });
  return training.result();
}

class CheckpointsOfWorlds : public Checkpoints,
                            public ::testing::WithParamInterface<std::tuple<int, bool>> {};

// Twice, and also after the last step of an epoch.
TEST_P(CheckpointsOfWorlds, InterruptedAnywhereATrainingEndsWithTheSameBits) {
  const auto [size, asynchronous] = GetParam();
  expect_torch_ranks(size, "paceline", [&](int, int ranks) {
    const auto expected = uninterrupted();
    const std::int64_t steps = expected[1].item<std::int64_t>();
    ASSERT_EQ(steps, kEpochs * (((Points().size() + ranks - 1) / ranks + 2) / 3));
    for (std::int64_t first = 1; first < steps; first += 2) {
      const auto directory = path() / std::to_string(first);
      std::optional<Training> training;
      for (const std::int64_t stop : {first, first + 1, steps + 1}) {
        training.emplace(stop == first ? 1 : static_cast<int>(stop) + 10);
        CheckpointDirectory checkpoints(
            directory, {.keep_last = 2, .asynchronous = asynchronous, .fsync = false});
        const auto resumed = checkpoints.resume(training->states);
        EXPECT_EQ(resumed.has_value(), stop != first);
        training->run([&] {
          checkpoints.save(training->step, training->states);
          return training->step < stop;
        });
        if (stop % 2 == 0) checkpoints.wait();
      }
      expect_equal(training->result(), expected);
      barrier();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(, CheckpointsOfWorlds,
                         ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Bool()),
                         [](const auto& one) {
                           return std::to_string(std::get<0>(one.param)) + "Ranks" +
                                  (std::get<1>(one.param) ? "Asynchronously" : "");
                         });

// The processes end without any cleaning, in the middle of whatever they do.
TEST_F(Checkpoints, AKillAtAnyMomentLosesNothingThatWasSaved) {
  constexpr int kRanks = 2;
  expect_torch_ranks(kRanks, "paceline", [&](int rank, int) {
    if (rank == 0) {
      torch::save(uninterrupted(), (directory_.path() / "expected").string());
    } else {
      uninterrupted();
    }
  });
  std::mt19937 random(std::random_device{}());
  const auto between = [&](int least, int most) {
    return std::uniform_int_distribution(least, most)(random);
  };
  std::int64_t saved = 0;  // the newest step that a rank knows to be saved
  const auto known = [&](int rank) {
    return directory_.path() / ("saved-" + std::to_string(rank));
  };
  // Until several trainings, each with some deaths, have come to their end.
  for (int deaths = 0, ended = 0; deaths < 10 * test::thoroughness() || ended < 2;) {
    const int victim = between(0, kRanks);  // kRanks: all
    const int microseconds = between(1, 100'000);
    const bool asynchronous = between(0, 1) == 1;
    const auto ends =
        test::run_torch_ranks(kRanks, "paceline", [&](const test::RankContext& context) {
          const World world = init_process_group(context.init);
          Training training;
          CheckpointDirectory checkpoints(
              path(), {.keep_last = 2, .asynchronous = asynchronous, .fsync = false});
          if (victim == context.rank || victim == kRanks) {
            struct sigaction action {};
            action.sa_handler = SIG_DFL;
            ::sigaction(SIGALRM, &action, nullptr);
            const itimerval timer{{}, {0, microseconds}};
            ::setitimer(ITIMER_REAL, &timer, nullptr);
          }
          const auto resumed = checkpoints.resume(training.states);
          EXPECT_GE(resumed ? resumed->step : 0, saved);
          EXPECT_THAT(resumed ? resumed->message : "", ::testing::Not(HasSubstr("damaged")));
          std::int64_t before = 0;
          training.run([&] {
            checkpoints.save(training.step, training.states);
            std::ofstream(known(context.rank)) << (asynchronous ? before : training.step);
            before = training.step;
            return true;
          });
          checkpoints.wait();
          if (context.rank == 0) {
            std::vector<at::Tensor> expected;
            torch::load(expected, (directory_.path() / "expected").string());
            expect_equal(training.result(), expected);
          }
          const itimerval none{};
          ::setitimer(ITIMER_REAL, &none, nullptr);
          return std::string("done");
        });
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto& end = ends[static_cast<std::size_t>(rank)];
      const bool died = WIFSIGNALED(end.status) && WTERMSIG(end.status) == SIGALRM;
      if (died) ++deaths;
      EXPECT_TRUE(died || end.report == "done" || end.report.starts_with("threw: ")) << end.report;
      std::int64_t step = 0;
      if (std::ifstream(known(rank)) >> step) saved = std::max(saved, step);
      fs::remove(known(rank));
    }
    if (ends[0].report == "done") {
      EXPECT_TRUE(ends[0].exited_cleanly());
      fs::remove_all(path());
      saved = 0;
      ++ended;
    }
  }
}

TEST_F(Checkpoints, ADamagedOneIsPassedOverAndNamed) {
  expect_torch_ranks(2, "paceline", [&](int rank, int) {
    Training training;
    CheckpointDirectory checkpoints(path());
    EXPECT_FALSE(checkpoints.resume(training.states));
    training.run([&] {
      checkpoints.save(training.step, training.states);
      return training.step < 5;
    });
    const auto resumed_after = [&](const std::function<void()>& change) {
      if (rank == 0) change();
      barrier();
      return checkpoints.resume(training.states)->message;
    };
    EXPECT_EQ(resumed_after([] {}), "resumed from step 5 of " + path().string());
    EXPECT_EQ(resumed_after([&] { damage(file("5", "state.pt")); }),
              "resumed from step 4 of " + path().string() + "; damaged: step 5: rank 0: " +
                  file("5", "state.pt").string() + ": does not have its checksum");
    EXPECT_THAT(resumed_after([&] { fs::resize_file(file("4", "rank-1.pt"), 100); }),
                AllOf(HasSubstr("resumed from step 3"),
                      HasSubstr("step 4: rank 1: " + file("4", "rank-1.pt").string() +
                                ": has 100 bytes in place of")));
    EXPECT_THAT(resumed_after([&] { fs::remove(file("3", "rank-1.json")); }),
                AllOf(HasSubstr("resumed from step 2"),
                      HasSubstr(file("3", "rank-1.json").string() + ": is missing")));
    EXPECT_THAT(resumed_after([&] {
                  fs::copy_file(file("1", "rank-1.json"), file("2", "rank-1.json"),
                                fs::copy_options::overwrite_existing);
                }),
                AllOf(HasSubstr("resumed from step 1"), HasSubstr("is of another checkpoint")));
    const fs::path aside = path() / "aside";
    barrier();
    if (rank == 0) {
      fs::rename(file("1", "rank-1.pt"), aside);
      fs::create_directory(file("1", "rank-1.pt"));
    }
    barrier();
    EXPECT_THAT(
        [&] { checkpoints.resume(training.states); },
        ThrowsMessage<Error>(HasSubstr("the checkpoint of step 1 cannot be read: rank 1: ")))
        << "it may be undamaged";
    barrier();
    if (rank == 0) {
      fs::remove(file("1", "rank-1.pt"));
      fs::rename(aside, file("1", "rank-1.pt"));
      std::ofstream(file("1", "rank-0.json")) << "{}";
    }
    barrier();
    EXPECT_THAT([&] { checkpoints.resume(training.states); },
                ThrowsMessage<Error>(AllOf(HasSubstr("all checkpoints are damaged"),
                                           HasSubstr("rank-0.json: has no 'version'"))));
  });
}

TEST_F(Checkpoints, OneThatIsCompleteButHasNoNameYetIsFound) {
  expect_torch_ranks(1, "paceline", [&](int, int) {
    Training training;
    const auto save = [&](std::int64_t step) {
      training.step = step;
      CheckpointDirectory(path(), {.asynchronous = true}).save(step, training.states);
    };
    save(3);
    ASSERT_EQ(names_in(path()).size(), 1U);
    EXPECT_THAT(names_in(path())[0], ::testing::StartsWith(".step-000000000003."));
    save(4);
    const auto unfinished = path() / ".step-000000000007.abc";
    fs::copy(path() / names_in(path())[1], unfinished);
    fs::remove(unfinished / "rank-0.json");
    CheckpointDirectory checkpoints(path());
    EXPECT_EQ(checkpoints.resume(training.states)->message,
              "resumed from step 4 of " + path().string());
    EXPECT_EQ(training.step, 4);
    EXPECT_TRUE(fs::exists(file("4", "state.pt")));
    checkpoints.save(5, training.states);
    EXPECT_THAT(names_in(path()), ElementsAre("step-000000000004", "step-000000000005"));
  });
}

// There may be no room for another one beside it.
TEST_F(Checkpoints, AnIncompleteOneIsRemovedBeforeTheNextIsWritten) {
  expect_torch_ranks(1, "paceline", [&](int, int) {
    double number = 0;
    bool fails = false;
    const auto get = [&]() -> at::IValue {
      if (fails) throw std::runtime_error("it cannot be copied");
      return 1;
    };
    const States states{{"number", number}, {"broken", {get, [](const at::IValue&) {}}}};
    CheckpointDirectory checkpoints(path());
    checkpoints.save(3, states);
    const auto complete = path() / ".step-000000000007.abc";
    const auto incomplete = path() / ".step-000000000008.abc";
    fs::copy(path() / "step-000000000003", complete);
    fs::copy(path() / "step-000000000003", incomplete);
    fs::remove(incomplete / "rank-0.json");
    fails = true;
    EXPECT_THROW(checkpoints.save(9, states), Error);
    EXPECT_THAT(names_in(path()), ElementsAre(".step-000000000007.abc", "step-000000000003"));
    fails = false;
    fs::rename(path(), path().string() + " moved");
    checkpoints.save(9, states);
    EXPECT_THAT(names_in(path()), ElementsAre("step-000000000009"));
    fs::remove_all(path());
    fs::rename(path().string() + " moved", path());
    checkpoints.save(9, states);
    EXPECT_THAT(names_in(path()), ElementsAre("step-000000000003", "step-000000000009"));
  });
}

TEST_F(Checkpoints, TheNewestAndTheBestAreKept) {
  expect_torch_ranks(1, "paceline", [&](int, int) {
    double number = 0;
    const States states{{"number", number}};
    for (const bool lower_is_better : {false, true}) {
      const auto directory = path() / (lower_is_better ? "lower" : "higher");
      CheckpointDirectory checkpoints(
          directory, {.keep_last = 2, .keep_best = 1, .lower_is_better = lower_is_better});
      const std::vector<double> metrics{0.5, 0.9, 0.1, 0.5, 0.6};
      for (std::size_t i = 0; i < metrics.size(); ++i) {
        checkpoints.save(static_cast<std::int64_t>(i), states, metrics[i]);
      }
      EXPECT_THAT(names_in(directory),
                  ElementsAre(lower_is_better ? "step-000000000002" : "step-000000000001",
                              "step-000000000003", "step-000000000004"));
    }
    // What is newer, as of a run before, is not counted, and a file is none.
    std::ofstream(path() / "higher" / "step-000000000009") << "x";
    CheckpointDirectory older(path() / "higher", {.keep_last = 1});
    older.save(2, states, -std::numeric_limits<double>::infinity());
    EXPECT_THAT(names_in(path() / "higher"), ElementsAre("step-000000000002", "step-000000000003",
                                                         "step-000000000004", "step-000000000009"));
    // One of a step takes the place of an earlier one.
    CheckpointDirectory checkpoints(path() / "again");
    checkpoints.save(1, states);
    number = 7;
    checkpoints.save(1, states);
    number = 0;
    EXPECT_EQ(checkpoints.resume(states)->step, 1);
    EXPECT_EQ(number, 7);
    EXPECT_EQ(names_in(path() / "again").size(), 1U);
    // Also if the job ended before it got its name.
    number = 8;
    CheckpointDirectory(path() / "again", {.asynchronous = true}).save(1, states);
    ASSERT_EQ(names_in(path() / "again").size(), 2U);
    CheckpointDirectory(path() / "again").resume(states);
    EXPECT_EQ(number, 8);
    int small = 0;
    number = 5e9;
    CheckpointDirectory(path() / "again").save(2, {{"number", number}});
    EXPECT_THAT(
        [&] {
          CheckpointDirectory(path() / "again").resume({{"number", small}});
        },
        ThrowsMessage<Error>(HasSubstr("'number': it is a Double, in place of")));
  });
}

TEST_F(Checkpoints, AFailureOfOneRankIsThrownByAll) {
  for (const bool asynchronous : {false, true}) {
    expect_torch_ranks(2, "paceline", [&](int rank, int) {
      const std::string run = asynchronous ? "asynchronous" : "synchronous";
      double number = 1;
      bool fails = false;
      const States states{{"number", number},
                          {"own", Stateful(
                                      [&]() -> at::IValue {
                                        if (fails && rank == 1) throw std::runtime_error("no luck");
                                        return rank;
                                      },
                                      [&](const at::IValue& value) {
                                        EXPECT_EQ(value.toInt(), rank);
                                        if (fails && rank == 1)
                                          throw std::runtime_error("worn out");
                                      },
                                      Stateful::Scope::rank)}};
      CheckpointDirectory checkpoints(path() / run, {.asynchronous = asynchronous});
      const auto save = [&](std::int64_t step) { checkpoints.save(step, states); };
      save(1);
      fails = true;
      EXPECT_THAT(
          [&] { save(2); },
          ThrowsMessage<Error>(HasSubstr("the checkpoint of step 2 failed: rank 1: no luck")));
      EXPECT_THAT([&] { checkpoints.resume(states); },
                  ThrowsMessage<Error>(HasSubstr("resume from step 1: rank 1: 'own': worn out")));
      fails = false;
      // A file where a directory is needed.
      barrier();
      if (rank == 1) std::ofstream(path() / "file") << "x";
      barrier();
      EXPECT_THAT([&] { CheckpointDirectory(path() / "file"); },
                  ThrowsMessage<Error>(HasSubstr("cannot be used: rank 0: ")));
      save(3);
      EXPECT_EQ(checkpoints.resume(states)->step, 3);
      barrier();
      EXPECT_THAT(names_in(path() / run), ElementsAre("step-000000000001", "step-000000000003"));
    });
  }
}

TEST_F(Checkpoints, ErrorsOfAGroupNameGlobalRanks) {
  expect_torch_ranks(3, "paceline", [&](int rank, int) {
    const ProcessGroup group = new_group({1, 2});
    if (rank == 0) return;
    double number = 1;
    CheckpointDirectory checkpoints(path(), {.group = group});
    const States fails{{"number", Stateful(
                                      [&]() -> at::IValue {
                                        if (rank == 2) throw std::runtime_error("no luck");
                                        return number;
                                      },
                                      [](const at::IValue&) {}, Stateful::Scope::rank)}};
    EXPECT_THAT([&] { checkpoints.save(1, fails); },
                ThrowsMessage<Error>(HasSubstr("rank 2: no luck")));
    EXPECT_THAT(
        [&] {
          checkpoints.save(rank, {{"number", number}});
        },
        ThrowsMessage<UsageError>(HasSubstr("rank 1 saves step 1 of 1 states, and rank 2 step 2")));
  });
}

TEST(Stateful, HasAllNumbersOf64Bits) {
  for (const std::uint64_t number : {std::uint64_t{5}, ~std::uint64_t{0xff}}) {
    std::uint64_t variable = number;
    const Stateful stateful(variable);
    const at::IValue state = stateful.state_dict();
    variable = 1;
    stateful.load_state_dict(state);
    EXPECT_EQ(variable, number);
  }
}

TEST(Stateful, HasCharacters) {
  char character = 'a';
  const Stateful stateful(character);
  stateful.load_state_dict(std::int64_t{'b'});
  EXPECT_EQ(character, 'b');
  EXPECT_THROW(stateful.load_state_dict(std::int64_t{'b'} + 256), Error);
  EXPECT_EQ(character, 'b');
}

TEST_F(Checkpoints, InvalidCallsAreRefused) {
  expect_torch_ranks(2, "paceline", [&](int rank, int) {
    const auto says = [](const char* text) { return ThrowsMessage<UsageError>(HasSubstr(text)); };
    double number = 1;
    EXPECT_THAT([&] { CheckpointDirectory(path(), {.keep_best = 1}); },
                ThrowsMessage<Error>(HasSubstr("set keep_last to 1 or more")));
    CheckpointDirectory checkpoints(path());
    EXPECT_THAT(
        [&] {
          checkpoints.save(rank, {{"a", number}});
        },
        says("rank 0 saves step 0 of 1 states, and rank 1 step 1 of 1"));
    EXPECT_THAT(
        [&] {
          checkpoints.save(1, {{rank == 0 ? "a" : "b", number}});
        },
        says("or states of other names"));
    EXPECT_THAT([&] { checkpoints.save(-1, {}); }, says("step is -1; it must not be negative"));
    EXPECT_THAT(
        [&] {
          checkpoints.save(1, {{"a", number}, {"a", number}});
        },
        says("the name 'a' is in use"));
    EXPECT_THAT([&] { CheckpointDirectory(path(), {.keep_last = rank == 1 ? -1 : 0}); },
                ThrowsMessage<Error>(HasSubstr("cannot be used: rank 1: keep_last is -1")));
    checkpoints.save(1, {{"a", number}, {"c", number}});
    EXPECT_THAT(
        [&] {
          checkpoints.resume({{"b", number}});
        },
        ThrowsMessage<Error>(HasSubstr("there is no 'b', but a, c")));
    at::Tensor flat = torch::zeros({3});
    EXPECT_THAT(
        [&] {
          checkpoints.resume({{"a", flat}});
        },
        ThrowsMessage<Error>(HasSubstr("'a': ")));
    at::Tensor half = torch::full({1}, 0.5);
    at::Tensor count = torch::zeros({1}, at::kLong);
    checkpoints.save(2, {{"a", half}});
    EXPECT_THAT(
        [&] {
          checkpoints.resume({{"a", count}});
        },
        ThrowsMessage<Error>(HasSubstr("'a': it has elements of Float, in place of Long")));
    at::Tensor wide = torch::zeros({1}, at::kDouble);
    checkpoints.resume({{"a", wide}});
    EXPECT_EQ(wide.item<double>(), 0.5);
  });
}

// Models and optimizers of ranks differ, so that each rank saves its own.
TEST_F(Checkpoints, OfLocalSgdGoOnWithTheModelOfEachRank) {
  expect_torch_ranks(2, "paceline", [&](int rank, int) {
    struct Run {
      torch::nn::Linear net = [] {
        torch::manual_seed(0);
        return torch::nn::Linear(3, 2);
      }();
      DistributedDataParallel<torch::nn::LinearImpl> model{net};
      torch::optim::SGD sgd{model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)};
      comm_hooks::PostLocalSgdState state{{.post_local_gradient_all_reduce = false}};
      PeriodicModelAverager averager{{.period = 3}};
      States states{{"model", Stateful(model).per_rank()},
                    {"sgd", Stateful(sgd).per_rank()},
                    {"hook", state},
                    {"averager", averager}};

      Run() { model.register_comm_hook(comm_hooks::post_local_sgd(state)); }
      void step(int rank, int number) {
        sgd.zero_grad();
        model(torch::full({1, 3}, 0.1 * rank + number)).pow(2).sum().backward();
        sgd.step();
        averager.average_parameters(model.parameters());
      }
    };
    CheckpointDirectory checkpoints(path());
    Run whole;
    for (int step = 0; step < 6; ++step) {
      if (step == 2) checkpoints.save(step, whole.states);
      whole.step(rank, step);
    }
    Run again;
    again.step(rank, 9);
    checkpoints.resume(again.states);
    for (int step = 2; step < 6; ++step) again.step(rank, step);
    expect_equal(again.model.parameters(), whole.model.parameters());
  });
}

TEST_F(Checkpoints, SaysThatAllRanksSave) {
  expect_torch_ranks(2, "paceline", [&](int rank, int) {
    double number = 1;
    CheckpointDirectory checkpoints(path());
    const auto save = [&] {
      if (rank == 0) checkpoints.save(1, {{"a", number}});
      if (rank == 1) barrier();
    };
    EXPECT_THAT(save, ThrowsMessage<Mismatch>(
                          HasSubstr(rank == 0 ? "call save() on all ranks" : "all_gather")));
  });
}

}  // namespace
}  // namespace paceline
