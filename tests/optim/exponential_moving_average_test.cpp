#include <gmock/gmock.h>
#include <torch/torch.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.h>
#include <paceline/exponential_moving_average.h>

#include "optim/patterns.h"

namespace paceline::optim {
namespace {

using test::pattern;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct ExpectedAverage {
  bool use_buffers;
  std::string name;
  std::vector<double> values;
};

const std::vector<ExpectedAverage> kExpectedAverages{
#include "exponential_moving_average_expected.inc"
};

torch::nn::Sequential make_net() {
  return torch::nn::Sequential(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
}

void set_values(torch::nn::Sequential net, int step) {
  auto tensors = net->parameters();
  const auto buffers = net->buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].copy_(
        pattern(tensors[i].numel(), 13, 7 * step + static_cast<int>(i), 31, 8).view_as(tensors[i]));
  }
}

TEST(ExponentialMovingAverage, IsPythonsAveragedModel) {
  for (const bool use_buffers : {false, true}) {
    const auto net = make_net();
    ExponentialMovingAverage average(net, {.decay = 0.75, .use_buffers = use_buffers});
    for (int step = 0; step < 5; ++step) {
      set_values(net, step);
      average.update();
    }
    EXPECT_EQ(average.n_averaged(), 5);
    const auto averages = average.averages();
    std::size_t compared = 0;
    for (const ExpectedAverage& expected : kExpectedAverages) {
      if (expected.use_buffers != use_buffers) continue;
      const auto got = averages[expected.name].flatten().to(at::kDouble);
      EXPECT_TRUE(torch::equal(got, torch::tensor(expected.values, at::kDouble)))
          << expected.name << " " << got;
      ++compared;
    }
    EXPECT_EQ(compared, averages.size());
  }
}

TEST(ExponentialMovingAverage, IsAppliedWithinAScope) {
  const auto net = make_net();
  ExponentialMovingAverage average(net, {.decay = 0.5});
  set_values(net, 0);
  average.update();
  set_values(net, 1);
  average.update();
  const auto weight = net->parameters()[0];
  const auto own = weight.detach().clone();
  const auto averaged = average.averages()["0.weight"].clone();
  ASSERT_FALSE(torch::equal(own, averaged));
  const void* address = weight.data_ptr();
  try {
    const auto applied = average.apply();
    EXPECT_TRUE(torch::equal(weight, averaged));
    EXPECT_EQ(weight.data_ptr(), address);
    EXPECT_TRUE(weight.requires_grad());
    EXPECT_THAT([&] { average.update(); },
                ThrowsMessage<UsageError>(HasSubstr("update while the averages are applied")));
    EXPECT_THAT([&] { const auto twice = average.apply(); },
                ThrowsMessage<UsageError>(HasSubstr("are applied already")));
    throw std::runtime_error("evaluation");
  } catch (const std::runtime_error&) {
    EXPECT_TRUE(torch::equal(weight, own));
  }
  EXPECT_TRUE(torch::equal(average.averages()["0.weight"], averaged));
  average.update();
}

TEST(ExponentialMovingAverage, IsRestoredAfterItEnded) {
  const auto net = make_net();
  std::optional<ExponentialMovingAverage> average(net);
  set_values(net, 3);
  const auto own = net->parameters()[0].detach().clone();
  {
    const auto applied = average->apply();
    average.reset();
    EXPECT_FALSE(torch::equal(net->parameters()[0], own));
  }
  EXPECT_TRUE(torch::equal(net->parameters()[0], own));
}

TEST(ExponentialMovingAverage, SkipsATensorThatChangedItsShapeMeanwhile) {
  auto first = torch::zeros({2});
  auto second = torch::ones({2});
  ExponentialMovingAverage average({{"first", first}, {"second", second}});
  second.fill_(4);
  {
    const auto applied = average.apply();
    EXPECT_EQ(second[0].item<float>(), 1);
    first.set_data(torch::zeros({3}));
  }
  EXPECT_EQ(second[0].item<float>(), 4);
}

TEST(ExponentialMovingAverage, TakesATensorWithTwoNamesOnce) {
  const auto shared = torch::zeros({2});
  ExponentialMovingAverage average({{"a", shared}, {"b", shared}}, {.decay = 0.5});
  average.update();
  shared.fill_(8);
  average.update();
  EXPECT_EQ(average.averages()["a"][0].item<float>(), 4);
  EXPECT_EQ(average.averages()["b"][0].item<float>(), 4);
  {
    const auto applied = average.apply();
    EXPECT_EQ(shared[0].item<float>(), 4);
  }
  EXPECT_EQ(shared[0].item<float>(), 8);
}

TEST(ExponentialMovingAverage, AveragesIntegersAsPythonDoes) {
  const auto count = torch::full({1}, 10, at::kLong);
  ExponentialMovingAverage average({{"count", count}}, {.decay = 0.75});
  average.update();
  count.fill_(13);
  average.update();
  EXPECT_EQ(average.averages()["count"].item<std::int64_t>(), 10);  // 10.75
}

TEST(ExponentialMovingAverage, GoesOnFromItsStateAfterAnyUpdate) {
  for (int interrupted = 0; interrupted < 4; ++interrupted) {
    const auto net = make_net();
    ExponentialMovingAverage average(net, {.decay = 0.75});
    ExponentialMovingAverage resumed(make_net());
    const auto other = make_net();
    for (int step = 0; step < 4; ++step) {
      if (step == interrupted) {
        resumed = ExponentialMovingAverage(other, {.decay = 0.75});
        resumed.load_state_dict(average.state_dict());
      }
      set_values(net, step);
      set_values(other, step);
      average.update();
      if (step >= interrupted) resumed.update();
    }
    EXPECT_EQ(resumed.n_averaged(), 4);
    for (const auto& one : average.averages()) {
      EXPECT_TRUE(torch::equal(resumed.averages()[one.key()], one.value())) << one.key();
    }
  }
}

TEST(ExponentialMovingAverage, StateThatDoesNotFitIsRefusedAndChangesNothing) {
  const auto net = make_net();
  ExponentialMovingAverage average(net);
  average.update();
  const auto before = average.averages()["0.weight"].clone();
  const auto state = [&] { return average.state_dict().toGenericDict().copy(); };
  const auto refused = [&](const at::IValue& value, const char* why) {
    EXPECT_THAT([&] { average.load_state_dict(value); }, ThrowsMessage<Error>(HasSubstr(why)));
    EXPECT_EQ(average.n_averaged(), 1);
    EXPECT_TRUE(torch::equal(average.averages()["0.weight"], before));
  };
  refused({}, "the state is a None and not a dict");
  auto other = state();
  other.insert_or_assign("module.0.weight", torch::ones({2, 3}));
  other.insert_or_assign("module.0.bias", torch::ones({3}));
  refused(other, "'module.0.bias' must be a dense tensor with the shape of the model's");
  other = state();
  std::ignore = other.erase("module.0.bias");
  refused(other, "the state has no 'module.0.bias'; it has: n_averaged");
  other = state();
  other.insert("module.2.bias", torch::ones({3}));
  refused(other, "it has 9 names, and this model with n_averaged 8");
  other = state();
  other.insert_or_assign("n_averaged", -1);
  refused(other, "'n_averaged' is -1");
}

TEST(ExponentialMovingAverage, RejectsInvalidOptions) {
  EXPECT_THAT([] { ExponentialMovingAverage(make_net(), {.decay = 1.5}); },
              ThrowsMessage<UsageError>(HasSubstr("decay is 1.5; it must be in [0, 1]")));
  EXPECT_THAT(
      [] {
        ExponentialMovingAverage({{"x", torch::eye(2).to_sparse()}});
      },
      ThrowsMessage<UsageError>(HasSubstr("'x' is not dense")));
}

}  // namespace
}  // namespace paceline::optim
