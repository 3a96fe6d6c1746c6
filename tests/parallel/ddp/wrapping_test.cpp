#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <string>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/error.h>

#include "support/cases.h"
#include "support/small_net.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::backends;
using test::batch_of;
using test::expect_torch_ranks;
using test::loss_of;
using test::make_net;
using test::Net;
using test::NetImpl;
using test::RankContext;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using WrappingBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, WrappingBackends, ::testing::ValuesIn(backends()), test::CaseName());

TEST_P(WrappingBackends, NamesTheFirstDifferenceOfModels) {
  const std::string& backend = GetParam();
  const auto construct = [&](auto make) {
    return test::run_torch_ranks(3, backend, [&](const RankContext& context) {
      const World world = init_process_group(context.init);
      const DistributedDataParallel model(make(context.rank));
      return std::string("no error");
    });
  };
  for (const auto& end :
       construct([](int rank) { return torch::nn::Linear(9, rank == 1 ? 5 : 4); })) {
    EXPECT_THAT(end.report,
                AllOf(HasSubstr("weight, a parameter of shape [4, 9] and type Float on rank 0"),
                      HasSubstr("weight, a parameter of shape [5, 9] and type Float on rank 1")));
  }
  for (const auto& end : construct([](int rank) {
         torch::nn::Linear linear(9, 4);
         if (rank == 2) linear->to(at::kDouble);
         return linear;
       })) {
    EXPECT_THAT(end.report,
                HasSubstr("weight, a parameter of shape [4, 9] and type Double on rank 2"));
  }
  for (const auto& end : construct([](int rank) {
         return torch::nn::Linear(torch::nn::LinearOptions(9, 4).bias(rank != 1));
       })) {
    EXPECT_THAT(end.report, AllOf(HasSubstr("2 parameters and buffers on rank 0, 1 on rank 1"),
                                  HasSubstr("nothing more on rank 1")));
  }
  for (const auto& end : construct([](int rank) {
         torch::nn::Conv2d conv(3, 4, 2);
         if (rank == 1)
           conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
         return conv;
       })) {
    EXPECT_THAT(end.report, HasSubstr("type Float with strides [12, 1, 6, 3] on rank 1"));
  }
  for (const auto& end : construct([](int rank) {
         torch::nn::Linear linear(9, 4);
         linear->bias.requires_grad_(rank != 2);
         return linear;
       })) {
    EXPECT_THAT(end.report, HasSubstr("bias, a frozen parameter of shape [4] and type Float on "
                                      "rank 2"));
  }
  for (const auto& end : construct([](int rank) {
         torch::nn::BatchNorm1d norm(4);
         if (rank == 1) norm->running_mean.resize_({2, 2});
         return norm;
       })) {
    EXPECT_THAT(end.report, HasSubstr("running_mean, a buffer of shape [2, 2]"));
  }
}

TEST(Wrapping, RejectsInvalidOptions) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    EXPECT_THROW(DistributedDataParallel(Net{}, {.bucket_cap_mb = 0}), UsageError);
    EXPECT_THROW(DistributedDataParallel(torch::nn::Tanh()), UsageError);
    EXPECT_THROW(DistributedDataParallel(std::shared_ptr<NetImpl>()), UsageError);
    const DistributedDataParallel all_in_one(
        Net{}, {.bucket_cap_mb = std::numeric_limits<double>::infinity()});
  });
}

TEST(Wrapping, RejectsUnsupportedModels) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    auto net = make_net(at::kDouble);
    DistributedDataParallel model(net);
    EXPECT_THAT([&] { const DistributedDataParallel second(net); },
                ThrowsMessage<UsageError>(HasSubstr("first.weight is wrapped by another")));
    const auto x = batch_of(rank, 0, at::kDouble);
    EXPECT_THAT([&] { loss_of(model(x), x).backward({}, false, true); },
                ThrowsMessage<UsageError>(HasSubstr("create_graph")));
    net->register_module("late", torch::nn::Linear(1, 1));
    EXPECT_THAT(
        [&] {
          for (int i = 0; i < 8; ++i) model(x);
        },
        ThrowsMessage<UsageError>(HasSubstr("8 parameters and had 6")));
  });
}

}  // namespace
}  // namespace paceline
