#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::expect_torch_ranks;
using test::RankContext;
using ::testing::HasSubstr;

TEST(Collectives, SparseTensorsThatDifferAreAMismatchOnEveryRank) {
  expect_torch_ranks(3, "paceline", [](int rank, int) {
    const auto tensor = torch::zeros({4, rank == 1 ? 5 : 6}).to_sparse(1);
    try {
      all_reduce(tensor);
      ADD_FAILURE() << "no error";
    } catch (const Mismatch& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr("rank 1 all_reduce of a sparse Float tensor of [4, 5] with "
                            "1 sparse dimensions"));
      EXPECT_THAT(error.ranks(), ::testing::ElementsAre(1));
    }
  });
}

TEST(Collectives, RejectInvalidTypesAndOperations) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    EXPECT_THROW(all_reduce(torch::ones({2}, at::kComplexFloat), {.op = ReduceOp::MAX}),
                 UsageError);
    EXPECT_THROW(all_reduce(torch::ones({2}, at::kBool), {.op = ReduceOp::AVG}), UsageError);
    EXPECT_THROW(all_reduce(torch::ones({2}), {.op = ReduceOp::BOR}), UsageError);
    EXPECT_THROW(all_reduce(at::Tensor()), Error);
    EXPECT_THROW(all_gather({torch::ones({2})}, torch::ones({2})), UsageError);
    EXPECT_THROW(all_gather_into_tensor(torch::ones({3}), torch::ones({2})), UsageError);
    auto t = torch::ones({2});
    all_reduce(t);  // nobody was put out of step
    EXPECT_EQ(t[0].item<float>(), 2);
  });
}

TEST(Collectives, RejectTensorsOfDifferentTypes) {
  const auto ends = test::run_torch_ranks(2, "paceline", [](const RankContext& context) {
    const World world = init_process_group(context.init);
    broadcast(torch::zeros({8}, context.rank == 0 ? at::kHalf : at::kShort));
    return std::string("no error");
  });
  for (const auto& end : ends) {
    EXPECT_THAT(end.report, HasSubstr("rank 0 called broadcast of 8 float16 from rank 0, rank 1 "
                                      "broadcast of 8 int16 from rank 0"));
  }
}

TEST(Collectives, RejectImpossibleAllocations) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    for (const long size : {-1L, 1L << 61}) {
      EXPECT_THROW(backend->allocateTensor(size, at::kDouble), UsageError) << size;
    }
    EXPECT_THROW(backend->allocateTensor(1L << 50, at::kDouble), Error);
  });
}

TEST(Collectives, MismatchHasTheSameTextOnEveryRank) {
  const auto ends = test::run_torch_ranks(2, "paceline", [](const RankContext& context) {
    const World world = init_process_group(context.init);
    all_reduce(torch::ones({10 + 2 * context.rank}));
    return std::string("no error");
  });
  for (const auto& end : ends) {
    EXPECT_EQ(
        end.report,
        "threw: rank 0 called all_reduce of 10 float32, rank 1 all_reduce of 12 float32; call "
        "1 of group world");
  }
}

// Of types that are only moved.
TEST(Collectives, MismatchNamesTypesOfTheSameNumberOfBytes) {
  const auto ends = test::run_torch_ranks(2, "paceline", [](const RankContext& context) {
    const World world = init_process_group(context.init);
    broadcast(context.rank == 0 ? torch::ones({4}, at::kUInt16) : torch::ones({2}, at::kUInt32));
    return std::string("no error");
  });
  for (const auto& end : ends) {
    EXPECT_EQ(
        end.report,
        "threw: rank 0 called broadcast of 4 uint16 from rank 0, rank 1 broadcast of 2 uint32 "
        "from rank 0; call 1 of group world");
  }
}

}  // namespace
}  // namespace paceline
