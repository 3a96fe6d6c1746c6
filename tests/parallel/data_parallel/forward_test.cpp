#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include <paceline/data_parallel.h>

#include "parallel/data_parallel/nets.h"

namespace paceline {
namespace {

using test::expect_near;
using test::make;
using test::random_batch;
using test::TwoLayers;
using test::TwoLayersImpl;
using testing::ElementsAre;
using testing::IsEmpty;

std::vector<std::int64_t> as_vector(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<std::int64_t>(),
          tensor.const_data_ptr<std::int64_t>() + tensor.numel()};
}

// How many samples each replica gets, by replica.
std::vector<std::int64_t> split(std::int64_t samples, int replicas) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = replicas});
  return as_vector(model.parallel_apply(
      [](TwoLayersImpl&, const at::Tensor& x) { return at::tensor(x.size(0)); },
      random_batch(samples)));
}

// What PyTorch's documentation says of chunk: all chunks but the last have the same size, and there
// may be fewer.
TEST(DataParallelForward, SplitsABatchAsChunkDoes) {
  EXPECT_THAT(split(8, 2), ElementsAre(4, 4));
  EXPECT_THAT(split(10, 4), ElementsAre(3, 3, 3, 1));
  EXPECT_THAT(split(5, 4), ElementsAre(2, 2, 1));
  EXPECT_THAT(split(2, 4), ElementsAre(1, 1));
  EXPECT_THAT(split(1, 2), ElementsAre(1));
  EXPECT_THAT(split(0, 2), ElementsAre(0, 0));
}

TEST(DataParallelForward, ReturnsWhatTheModuleReturnsForTheWholeBatch) {
  for (const int replicas : {1, 2, 3, 8}) {
    for (const std::int64_t samples : {0, 1, 2, 5, 8}) {
      auto net = make<TwoLayers>();
      DataParallel model(net, {.num_replicas = replicas});
      const auto x = random_batch(samples);
      expect_near(model(x), net->forward(x));
      expect_near(model->forward(x), net->forward(x));
    }
  }
}

TEST(DataParallelForward, SplitsAndGathersAlongAnyDimension) {
  auto net = make<TwoLayers>();
  const auto x = random_batch(6).reshape({2, 3, 4});
  for (const std::int64_t dim : {0, 1, -3, -2}) {
    DataParallel model(net, {.dim = dim, .num_replicas = 2});
    expect_near(model(x), net->forward(x));
  }
  DataParallel last(net, {.dim = -1, .num_replicas = 2});
  const auto twice = [](TwoLayersImpl&, const at::Tensor& part) { return part * 2; };
  expect_near(last.parallel_apply(twice, x), x * 2);
}

struct Sample {
  at::Tensor image;
  std::vector<at::Tensor> masks;
  std::string name;
};
void apply_to_tensors(Sample& sample, const TensorVisitor& visitor) {
  visitor(sample.image);
  paceline::apply_to_tensors(sample.masks, visitor);
}

// Multiplies each tensor by the number of samples that its replica has, so that the result shows
// the split.
template <typename T>
T scaled(T value) {
  paceline::apply_to_tensors(value, [](at::Tensor& t) {
    if (t.defined()) t = t * t.size(0);
  });
  return value;
}

template <typename T>
auto apply_scaled(const T& value) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 2});
  return model.parallel_apply([](TwoLayersImpl&, auto& part) { return scaled(part); }, value);
}

TEST(DataParallelForward, SplitsAndGathersNestedValues) {
  const auto x = torch::arange(5, at::kDouble);
  const auto expected = x * torch::tensor({3, 3, 3, 2, 2}, at::kDouble);
  expect_near(apply_scaled(x), expected);
  expect_near(*apply_scaled(std::optional(x)), expected);
  EXPECT_FALSE(apply_scaled(std::optional<at::Tensor>()));
  expect_near(apply_scaled(std::vector{x, x})[1], expected);
  expect_near(apply_scaled(std::array{x, x})[1], expected);
  expect_near(apply_scaled(std::pair(x, x)).second, expected);
  expect_near(std::get<2>(apply_scaled(std::tuple(x, x, x))), expected);
  const std::map<std::string, std::vector<at::Tensor>> map{{"a", {x}}, {"b", {x, x}}};
  expect_near(apply_scaled(map)["b"][1], expected);
  const auto sample = apply_scaled(std::optional(Sample{x, {x, x}, "name"}));
  expect_near(sample->image, expected);
  expect_near(sample->masks[1], expected);
  EXPECT_EQ(sample->name, "name");
  EXPECT_FALSE(apply_scaled(std::pair(x, at::Tensor())).second.defined());
}

TEST(DataParallelForward, SplitsTensorListsAndTemporaries) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 2});
  const auto sizes = [](TwoLayersImpl&, at::TensorList list, std::vector<at::Tensor> vector) {
    return at::tensor(list[1].size(0) * 10 + vector[0].size(0));
  };
  const std::vector<at::Tensor> list{at::ones(5), at::ones(5)};
  EXPECT_THAT(
      as_vector(model.parallel_apply(sizes, at::TensorList(list), std::vector{at::ones(5)})),
      ElementsAre(33, 22));
}

TEST(DataParallelForward, HandsOtherArgumentsToEveryReplica) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 3});
  std::unique_ptr<int> one_only = std::make_unique<int>(4);
  const auto value = [&](TwoLayersImpl&, const std::unique_ptr<int>& pointer,
                         const std::string& text, std::optional<int> number) {
    EXPECT_EQ(&pointer, &one_only);
    return at::tensor(*pointer + static_cast<std::int64_t>(text.size()) + number.value_or(0));
  };
  EXPECT_THAT(as_vector(model.parallel_apply(value, one_only, "four", 2)), ElementsAre(10, 10, 10));
}

struct FromNothingImpl : torch::nn::Cloneable<FromNothingImpl> {
  FromNothingImpl() { reset(); }
  void reset() override { weight = register_parameter("weight", torch::ones(2)); }
  at::Tensor forward() { return weight * 1; }
  at::Tensor forward(std::int64_t times) { return weight * times; }
  at::Tensor weight;
};
TORCH_MODULE(FromNothing);

// As PyTorch does it.
TEST(DataParallelForward, WithoutArgumentsRunsTheFirstReplicaOnly) {
  DataParallel model(FromNothing(), {.num_replicas = 3});
  EXPECT_EQ(model().numel(), 2);
  EXPECT_EQ(model(2).numel(), 6);
  model(2).sum().backward();
  EXPECT_EQ(model.parameters()[0].grad()[0].item<double>(), 6);
}

TEST(DataParallelForward, GathersScalarsIntoAVector) {
  DataParallel model(make<TwoLayers>(), {.dim = 1, .num_replicas = 2});
  const auto x = torch::arange(6, at::kDouble).reshape({2, 3});
  const auto sums =
      model.parallel_apply([](TwoLayersImpl&, const at::Tensor& part) { return part.sum(); }, x);
  expect_near(sums, torch::tensor({0. + 1 + 3 + 4, 2. + 5}, at::kDouble));
}

// As in PyTorch with one device.
TEST(DataParallelForward, LeavesOutputsOfOneReplicaAsTheyAre) {
  const auto net = make<TwoLayers>();
  DataParallel model(net, {.num_replicas = 1});
  const auto x = random_batch(2);
  const auto loss = model.parallel_apply(
      [](TwoLayersImpl& module, const at::Tensor& part) { return module.forward(part).sum(); }, x);
  EXPECT_EQ(loss.dim(), 0);
  loss.backward();
  const auto gradient = model.parameters()[0].grad().clone();
  auto plain = make<TwoLayers>();
  plain->forward(x).sum().backward();
  expect_near(gradient, plain->parameters()[0].grad());
}

TEST(DataParallelForward, RunsFunctionsThatReturnNothing) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 4});
  std::array<std::int64_t, 4> samples{};
  std::atomic<std::size_t> next = 0;
  const auto note = [&](TwoLayersImpl&, const at::Tensor& x) { samples[next++] = x.size(0); };
  model.parallel_apply(note, random_batch(10));
  EXPECT_THAT(samples, testing::UnorderedElementsAre(3, 3, 3, 1));
}

TEST(DataParallelForward, MakesModulesByAFunction) {
  struct Plain : torch::nn::Module {
    torch::nn::Linear layer{register_module("layer", torch::nn::Linear(4, 2))};
    at::Tensor forward(const at::Tensor& x) { return layer(x); }
  };
  int made = 0;
  const auto factory = [&] {
    ++made;
    auto net = std::make_shared<Plain>();
    net->to(at::kDouble);
    return net;
  };
  DataParallel<Plain> model(factory, 3);
  EXPECT_EQ(made, 4);
  DataParallel deduced(factory, {.num_replicas = 2});
  const auto x = random_batch(7);
  expect_near(model(x), model.module()->forward(x));
  expect_near(deduced(x), deduced.module()->forward(x));
}

TEST(DataParallelForward, WrapsASequential) {
  torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::ReLU(), torch::nn::Linear(3, 2));
  net->to(at::kDouble);
  DataParallel model(net, {.num_replicas = 2});
  const auto x = random_batch(5);
  expect_near(model(x), net->forward(x));
}

TEST(DataParallelForward, KeepsNoGraphWithoutGradMode) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 2});
  const torch::NoGradGuard guard;
  EXPECT_FALSE(model(random_batch(4).requires_grad_()).requires_grad());
}

TEST(DataParallelForward, OutputsThatRequireNoGradientStayWithout) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 2});
  const auto both = [](TwoLayersImpl& net, const at::Tensor& x) {
    const auto y = net.forward(x);
    return std::tuple(y.detach(), y, y.argmax(1));
  };
  const auto [detached, y, classes] = model.parallel_apply(both, random_batch(5));
  EXPECT_FALSE(detached.requires_grad());
  EXPECT_TRUE(y.requires_grad());
  EXPECT_TRUE(classes.equal(y.argmax(1)));
}

TEST(DataParallelForward, OffersWhatTheModuleOffers) {
  auto net = make<TwoLayers>();
  DataParallel model(net, {.num_replicas = 2});
  EXPECT_EQ(model.module(), net.ptr());
  EXPECT_EQ(model->named_parameters().keys(), net->named_parameters().keys());
  EXPECT_TRUE(model->parameters()[0].is_same(net->parameters()[0]));
  EXPECT_THAT(model->buffers(), IsEmpty());
  EXPECT_TRUE(model->named_buffers().is_empty());
  model->eval();
  EXPECT_FALSE(net->is_training());
  EXPECT_FALSE(model->is_training());
  model->train();
  EXPECT_TRUE(net->is_training());
  model(random_batch(4)).sum().backward();
  EXPECT_TRUE(net->first->weight.grad().defined());
  model->zero_grad();
  EXPECT_FALSE(net->first->weight.grad().defined());
  DataParallel moved = std::move(model);
  EXPECT_EQ(moved(random_batch(4)).size(0), 4);
}

}  // namespace
}  // namespace paceline
