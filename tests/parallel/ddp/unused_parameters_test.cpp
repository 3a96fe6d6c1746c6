#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include <paceline/collectives.h>
#include <paceline/ddp.h>

#include "parallel/ddp/branches.h"
#include "support/small_net.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using test::batch_of;
using test::Branches;
using test::expect_torch_ranks;
using test::RankContext;
using ::testing::AllOf;
using ::testing::HasSubstr;

Branches make_branches() {
  torch::manual_seed(4);
  Branches net;
  net->to(at::kDouble);
  return net;
}

// Whether a rank uses the extra branch in a micro-batch of a step: in step 0 nobody, in step 1
// rank 0, in step 2 the last rank in the first micro-batch only, in step 3 everybody, and in step 4
// nobody again.
bool uses_extra(int rank, int size, int step, int micro) {
  if (step == 1) return rank == 0;
  if (step == 2) return rank == size - 1 && micro == 0;
  return step == 3;
}

using UnusedParametersWorldsUpTo5 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, UnusedParametersWorldsUpTo5, test::worlds({2, 3, 5}), test::CaseName());

TEST_P(UnusedParametersWorldsUpTo5, Accumulate) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    DistributedDataParallel model(make_branches(),
                                  {.bucket_cap_mb = 0.0001, .find_unused_parameters = true});
    auto plain = make_branches();
    const auto mark = torch::full({4, 9}, 7.0, at::kDouble);
    model.module()->extra->weight.mutable_grad() = mark.clone();
    plain->extra->weight.mutable_grad() = mark.clone();
    for (int step = 0; step < 5; ++step) {
      if (step > 0) {
        model.module()->zero_grad(step % 2 == 0);
        plain->zero_grad(step % 2 == 0);
      }
      for (int micro = 0; micro < 3; ++micro) {
        const auto guard = model.no_sync(micro < 2);
        const auto x = batch_of(rank, 10 * step + micro, at::kDouble);
        model(x, uses_extra(rank, n, step, micro)).pow(2).sum().backward();
        for (int r = 0; r < n; ++r) {
          const auto y = batch_of(r, 10 * step + micro, at::kDouble);
          (plain(y, uses_extra(r, n, step, micro)).pow(2).sum() / n).backward();
        }
      }
      for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
        const auto expected = plain->parameters()[i].grad();
        const auto got = model.parameters()[i].grad();
        ASSERT_EQ(got.defined(), expected.defined()) << "step " << step << " tensor " << i;
        if (expected.defined()) {
          EXPECT_TRUE(torch::allclose(got, expected, 1e-12, 1e-13)) << "step " << step << i;
        }
      }
    }
  });
}

using UnusedParametersRanksUpTo3 = test::SizeTest;
INSTANTIATE_TEST_SUITE_P(, UnusedParametersRanksUpTo3, ::testing::Values(2, 3), test::CaseName());

TEST_P(UnusedParametersRanksUpTo3, AreNamedOnEveryRank) {
  const int size = GetParam();
  const auto ends = test::run_torch_ranks(size, "paceline", [](const RankContext& context) {
    const World world = init_process_group(context.init);
    DistributedDataParallel model(make_branches());
    const auto x = batch_of(context.rank, 0, at::kDouble);
    model(x, context.rank != 1).sum().backward();
    return std::string("no error");
  });
  for (const auto& end : ends) {
    EXPECT_THAT(end.report,
                AllOf(HasSubstr("rank 1: 2 of 4 parameters got no gradient"),
                      HasSubstr("extra.weight, extra.bias"), HasSubstr("find_unused_parameters")));
  }
}

}  // namespace
}  // namespace paceline
