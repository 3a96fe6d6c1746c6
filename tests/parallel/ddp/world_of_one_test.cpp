#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <paceline/ddp.h>

#include "parallel/ddp/branches.h"
#include "parallel/ddp/steps.h"
#include "support/cases.h"
#include "support/small_net.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::backends;
using test::Branches;
using test::bytes_of;
using test::expect_torch_ranks;
using test::text_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

using WorldOfOneBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, WorldOfOneBackends, ::testing::ValuesIn(backends()), test::CaseName());

TEST_P(WorldOfOneBackends, FailsWhereSeveralRanksFail) {
  expect_torch_ranks(1, GetParam(), [](int, int) {
    DistributedDataParallel model(Branches{});
    EXPECT_THAT(text_of([&] {
                  model(torch::ones({1, 9}), false).sum().backward();
                }),
                AllOf(HasSubstr("2 of 4 parameters got no gradient"), HasSubstr("extra.weight")));
  });
  expect_torch_ranks(1, GetParam(), [](int, int) {
    DistributedDataParallel model(Branches{}, {.average = Average::samples});
    EXPECT_THAT(text_of([&] {
                  model(torch::ones({1, 9}), true).sum().backward();
                }),
                HasSubstr("call set_samples"));
  });
}

struct SingleImpl : torch::nn::Module {
  torch::Tensor w;
  // No leaf, so that its gradient passes through autograd.
  torch::Tensor forward() { return w.view_as(w); }
};

struct ManyArgumentsImpl : torch::nn::Module {
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(2, 2))};
  torch::Tensor forward(at::TensorList list, std::span<torch::Tensor> span,
                        std::unique_ptr<int> number, torch::Tensor& in_place,
                        const std::vector<torch::Tensor>& vector,
                        const std::optional<torch::Tensor>& optional) {
    in_place.add_(*number);
    return linear(list[0] + span[0] + in_place + vector[0] + optional.value_or(list[0]));
  }
};
TORCH_MODULE(ManyArguments);

TEST_P(WorldOfOneBackends, PassesAnyArgumentsOn) {
  expect_torch_ranks(1, GetParam(), [](int, int) {
    DistributedDataParallel model(ManyArguments{});
    std::vector<torch::Tensor> ones{torch::ones({1, 2})};
    torch::Tensor in_place = torch::zeros({1, 2});
    const auto output = model(at::TensorList(ones), std::span(ones), std::make_unique<int>(3),
                              in_place, ones, std::nullopt);
    EXPECT_EQ(output.sizes(), in_place.sizes());
    EXPECT_EQ(in_place.sum().item<float>(), 6);
  });
}

// Whatever the type, also values that an average could change: NaN with a payload, and -0.
TEST_P(WorldOfOneBackends, LeavesGradientsUnchanged) {
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat}) {
    for (const bool large : {true, false}) {
      expect_torch_ranks(1, GetParam(), [=](int, int) {
        torch::manual_seed(2);
        const auto bits = torch::randint(256, {large ? 80'000 : 64}, at::kByte);
        auto net = std::make_shared<SingleImpl>();
        net->w = net->register_parameter("w", torch::zeros_like(bits.view(type)));
        DistributedDataParallel model(net);
        for (int step = 0; step < 2; ++step) {
          net->zero_grad();
          model().backward(bits.view(type).clone());
          EXPECT_EQ(bytes_of({net->w.grad()}), bytes_of({bits}));
        }
      });
    }
  }
}

struct OnMetaImpl : torch::nn::Module {
  torch::Tensor w{register_parameter("w", torch::ones({3}, at::kMeta))};
  torch::Tensor v{register_parameter("v", torch::ones({3}, at::kMeta))};
  torch::Tensor forward(bool both) { return both ? w * v : w * 2; }
};
TORCH_MODULE(OnMeta);

// A device that every LibTorch has, and no backend serves.
TEST_P(WorldOfOneBackends, NeedsNoBackendForItsDevice) {
  expect_torch_ranks(1, GetParam(), [](int, int) {
    OnMeta net;
    DistributedDataParallel model(net, {.device_ids = {at::kMeta}, .find_unused_parameters = true});
    torch::optim::SGD sgd(model.parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      sgd.zero_grad();
      model(step == 1).sum().backward();
      EXPECT_TRUE(net->w.grad().is_meta());
      EXPECT_EQ(net->v.grad().defined(), step == 1);
      sgd.step();
    }
    EXPECT_EQ(model.stats().steps, 3U);
  });
  expect_torch_ranks(1, GetParam(), [](int, int) {
    DistributedDataParallel model(OnMeta{});
    EXPECT_THAT(text_of([&] { model(false).sum().backward(); }),
                HasSubstr("1 of 2 parameters got no gradient in this backward: v."));
  });
}

}  // namespace
}  // namespace paceline
