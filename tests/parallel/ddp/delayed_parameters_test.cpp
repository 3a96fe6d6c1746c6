#include <gtest/gtest.h>
#include <torch/torch.h>

#include <paceline/ddp.h>

#include "parallel/ddp/pair.h"
#include "support/cases.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::backends;
using test::check_steps;
using test::expect_torch_ranks;
using test::make_pair;
using test::PairImpl;
using test::throw_on_rank_1;
using test::Triple;
using torch::Tensor;

// The options with w reduced when v is.
DdpOptions delayed(DdpOptions options) {
  options.delay_all_reduce_named_params = {"w"};
  options.param_to_hook_all_reduce = "v";
  return options;
}

using DelayedParametersBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, DelayedParametersBackends, ::testing::ValuesIn(backends()),
                         test::CaseName());

TEST_P(DelayedParametersBackends, WorkWithOtherOptions) {
  for (const bool view : {true, false}) {
    for (const bool is_static : {true, false}) {
      expect_torch_ranks(2, GetParam(), [=](int rank, int size) {
        const DdpOptions options =
            delayed({.gradient_as_bucket_view = view, .static_graph = is_static});
        check_steps(
            make_pair({20000}, {10},
                      [](PairImpl& self, const Tensor& x) { return self.v.sum() * x * self.w; }),
            {20000}, options, rank, size);
      });
    }
  }
}

TEST_P(DelayedParametersBackends, AbortedStepLeavesNothing) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    Triple net;
    DistributedDataParallel model(net, delayed({}));
    const unsigned hook = throw_on_rank_1(net->v, rank);
    const Tensor x = torch::full({2}, rank + 1.0);
    EXPECT_ANY_THROW(model(x, true).sum().backward());
    net->v.remove_hook(hook);
    model(x, true).sum().backward();
    EXPECT_TRUE(net->w.grad().equal(torch::full({2}, 3.0)));
    EXPECT_TRUE(net->v.grad().equal(torch::full({2}, 3.0)));
    EXPECT_TRUE(net->u.grad().equal(torch::full({2}, 1.0)));
  });
}

// v tells that w is used, also where it has its gradient in a backward that is not synchronised.
TEST_P(DelayedParametersBackends, AveragesParametersUsedUnderNoSync) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    Triple net;
    DistributedDataParallel model(net, delayed({.find_unused_parameters = true}));
    const Tensor x = torch::full({2}, rank + 1.0);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      {
        const auto guard = model.no_sync();
        model(x, true).sum().backward();
      }
      model(x, false).sum().backward();
      EXPECT_TRUE(net->w.grad().equal(torch::full({2}, 3.0)));
      EXPECT_TRUE(net->v.grad().equal(torch::full({2}, 3.0)));
      EXPECT_TRUE(net->u.grad().equal(torch::full({2}, 2.5)));
    }
  });
}

}  // namespace
}  // namespace paceline
