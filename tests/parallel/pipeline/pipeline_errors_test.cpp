#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/pipeline.h>

#include "parallel/pipeline/stages.h"
#include "support/shared.h"
#include "support/stopped.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::errors_of;
using test::expect_torch_ranks;
using test::Fork;
using test::input_of;
using test::Join;
using test::kSamples;
using test::kWidth;
using test::RankContext;
using test::squares;
using test::stage_of;
using test::target_of;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::EndsWith;
using ::testing::HasSubstr;

TEST(PipelineErrors, AllStagesNameOptionsThatDiffer) {
  EXPECT_THAT(errors_of(3,
                        [](int rank) {
                          Pipeline(stage_of(rank), squares, {.n_microbatches = rank == 2 ? 4 : 2});
                        }),
              Each(AllOf(HasSubstr("stage 2 of a Pipeline has 4 micro-batches"),
                         HasSubstr("stage 0 2 micro-batches"))));
  EXPECT_THAT(
      errors_of(2, [](int rank) { Pipeline(stage_of(rank), squares, {.n_microbatches = 0}); }),
      Each(HasSubstr("n_microbatches of 0")));
}

TEST(PipelineErrors, OptionsOfDdpThatCannotWorkAreNamed) {
  const auto with = [](const DdpOptions& ddp) {
    return errors_of(2, [&](int rank) { Pipeline(stage_of(rank), squares, {.ddp = ddp}); });
  };
  EXPECT_THAT(with({}), Each(HasSubstr("rank 1 runs stage 1 of 2, and rank 0 stage 0 of 2")));
  EXPECT_THAT(with({.average = Average::samples}), Each(HasSubstr("with Average::samples")));
  EXPECT_THAT(with({.logical_ranks = 4}), Each(HasSubstr("with logical_ranks")));
  EXPECT_THAT(errors_of(1,
                        [](int) {
                          Pipeline(stage_of(0), squares,
                                   {.schedule = static_cast<PipelineSchedule>(7)});
                        }),
              Each(HasSubstr("7 is no PipelineSchedule")));
}

// The stages before it are in a call that this one has left.
TEST(PipelineErrors, AStageThatRefusesItsTargetDoesNotTakeTheNextOne) {
  const auto errors = errors_of(2, [](int rank) {
    Pipeline pipeline(stage_of(rank), squares, {.n_microbatches = 2});
    const auto x = input_of(0).to(at::kFloat);
    const auto target = target_of(x);
    if (rank == 1) {
      EXPECT_THROW(pipeline.step(x, target.narrow(0, 0, kSamples - 1)), UsageError);
    }
    pipeline.step(x, target);
    if (rank == 0) pipeline.step(x, target);
  });
  EXPECT_THAT(errors[1],
              AllOf(HasSubstr("in call 2, a step"),
                    HasSubstr("rank 0 has sent outputs of micro-batch 0 of 2 in call 1")));
  EXPECT_THAT(errors[0], HasSubstr("rank 1"));
}

TEST(PipelineErrors, AStageThatThrowsIsNamed) {
  const auto errors = errors_of(3, [](int rank) {
    const auto loss = [](const at::Tensor& output, const at::Tensor& target) -> at::Tensor {
      if (output.defined()) throw std::runtime_error("no such target");
      return target;
    };
    Pipeline pipeline(stage_of(rank), loss, {.n_microbatches = 2});
    const auto x = input_of(0).to(at::kFloat);
    for (int step = 0; step < 2; ++step) pipeline.step(x, target_of(x));
  });
  EXPECT_EQ(errors[2], "no such target");
  for (const int stage : {0, 1}) {
    EXPECT_THAT(errors[static_cast<std::size_t>(stage)],
                AllOf(HasSubstr("rank 2"), HasSubstr("(Pipeline was "),
                      ContainsRegex("micro-batch [01] of 2 in call 1, a step, of Pipeline 0 "),
                      HasSubstr("no such target")));
  }
}

struct ThrowsImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& /*x*/) { throw std::runtime_error("no such input"); }
};
TORCH_MODULE(Throws);

// It goes on, and so does its World.
TEST(PipelineErrors, AStageThatCatchesItsExceptionKeepsNobodyWaiting) {
  for (const bool trains : {true, false}) {
    const auto errors = errors_of(3, [&](int rank) {
      const auto run = [&](const auto& stage) {
        Pipeline pipeline(stage, squares, {.n_microbatches = 2});
        const auto x = input_of(0).to(at::kFloat);
        trains ? static_cast<void>(pipeline.step(x, target_of(x)))
               : static_cast<void>(pipeline.evaluate(x));
      };
      if (rank != 1) return run(stage_of(rank));
      EXPECT_THROW(run(Throws()), std::runtime_error);
      barrier();
    });
    for (const std::size_t stage : {0, 2}) {
      if (stage == 0 && !trains) continue;  // it waits for nobody
      EXPECT_THAT(errors[stage],
                  HasSubstr("rank 1 left the group with an exception: no such input"));
    }
  }
}

// Stages that exchange nothing with it name it, too.
void stop_a_stage(int stages, int victim) {
  SCOPED_TRACE(fmt::format("stage {} of {}", victim, stages));
  struct SharedState {
    test::Stopped victim;
    std::atomic<int> timeouts{0};
  };
  const test::Shared<SharedState> state;
  const auto ends = test::run_torch_ranks(stages, "paceline", [&](const RankContext& context) {
    const World world = init_process_group(context.init);
    Pipeline pipeline(stage_of(context.rank), squares, {.n_microbatches = 2});
    const auto x = input_of(0).to(at::kFloat);
    pipeline.step(x, target_of(x));
    ProcessGroup().c10d()->getBackend(at::kCPU)->setTimeout(std::chrono::seconds(2));
    if (context.rank == victim) state->victim.stop();
    try {
      for (;;) pipeline.step(x, target_of(x));
    } catch (const PeerError& error) {
      if (context.rank == victim) return std::string();
      EXPECT_EQ(error.ranks(), std::vector<int>{victim}) << error.what();
      if (++state->timeouts == stages - 1) state->victim.wake();
      return std::string(error.what());
    }
  });
  for (int rank = 0; rank < stages; ++rank) {
    const auto& end = ends[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(end.exited_cleanly()) << end.report;
    if (rank == victim) continue;
    EXPECT_THAT(end.report, HasSubstr(fmt::format("rank {}", victim)));
  }
}

TEST(PipelineErrors, AStoppedStageIsNamedByAll) {
  for (const int stages : {2, 3, 4}) {
    for (int victim = 0; victim < stages; ++victim) stop_a_stage(stages, victim);
  }
}

TEST(PipelineErrors, StepsThatDifferAreAMismatch) {
  const auto errors = errors_of(2, [](int rank) {
    Pipeline pipeline(stage_of(rank), squares, {.n_microbatches = 2});
    const auto x = input_of(0).to(at::kFloat);
    if (rank == 0) {
      pipeline.evaluate(x);
      pipeline.evaluate(x);
    } else {
      pipeline.evaluate(x);
      pipeline.step(x, target_of(x));
    }
  });
  EXPECT_THAT(errors[1], AllOf(HasSubstr("stage 1 of a Pipeline waits for outputs of micro-batch 0 "
                                         "of 2 in call 2, a step"),
                               HasSubstr("rank 0 has sent"), HasSubstr("an evaluation")));
}

// Of two steps of three stages with these targets.
std::vector<std::string> errors_with_targets(const std::array<at::Tensor, 3>& targets) {
  return errors_of(3, [&](int rank) {
    const auto loss = [](const at::Tensor& output, const at::Tensor& target) {
      return output.mean() * target.to(at::kFloat).mean();
    };
    Pipeline pipeline(stage_of(rank), loss, {.n_microbatches = 2});
    const auto& target = targets[static_cast<std::size_t>(rank)];
    const auto input = rank == 0 ? input_of(0).to(at::kFloat) : at::Tensor();
    for (int step = 0; step < 2; ++step) pipeline.step(input, target);
  });
}

// So no stage waits for one that has refused the batch, and the pipeline can go on.
TEST(PipelineErrors, EveryStageRefusesABatchThatIsNotDivided) {
  expect_torch_ranks(3, "paceline", [](int rank, int) {
    Pipeline pipeline(stage_of(rank), squares, {.n_microbatches = 2});
    const auto x = input_of(0).to(at::kFloat);
    const auto smaller = x.narrow(0, 0, 5);
    const auto refused = ::testing::ThrowsMessage<UsageError>(
        HasSubstr("has 5 samples, which 2 micro-batches do not divide"));
    EXPECT_THAT([&] { pipeline.step(smaller, target_of(smaller)); }, refused);
    EXPECT_THAT([&] { pipeline.step(rank == 0 ? smaller : at::Tensor(), target_of(smaller)); },
                refused);
    EXPECT_EQ(pipeline.step(x, target_of(x)).defined(), rank == 2);
  });
}

TEST(PipelineErrors, AStageThatPassesAPlaceholderLearnsWhatToPass) {
  expect_torch_ranks(3, "paceline", [](int rank, int) {
    Pipeline pipeline(stage_of(rank), squares, {.n_microbatches = 2});
    const auto x = input_of(0).to(at::kFloat);
    const auto placeholder = torch::zeros({1});
    const ::testing::Matcher<std::string> advises =
        EndsWith("n_microbatches; or pass an undefined tensor, as this stage does not read it");
    for (const int reader : {0, 2}) {
      const auto input = reader == 0 ? placeholder : at::Tensor();
      const auto target = reader == 2 ? placeholder : at::Tensor();
      EXPECT_THAT([&] { pipeline.step(input, target); },
                  ThrowsMessage<UsageError>(rank == reader ? Not(advises) : advises));
    }
    const auto loss =
        pipeline.step(rank == 0 ? x : at::Tensor(), rank == 2 ? target_of(x) : at::Tensor());
    EXPECT_EQ(loss.defined(), rank == 2);
  });
}

TEST(PipelineErrors, AnotherTargetIsAMismatch) {
  const auto target = torch::ones({4, 3});
  const auto errors = errors_with_targets({target, target, target + 1});
  EXPECT_THAT(errors[2], AllOf(HasSubstr("in call 1 of a Pipeline, stage 2 (rank 2) has another "
                                         "target than stage 1 (rank 1) or one before it"),
                               HasSubstr("must read the same batches")));
  EXPECT_THAT(errors[0], HasSubstr("rank 2"));
  EXPECT_THAT(errors[1], HasSubstr("rank 2"));
}

TEST(PipelineErrors, AStageWithoutATargetHidesNoDifference) {
  const auto target = torch::ones({4, 3});
  EXPECT_THAT(errors_with_targets({target, {}, target + 1})[2], HasSubstr("has another target"));
}

TEST(PipelineErrors, EqualTargetsAreNoMismatch) {
  const auto target = torch::arange(4096).view({4, 1024});
  const auto halves = torch::stack({target, -target}, -1).to(at::kFloat);
  const auto complex = torch::view_as_complex(halves);
  const std::vector<std::array<at::Tensor, 3>> all = {
      {at::Tensor(), at::Tensor(), target},
      {target, at::Tensor(), target},
      {target, target.t().contiguous().t(), target},  // with another layout in memory
      {target, target.to(at::kInt), target},          // of another type
      {target, target.narrow(1, 0, 5), target},       // of other sizes
      {torch::ones({}), torch::empty({0, 3}), target},
      {torch::ones({4, 30000}), torch::ones({1, 1}).expand({4, 30000}), torch::ones({4, 30000})},
      {torch::real(complex), torch::real(complex.conj()), halves.select(-1, 0)},
      {torch::imag(complex.conj()), halves.select(-1, 1).neg(), torch::imag(complex.conj())},
  };
  for (const auto& targets : all) EXPECT_THAT(errors_with_targets(targets), Each("no error"));
}

// Also of rows that are larger or do not divide 64 KiB.
TEST(PipelineErrors, TargetsAreComparedInTheirFirst64KiB) {
  constexpr std::int64_t kBytes = 65536;
  for (const std::int64_t row : {std::int64_t{1}, std::int64_t{40'000}, kBytes, 2 * kBytes}) {
    const auto target = torch::zeros({4 * kBytes / row, row}, at::kByte);
    auto within = target.clone();
    within.view(-1)[kBytes - 1] = 1;
    auto beyond = target.clone();
    beyond.view(-1)[kBytes] = 1;
    EXPECT_THAT(errors_with_targets({target, {}, within})[2], HasSubstr("has another target"));
    EXPECT_THAT(errors_with_targets({target, {}, beyond}), Each("no error")) << row;
  }
}

TEST(PipelineErrors, BadBatchesStagesAndLossesAreNamed) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    const auto expect_error = [](auto stage, auto loss, const std::vector<at::Tensor>& inputs,
                                 const at::Tensor& target, const char* text) {
      Pipeline pipeline(stage, loss, {.n_microbatches = 2});
      EXPECT_THAT([&] { pipeline.step(inputs, target); },
                  ThrowsMessage<UsageError>(HasSubstr(text)));
    };
    const auto x = torch::ones({4, kWidth});
    const auto three = torch::ones({3, kWidth});
    expect_error(stage_of(0), squares, {three}, three, "has 3 samples, which 2 micro-batches do");
    // A loss would broadcast the target.
    expect_error(stage_of(0), squares, {x}, torch::ones({2, kWidth}),
                 "has 4 samples, and the target 2");
    expect_error(
        stage_of(0),
        [](const at::Tensor& output, const at::Tensor& target) {
          return (output.detach() - target).square().mean();
        },
        {x}, x, "depends on nothing that requires a gradient");
    EXPECT_THAT([] { Pipeline(std::shared_ptr<torch::nn::LinearImpl>(), squares); },
                ThrowsMessage<UsageError>(HasSubstr("Pipeline: the module is null")));
    expect_error(stage_of(0), squares, {at::Tensor()}, x, "the input of a Pipeline is undefined");
    expect_error(stage_of(0), squares, {x}, torch::ones({}),
                 "the target of a Pipeline is a single");
    expect_error(Fork(), squares, {x}, x, "returns 4 tensors");
    expect_error(Join(), squares, {x}, x, "gets 1 tensors");
    expect_error(
        stage_of(0), [](const at::Tensor& output, const at::Tensor&) { return output; }, {x}, x,
        "a tensor of shape [2, 6]: it must be a tensor with one element");
    Pipeline pipeline(stage_of(0), squares);
    const torch::NoGradGuard no_grad;
    EXPECT_THAT([&] { pipeline.step(x, x); }, ThrowsMessage<UsageError>(HasSubstr("evaluate")));
  });
}

}  // namespace
}  // namespace paceline
