#include <gmock/gmock.h>
#include <torch/torch.h>

#include <limits>
#include <vector>

#include <paceline/error.h>
#include <paceline/grad_scaler.h>

namespace paceline {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Expected values come from torch.amp.GradScaler("cpu") with the same gradients.
TEST(GradScaler, DoesAsPythonDoes) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  struct Step {
    std::vector<float> gradient;
    std::vector<float> parameter;
    double scale;
    std::int64_t growth;
  };
  const std::vector<Step> steps{
      {{1, 2}, {0.9F, 1.8F}, 4, 1},         {{kInfinity, 1}, {0.9F, 1.8F}, 1, 0},
      {{kNan, 1}, {0.9F, 1.8F}, 0.25, 0},   {{3, 4}, {0.6F, 1.4F}, 0.25, 1},
      {{0.5F, -1}, {0.55F, 1.5F}, 0.75, 0}, {{2, 2}, {0.35F, 1.3F}, 0.75, 1}};
  const auto w = torch::tensor({1.0F, 2.0F}).requires_grad_();
  torch::optim::SGD sgd({w}, 0.1);
  GradScaler scaler(
      {.init_scale = 4, .growth_factor = 3, .backoff_factor = 0.25, .growth_interval = 2});
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (i == 3) {  // resumed
      GradScaler other;
      other.load_state_dict(scaler.state_dict());
      scaler = std::move(other);
    }
    const Step& step = steps[i];
    sgd.zero_grad();
    scaler.scale((w * torch::tensor(step.gradient)).sum()).backward();
    if (i % 2 == 0) scaler.unscale_(sgd);
    EXPECT_EQ(scaler.step(sgd), i != 1 && i != 2);
    scaler.update();
    EXPECT_THAT(std::vector<float>(w.data_ptr<float>(), w.data_ptr<float>() + 2),
                ElementsAre(FloatEq(step.parameter[0]), FloatEq(step.parameter[1])));
    EXPECT_EQ(scaler.get_scale(), step.scale);
    EXPECT_EQ(scaler.state_dict().toGenericDict().at("_growth_tracker").toInt(), step.growth);
  }
}

TEST(GradScaler, DoesNothingIfItIsNotEnabled) {
  const auto w = torch::ones({1}).requires_grad_();
  torch::optim::SGD sgd({w}, 1);
  GradScaler scaler({.enabled = false});
  scaler.scale(w.sum()).backward();
  scaler.unscale_(sgd);
  EXPECT_TRUE(scaler.step(sgd));
  scaler.update();
  EXPECT_EQ(w.item<float>(), 0);
  EXPECT_EQ(scaler.get_scale(), 1);
}

TEST(GradScaler, RefusesCallsOutOfOrder) {
  const auto w = torch::ones({1}).requires_grad_();
  const auto half = torch::ones({1}, torch::kHalf).requires_grad_();
  torch::optim::SGD sgd({w}, 1);
  GradScaler scaler;
  const auto refused = [](auto&& call, const char* why) {
    EXPECT_THAT(call, ThrowsMessage<UsageError>(HasSubstr(why)));
  };
  refused([&] { scaler.step(sgd); }, "call scale() before");
  refused([&] { scaler.update(); }, "without a step()");
  static_cast<void>(scaler.scale(w.sum()));
  refused([&] { scaler.step(sgd); }, "have no gradient");
  refused([&] { scaler.update(); }, "without a step()");
  scaler.scale(w.sum()).backward();
  scaler.unscale_(sgd);
  refused([&] { scaler.unscale_(sgd); }, "unscaled already");
  scaler.step(sgd);
  refused([&] { scaler.step(sgd); }, "twice");
  scaler.update();
  half.mutable_grad() = torch::ones({1}, torch::kHalf);
  torch::optim::SGD of_half({half}, 1);
  refused([&] { scaler.unscale_(of_half); }, "float16");
}

TEST(GradScaler, RefusesStatesOutOfRange) {
  GradScaler scaler;
  const auto state = scaler.state_dict().toGenericDict();
  for (const std::int64_t tracker : {std::int64_t{-5}, std::int64_t{1} << 40}) {
    const auto odd = state.copy();
    odd.insert_or_assign("_growth_tracker", tracker);
    EXPECT_THAT([&] { scaler.load_state_dict(odd); },
                ThrowsMessage<Error>(HasSubstr("'_growth_tracker' is")));
  }
  scaler.load_state_dict(state);
  EXPECT_EQ(scaler.scale(torch::ones({})).item<float>(), 65536);
}

TEST(GradScaler, RefusesOptionsOutOfRange) {
  const auto refused = [](const GradScalerOptions& options, const char* name) {
    EXPECT_THAT([&] { GradScaler scaler(options); }, ThrowsMessage<UsageError>(HasSubstr(name)));
  };
  refused({.init_scale = 0}, "init_scale");
  refused({.init_scale = 1e300}, "init_scale");
  refused({.init_scale = 1e-50}, "init_scale");
  refused({.growth_factor = 1}, "growth_factor");
  refused({.backoff_factor = 1}, "backoff_factor");
  refused({.growth_interval = 0}, "growth_interval");
}

}  // namespace
}  // namespace paceline
