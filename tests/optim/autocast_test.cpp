#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <optional>
#include <stdexcept>
#include <thread>

#include <paceline/autocast.h>
#include <paceline/error.h>

namespace paceline {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

at::ScalarType type_of_product() {
  return torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type();
}

int nesting() {
  at::autocast::increment_nesting();
  return at::autocast::decrement_nesting();
}

TEST(Autocast, ComputesProductsIn16Bits) {
  {
    const autocast guard(at::kCPU);
    EXPECT_EQ(type_of_product(), at::kBFloat16);
    EXPECT_EQ(nesting(), 1);
    EXPECT_EQ(torch::mse_loss(torch::ones({2}, at::kBFloat16), torch::ones({2})).scalar_type(),
              at::kFloat);
  }
  EXPECT_EQ(type_of_product(), at::kFloat);
  const autocast guard(at::kCPU, {.dtype = at::kHalf});
  EXPECT_EQ(type_of_product(), at::kHalf);
}

TEST(Autocast, NestsAndRestores) {
  const autocast outer(at::kCPU, {.dtype = at::kHalf, .cache_enabled = false});
  {
    const autocast off(at::kCPU, {.enabled = false});
    EXPECT_EQ(type_of_product(), at::kFloat);
    EXPECT_EQ(nesting(), 2);
    const autocast inner(at::kCPU, {.cache_enabled = true});  // the type around it
    EXPECT_EQ(type_of_product(), at::kHalf);
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    EXPECT_EQ(nesting(), 3);
  }
  EXPECT_EQ(type_of_product(), at::kHalf);
  EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
  EXPECT_EQ(nesting(), 1);
}

TEST(Autocast, RestoresAfterAnException) {
  try {
    const autocast guard(at::kCPU, {.dtype = at::kHalf, .cache_enabled = false});
    throw std::runtime_error("no");
  } catch (const std::runtime_error&) {
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kBFloat16);
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    EXPECT_EQ(nesting(), 0);
  }
}

// Whether a forward in the scope uses the converted weight of an earlier one.
bool converts_once(const std::optional<bool>& cache_enabled, bool leave_between) {
  const auto weight = torch::ones({2, 2}, at::requires_grad());
  const auto x = torch::ones({2, 2});
  std::optional<autocast> guard;
  guard.emplace(at::kCPU, AutocastOptions{.cache_enabled = cache_enabled});
  torch::mm(x, weight);
  if (leave_between) {
    guard.reset();
    guard.emplace(at::kCPU);
  }
  // The cached copy does not see a change of the weight.
  weight.data().fill_(3);
  return torch::mm(x, weight)[0][0].item<float>() == 2;
}

TEST(Autocast, CachesConvertedWeightsUntilTheOutermostScopeEnds) {
  EXPECT_TRUE(converts_once(std::nullopt, false));
  EXPECT_FALSE(converts_once(false, false));
  EXPECT_FALSE(converts_once(std::nullopt, true));
  const autocast outer(at::kCPU);
  EXPECT_TRUE(converts_once(std::nullopt, true));
}

TEST(Autocast, IsOfOneThread) {
  const autocast guard(at::kCPU);
  std::thread([] { EXPECT_EQ(type_of_product(), at::kFloat); }).join();
}

TEST(Autocast, TrainsParametersInFloat) {
  torch::nn::Linear net(3, 2);
  at::Tensor loss;
  {
    const autocast guard(at::kCPU);
    const auto y = net(torch::ones({4, 3}));
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    loss = y.pow(2).mean();
  }
  loss.backward();
  EXPECT_EQ(net->weight.grad().scalar_type(), at::kFloat);
}

TEST(Autocast, RejectsOtherTypesAndDevices) {
  EXPECT_THAT([] { const autocast guard(at::kCPU, {.dtype = at::kDouble}); },
              ThrowsMessage<UsageError>(HasSubstr("dtype is Double; it must be at::kBFloat16")));
  EXPECT_THAT([] { const autocast guard(at::kMeta); },
              ThrowsMessage<UsageError>(HasSubstr("none for the device type meta; use at::kCPU")));
  EXPECT_EQ(nesting(), 0);
  const autocast off(at::kCPU, {.dtype = at::kDouble, .enabled = false});
}

}  // namespace
}  // namespace paceline
