#include <gmock/gmock.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.h>
#include <paceline/optimizers.h>

#include "optim/optimizer_cases.h"

namespace paceline::optim {
namespace {

using namespace test;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Optimizers, GiveTheParametersOfPython) {
  ASSERT_FALSE(expected_parameters().empty());
  for (const ExpectedParameters& expected : expected_parameters()) {
    auto parameters = make_parameters(expected.name);
    const auto optimizer = make_optimizer(expected.name, parameters);
    train(parameters, *optimizer, 0, kSteps / 2);
    expect_parameters(parameters, expected.half, expected.name);
    train(parameters, *optimizer, kSteps / 2, kSteps);
    expect_parameters(parameters, expected.whole, expected.name);
  }
}

// Also after files of torch::save.
TEST(Optimizers, GoOnFromAFileAfterAnyStep) {
  for (const char* name :
       {"AdamW amsgrad float32 fused", "Muon options float32", "Muon rms float32"}) {
    for (int interrupted = 0; interrupted < kSteps; ++interrupted) {
      auto parameters = make_parameters(name);
      const auto optimizer = make_optimizer(name, parameters);
      train(parameters, *optimizer, 0, interrupted);
      std::stringstream file;
      torch::save(*optimizer, file);
      auto others = make_parameters(name);
      for (std::size_t i = 0; i < others.size(); ++i)
        others[i].set_data(parameters[i].detach().clone());
      const auto other = make_optimizer(
          name[0] == 'A' ? "AdamW default float32 fused" : "Muon default float32", others);
      torch::load(*other, file);
      train(parameters, *optimizer, interrupted, kSteps);
      train(others, *other, interrupted, kSteps);
      for (std::size_t i = 0; i < others.size(); ++i) {
        EXPECT_TRUE(torch::equal(others[i], parameters[i])) << name << " " << interrupted;
      }
    }
  }
}

// The parameters and states of LibTorch's AdamW, up to rounding, in steps of either.
TEST(AdamW, GoesOnWhereLibTorchsEnded) {
  for (const bool amsgrad : {false, true}) {
    auto ours = make_parameters("float64");
    auto theirs = make_parameters("float64");
    const auto options = torch::optim::AdamWOptions(0.01).amsgrad(amsgrad);
    AdamW fused(ours, options);
    torch::optim::AdamW plain(theirs, options);
    train(ours, fused, 0, kSteps / 2);
    train(theirs, plain, 0, kSteps / 2);
    std::stringstream file;
    torch::save(plain, file);
    torch::load(fused, file);
    train(ours, fused, kSteps / 2, kSteps);
    train(theirs, plain, kSteps / 2, kSteps);
    for (std::size_t i = 0; i < ours.size(); ++i) {
      EXPECT_TRUE(torch::allclose(ours[i], theirs[i], 1e-12, 1e-12));
    }
  }
}

TEST(AdamW, FollowsAnyLayout) {
  for (const bool of_gradient : {false, true}) {
    const auto values = pattern(2 * 3 * 4 * 5, 31, 0, 37, 32).reshape({2, 3, 4, 5});
    const auto gradient = pattern(values.numel(), 17, 3, 29, 64).reshape(values.sizes());
    auto plain = values.clone().requires_grad_();
    auto other =
        values.clone()
            .contiguous(of_gradient ? at::MemoryFormat::Contiguous : at::MemoryFormat::ChannelsLast)
            .requires_grad_();
    plain.mutable_grad() = gradient.clone();
    // A gradient of another layout than its parameter, as a view of a bucket can be.
    other.mutable_grad() = gradient.contiguous(of_gradient ? at::MemoryFormat::ChannelsLast
                                                           : at::MemoryFormat::Contiguous);
    AdamW of_plain({plain});
    AdamW of_other({other});
    for (int i = 0; i < 3; ++i) {
      of_plain.step();
      of_other.step();
    }
    EXPECT_TRUE(torch::allclose(other, plain, 1e-6, 1e-7));
  }
}

TEST(AdamW, UpdatesSeveralTypesAndGroups) {
  auto floats = torch::ones({3}, at::requires_grad());
  auto doubles = torch::ones({3}, torch::dtype(at::kDouble).requires_grad(true));
  auto slow = torch::ones({3}, at::requires_grad());
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{floats, doubles});
  groups.emplace_back(std::vector{slow}, std::make_unique<torch::optim::AdamWOptions>(1e-4));
  AdamW adamw(groups, torch::optim::AdamWOptions(0.1).weight_decay(0));
  (floats.sum() + doubles.sum() + slow.sum()).backward();
  adamw.step();
  EXPECT_NEAR(floats[0].item<double>(), 0.9, 1e-6);
  EXPECT_NEAR(doubles[0].item<double>(), 0.9, 1e-8);
  EXPECT_NEAR(slow[0].item<double>(), 0.9999, 1e-6);
}

template <typename Optimizer>
void expect_calls_closure() {
  auto w = torch::ones({2, 2}, at::requires_grad());
  Optimizer optimizer({w});
  const torch::NoGradGuard no_grad;
  const auto loss = optimizer.step([&] {
    const auto sum = w.sum();
    sum.backward();
    return sum;
  });
  EXPECT_EQ(loss.template item<float>(), 4);
  EXPECT_TRUE(w.grad().defined());
  EXPECT_NE(w[0][0].template item<float>(), 1);
}

TEST(Optimizers, CallAClosureWithGradients) {
  expect_calls_closure<AdamW>();
  expect_calls_closure<Muon>();
}

TEST(AdamW, RefusesParametersThatItCannotUpdate) {
  const auto refused = [](at::Tensor parameter, const at::Tensor& gradient, const char* why) {
    auto fine = torch::ones({2}, at::requires_grad());
    fine.sum().backward();
    AdamW adamw({fine, parameter});
    parameter.mutable_grad() = gradient;
    EXPECT_THAT([&] { adamw.step(); }, ThrowsMessage<UsageError>(HasSubstr(why)));
    EXPECT_EQ(fine[0].item<float>(), 1);
    EXPECT_TRUE(adamw.state().empty());
  };
  refused(torch::ones({2, 2}, at::requires_grad()), torch::eye(2).to_sparse(),
          "a sparse gradient; use torch::optim::SGD");
  const auto complex = torch::dtype(at::kComplexFloat).requires_grad(true);
  refused(torch::ones({2}, complex), torch::ones({2}, at::kComplexFloat), "make view_as_real");
  const auto sparse_view = torch::ones({4, 4}).slice(1, 0, 2).requires_grad_();
  refused(sparse_view, torch::ones({4, 2}), "is not dense in memory; use torch::optim::AdamW");
}

TEST(Muon, RejectsInvalidOptionsAndParameters) {
  const auto matrix = [] { return torch::ones({2, 2}, at::requires_grad()); };
  const auto rejects = [&](const at::Tensor& parameter, const MuonOptions& options,
                           const char* why) {
    EXPECT_THAT([&] { Muon({parameter}, options); }, ThrowsMessage<UsageError>(HasSubstr(why)));
  };
  rejects(matrix(), MuonOptions(-1), "lr is -1");
  rejects(matrix(), MuonOptions().momentum(-0.5), "momentum is -0.5");
  rejects(matrix(), MuonOptions().weight_decay(-1), "weight_decay is -1");
  rejects(matrix(), MuonOptions().ns_steps(100), "ns_steps is 100; it must be from 0 to 99");
  rejects(matrix(), MuonOptions().adjust_lr_fn("max"), "adjust_lr_fn is 'max'");
  rejects(torch::ones({2}, at::requires_grad()), {}, "Float has 1 dimensions; Muon takes matrices");
  rejects(torch::ones({2, 2}, at::kComplexFloat), {}, "type ComplexFloat");
  Muon muon({matrix()});
  muon.add_param_group(torch::optim::OptimizerParamGroup({torch::ones({3}, at::requires_grad())}));
  EXPECT_THAT([&] { muon.step(); }, ThrowsMessage<UsageError>(HasSubstr("has 1 dimensions")));
  auto sparse = matrix();
  Muon of_sparse({sparse});
  sparse.mutable_grad() = torch::eye(2).to_sparse();
  EXPECT_THAT([&] { of_sparse.step(); }, ThrowsMessage<UsageError>(HasSubstr("is sparse")));
}

}  // namespace
}  // namespace paceline::optim
