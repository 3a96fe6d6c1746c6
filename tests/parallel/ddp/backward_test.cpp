// A rank fails in the middle of a training step, and the others start again.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <atomic>
#include <csignal>
#include <iterator>
#include <stdexcept>
#include <thread>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/record.h>

#include "support/cases.h"
#include "support/eventually.h"
#include "support/shared.h"
#include "support/small_net.h"
#include "support/stopped.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using namespace std::chrono_literals;
using test::batch_of;
using test::loss_of;
using test::make_net;
using test::RankContext;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kSizes[] = {2, 3, 4};
constexpr int kBadStep = 2;             // of steps counted from 0
constexpr double kEachAlone = 0.00001;  // a bucket for each parameter

// A point of a training step; those in the backward by the gradient that is not there yet.
struct Place {
  enum class Kind { forward, loss, gradient, comm_hook };
  Kind kind;
  const char* parameter = "";
};
constexpr Place kGradients[] = {{Place::Kind::gradient, "last.bias"},
                                {Place::Kind::gradient, "second.bias"},
                                {Place::Kind::gradient, "first.weight"}};

struct FaultyNetImpl : test::NetImpl {
  std::function<void()> in_forward = [] {};
  torch::Tensor forward(const torch::Tensor& x) {
    in_forward();
    return NetImpl::forward(x);
  }
};
TORCH_MODULE(FaultyNet);

FaultyNet make_faulty_net() {
  torch::manual_seed(3);
  FaultyNet net;
  net->to(at::kDouble);
  return net;
}

// A model that calls `fault` at a place of step kBadStep.
class Training {
 public:
  Training(Place place, std::function<void()> fault, const ProcessGroup& group = {})
      : place_(place),
        fault_(std::move(fault)),
        model_(net_, {.process_group = group, .bucket_cap_mb = kEachAlone}) {
    net_->in_forward = [this] { at(Place::Kind::forward); };
    if (place.kind == Place::Kind::comm_hook) {
      model_.register_comm_hook([this, hook = comm_hooks::all_reduce(group)](GradBucket& bucket) {
        if (bucket.getIndex() == 1) at(Place::Kind::comm_hook);
        return hook(bucket);
      });
    }
    if (place.kind == Place::Kind::gradient) {
      net_->named_parameters()[place.parameter].register_hook([this](const torch::Tensor& grad) {
        at(Place::Kind::gradient);
        return grad;
      });
    }
  }

  void step(int number, int rank) {
    now_ = number;
    const auto x = batch_of(rank, number, at::kDouble);
    net_->zero_grad();
    const auto output = model_(x);
    at(Place::Kind::loss);
    loss_of(output, x).backward();
  }
  std::vector<torch::Tensor> parameters() const { return model_.parameters(); }

 private:
  void at(Place::Kind kind) {
    if (kind == place_.kind && now_ == kBadStep) fault_();
  }

  Place place_;
  std::function<void()> fault_;
  int now_ = 0;
  FaultyNet net_ = make_faulty_net();
  DistributedDataParallel<FaultyNetImpl> model_;
};

// Runs the first steps and the one that fails; returns its error's text.
std::string text_of_bad_step(Training& training, int rank) {
  for (int number = 0; number < kBadStep; ++number) training.step(number, rank);
  try {
    training.step(kBadStep, rank);
    // A rank that finished it nevertheless learns of the failure in the next.
    training.step(kBadStep + 1, rank);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// A new world of the ranks but `lost` (-1: of all) trains a new model; compares with one process.
void start_again(const RankContext& context, int lost, const std::function<void()>& meanwhile) {
  auto init = context.init;
  const int size = context.size - (lost >= 0 ? 1 : 0);
  const int rank = context.rank - (lost >= 0 && context.rank > lost ? 1 : 0);
  init.world_size = size;
  init.rank = rank;
  const World world = init_process_group(init);
  DistributedDataParallel model(make_net(at::kDouble), {.bucket_cap_mb = 0.001});
  auto plain = make_net(at::kDouble);
  torch::optim::SGD ours(model.parameters(), 0.1);
  torch::optim::SGD alone(plain->parameters(), 0.1);
  for (int step = 0; step < 10; ++step) {
    if (step == 3) meanwhile();
    ours.zero_grad();
    alone.zero_grad();
    const auto x = batch_of(rank, step, at::kDouble);
    loss_of(model(x), x).backward();
    for (int r = 0; r < size; ++r) {
      const auto y = batch_of(r, step, at::kDouble);
      (loss_of(plain(y), y) / size).backward();
    }
    ours.step();
    alone.step();
  }
  test::expect_close(model.parameters(), plain->parameters(), 1e-12);
}

void start_again(const RankContext& context, int lost) {
  start_again(context, lost, [] {});
}

using KilledInBackwardRanks = test::SizeTest;
INSTANTIATE_TEST_SUITE_P(, KilledInBackwardRanks, ::testing::Values(2, 3, 4), test::CaseName());

TEST_P(KilledInBackwardRanks, SurvivorsNameTheRankAndInitialiseAgain) {
  const int size = GetParam();
  for (const auto& place : kGradients) {
    const int victim = size / 2;
    const auto ends = test::run_torch_ranks(size, "paceline", [&](const RankContext& context) {
      std::string text;
      {
        const World world = init_process_group(context.init);
        Training training(place, [&] {
          if (context.rank == victim) ::raise(SIGKILL);
        });
        text = text_of_bad_step(training, context.rank);
        destroy_process_group();
      }
      start_again(context, victim);
      return text;
    });
    for (int rank = 0; rank < size; ++rank) {
      const auto& end = ends[static_cast<std::size_t>(rank)];
      if (rank == victim) {
        EXPECT_TRUE(end.killed());
        continue;
      }
      EXPECT_TRUE(end.exited_cleanly()) << end.report;
      // The bucket is the one in which the first rank to notice was waiting.
      EXPECT_THAT(end.report,
                  AllOf(HasSubstr(fmt::format("rank {} was lost", victim)),
                        HasSubstr("missing in backward, step 3 of group world, bucket")));
    }
  }
}

// The stopped rank wakes up when the others train in their new world: it must not disturb them, and
// finds out that they left without it.
void check_stopped(int size) {
  const int victim = size - 1;
  const Place place = kGradients[1];
  const test::Shared<test::Stopped> stopped;
  const auto ends = test::run_torch_ranks(size, "paceline", [&](const RankContext& context) {
    std::string text;
    {
      const World world = init_process_group(context.init);
      // Healthy ranks of a busy machine must keep it, too.
      const ProcessGroup group = new_group({}, {.timeout = 12500ms});
      Training training(
          place,
          [&] {
            if (context.rank == victim) stopped->stop();
          },
          group);
      text = text_of_bad_step(training, context.rank);
      destroy_process_group();
    }
    if (context.rank == victim) return text;
    start_again(context, victim, [&] {
      if (context.rank == 0) stopped->wake();
    });
    return text;
  });
  for (const auto& end : ends) {
    EXPECT_TRUE(end.exited_cleanly()) << end.report;
    EXPECT_THAT(end.report,
                AllOf(HasSubstr(fmt::format("rank {} did not arrive within the timeout of 12.5 s "
                                            "at backward, step 3 of group 1, bucket",
                                            victim)),
                      HasSubstr("(second.bias)")));
  }
}

TEST(StoppedInBackward, OtherRanksNameItAtTheDeadlineAndInitialiseAgain) {
  test::run_side_by_side(std::size(kSizes), [](std::size_t i) { check_stopped(kSizes[i]); });
}

// Healthy ranks meet it on a busy machine too.
constexpr auto kHookTimeout = 8s;

// A step with a communication hook that is the test's own, called with the bucket and a hook that
// averages it. Returns which ranks the error blames, and its text.
std::string text_of_hooked_step(
    const RankContext& context, std::chrono::milliseconds timeout,
    const std::function<c10::intrusive_ptr<c10::ivalue::Future>(GradBucket&, CommHook&)>& hook) {
  auto init = context.init;
  init.timeout = timeout;
  const World world = init_process_group(init);
  DistributedDataParallel model(make_net(at::kDouble), {.bucket_cap_mb = kEachAlone});
  model.register_comm_hook([&hook, average = comm_hooks::all_reduce()](GradBucket& bucket) mutable {
    return hook(bucket, average);
  });
  const auto x = batch_of(context.rank, 0, at::kDouble);
  try {
    loss_of(model(x), x).backward();
  } catch (const PeerError& error) {
    std::string blamed;
    for (const int rank : error.ranks()) blamed += fmt::format("{} ", rank);
    return fmt::format("{}: {}", blamed, error.what());
  }
  return "no error";
}

c10::intrusive_ptr<c10::ivalue::Future> never_completed() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
}

void check_stopped_in_hook(bool late) {
  constexpr int kVictim = 2;
  const test::Shared<test::Stopped> stopped;
  const test::Shared<std::atomic<int>> ended;
  const auto ends = test::run_torch_ranks(3, "paceline", [&](const RankContext& context) {
    const auto text =
        text_of_hooked_step(context, kHookTimeout, [&](GradBucket& bucket, CommHook& average) {
          const bool stops = context.rank == kVictim && bucket.getIndex() == 1;
          if (stops && !late) stopped->stop();
          auto future = average(bucket);
          if (context.rank == kVictim) future->wait();  // or it would stop before that is done
          if (stops && late) stopped->stop();
          return future;
        });
    if (context.rank != kVictim && ++*ended == 2) stopped->wake();
    return text;
  });
  EXPECT_EQ(ends[0].report, ends[1].report);
  for (const auto& end : ends) {
    EXPECT_TRUE(end.exited_cleanly()) << end.report;
    EXPECT_THAT(end.report,
                AllOf(::testing::StartsWith("2 : rank 2 did not arrive within the timeout"),
                      HasSubstr("at all_reduce of ")));
  }
  EXPECT_THAT(ends[0].report, HasSubstr(late ? "communication hook for bucket 2 (second."
                                             : "communication hook for bucket 1 (last."));
}

TEST(StoppedInACommHook, OtherRanksNameTheRankAndTheBucket) {
  test::run_side_by_side(2, [](std::size_t i) { check_stopped_in_hook(i == 1); });
}

// `collective`: whether rank 1 has taken part in the collective that the others wait for. `later`:
// whether it comes later than the others, or they come later than it.
void check_never_completed(bool collective, bool later) {
  const test::Shared<std::atomic<int>> under_way;
  const auto ends = test::run_torch_ranks(3, "paceline", [&](const RankContext& context) {
    return text_of_hooked_step(context, kHookTimeout, [&](GradBucket& bucket, CommHook& average) {
      const bool bad = collective ? bucket.getIndex() == 1 : bucket.isLast();
      if (bad && (context.rank == 1) == later) {
        EXPECT_TRUE(test::eventually([&] { return *under_way == (later ? 2 : 1); }));
        // The input of this test: one side's time begins when half of the other's has passed. The
        // other half is for a busy machine.
        std::this_thread::sleep_for(kHookTimeout / 2);
      } else if (bad) {
        ++*under_way;
      }
      if (!bad || context.rank != 1) return average(bucket);
      if (collective) average(bucket)->wait();
      return never_completed();
    });
  });
  for (const auto& end : ends) {
    EXPECT_TRUE(end.exited_cleanly()) << end.report;
    EXPECT_THAT(end.report, ::testing::StartsWith("1 : "));
    if (collective || !later) {
      EXPECT_EQ(end.report, ends[1].report);
      EXPECT_THAT(end.report, AllOf(HasSubstr("the communication hook of rank 1 has not completed "
                                              "its future for bucket "),
                                    HasSubstr("within the timeout of 8 s")));
    } else {
      EXPECT_THAT(end.report, HasSubstr("rank 1 did not arrive within the timeout of 8 s at "
                                        "all_reduce of "));
    }
  }
}

TEST(FutureNeverCompleted, BlamesTheRankOfTheHook) {
  test::run_side_by_side(4, [](std::size_t i) { check_never_completed(i % 2 == 0, i / 2 == 0); });
}

// Long before the timeout, though no call waits for it.
TEST(FutureNeverCompleted, DoesNotHideALostRank) {
  const auto ends = test::run_torch_ranks(2, "paceline", [](const RankContext& context) {
    return text_of_hooked_step(context, 60s, [&](GradBucket& bucket, CommHook& average) {
      auto future = average(bucket);
      if (!bucket.isLast()) return future;
      future->wait();
      if (context.rank == 1) ::raise(SIGKILL);
      return never_completed();
    });
  });
  EXPECT_TRUE(ends[0].exited_cleanly()) << ends[0].report;
  EXPECT_THAT(ends[0].report, ::testing::StartsWith("1 : rank 1 was lost"));
}

constexpr Place kThrows[] = {{Place::Kind::forward}, {Place::Kind::loss}, kGradients[0],
                             kGradients[1],          kGradients[2],       {Place::Kind::comm_hook}};

void fail_on(int rank, const RankContext& context) {
  if (context.rank == rank) throw std::runtime_error("the disk is full");
}

using ThrownInAStepRanks = test::SizeTest;
INSTANTIATE_TEST_SUITE_P(, ThrownInAStepRanks, ::testing::Values(2, 3, 4), test::CaseName());

TEST_P(ThrownInAStepRanks, SurvivorsInitialiseAgainAfterTheRankLeaves) {
  const int size = GetParam();
  for (const auto& place : kThrows) {
    const int victim = size / 2;
    const auto ends = test::run_torch_ranks(size, "paceline", [&](const RankContext& context) {
      std::string text = "none";
      const int code = record([&] {
        const World world = init_process_group(context.init);
        Training training(place, [&] { fail_on(victim, context); });
        text = text_of_bad_step(training, context.rank);
        destroy_process_group();
      });
      if (context.rank != victim) start_again(context, victim);
      return fmt::format("{} {}", code, text);
    });
    for (int rank = 0; rank < size; ++rank) {
      const auto& end = ends[static_cast<std::size_t>(rank)];
      SCOPED_TRACE(fmt::format("rank {} of {}, {} {}", rank, size, static_cast<int>(place.kind),
                               place.parameter));
      EXPECT_TRUE(end.exited_cleanly()) << end.report;
      if (rank == victim && place.kind != Place::Kind::comm_hook) {
        EXPECT_EQ(end.report, "1 none");
        continue;
      }
      EXPECT_THAT(end.report,
                  AllOf(::testing::StartsWith("0"), HasSubstr(fmt::format("rank {} ", victim)),
                        HasSubstr("the disk is full")));
    }
  }
}

std::string text_thrown_by(const std::function<void()>& step) {
  try {
    step();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "none";
}

// Two steps of all ranks: the bad one, whose exception everyone catches, and the next.
std::vector<std::string> catch_and_go_on(int size, Place place) {
  std::vector<std::string> reports;
  const auto ends = test::run_torch_ranks(size, "paceline", [&](const RankContext& context) {
    std::string bad;
    std::string next;
    {
      const World world = init_process_group(context.init);
      Training training(place, [&] { fail_on(1, context); });
      for (int number = 0; number < kBadStep; ++number) training.step(number, context.rank);
      bad = text_thrown_by([&] { training.step(kBadStep, context.rank); });
      next = text_thrown_by([&] { training.step(kBadStep + 1, context.rank); });
      if (next == "none") {
        test::expect_same_gradients(training.parameters(),
                                    test::whole_batch_gradients(kBadStep + 1, context.size));
      }
    }
    if (next != "none") start_again(context, -1);
    return fmt::format("{}; next: {}", bad, next);
  });
  for (const auto& end : ends) {
    EXPECT_TRUE(end.exited_cleanly()) << end.report;
    reports.push_back(end.report);
  }
  return reports;
}

TEST_P(ThrownInAStepRanks, TrainingGoesOnIfCaughtBetweenGradients) {
  const int size = GetParam();
  for (const auto& place : {kGradients[1], kGradients[2]}) {
    const auto reports = catch_and_go_on(size, place);
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_THAT(
          reports[static_cast<std::size_t>(rank)],
          AllOf(HasSubstr(rank == 1 ? "the disk is full" : "rank 1 aborted step 3 of group"),
                HasSubstr("next: none")));
    }
  }
}

// Nobody else heard of the exception, so the ranks are a step apart.
TEST_P(ThrownInAStepRanks, NextStepFailsIfCaughtBeforeTheBackward) {
  const int size = GetParam();
  for (const auto& place : {kThrows[0], kThrows[1]}) {
    const auto reports = catch_and_go_on(size, place);
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_THAT(reports[static_cast<std::size_t>(rank)],
                  AllOf(HasSubstr(rank == 1 ? "the disk is full; next: " : "; next: "),
                        HasSubstr("step 3"), HasSubstr("rank 1: 4")));
    }
  }
}

}  // namespace
}  // namespace paceline
