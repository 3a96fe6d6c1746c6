#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <sstream>
#include <thread>

#include <paceline/data_parallel.h>
#include <paceline/error.h>

#include "parallel/data_parallel/nets.h"

namespace paceline {
namespace {

using test::expect_near;
using test::expect_near_gradients;
using test::make;
using test::random_batch;
using test::TwoLayers;
using test::TwoLayersImpl;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(DataParallelBackward, GivesTheGradientsOfTheWholeBatch) {
  for (const int replicas : {1, 2, 3, 8}) {
    for (const std::int64_t samples : {0, 1, 5, 8}) {
      auto net = make<TwoLayers>();
      const auto x = random_batch(samples).requires_grad_();
      net->forward(x).pow(2).sum().backward();
      auto wrapped = make<TwoLayers>();
      DataParallel model(wrapped, {.num_replicas = replicas});
      const auto part_x = random_batch(samples).requires_grad_();
      model(part_x).pow(2).sum().backward();
      expect_near_gradients(wrapped->parameters(), net->parameters());
      expect_near(part_x.grad(), x.grad());
    }
  }
}

TEST(DataParallelBackward, TrainsAsOneProcessDoes) {
  auto alone = make<TwoLayers>();
  auto wrapped = make<TwoLayers>();
  DataParallel model(wrapped, {.num_replicas = 3});
  const auto options = torch::optim::SGDOptions(0.05).momentum(0.9);
  torch::optim::SGD one(alone->parameters(), options);
  torch::optim::SGD other(model.parameters(), options);
  for (std::uint64_t step = 0; step < 20; ++step) {
    const auto x = random_batch(7, step);
    one.zero_grad();
    other.zero_grad();
    (alone->forward(x) - x.slice(1, 1)).pow(2).mean().backward();
    (model(x) - x.slice(1, 1)).pow(2).mean().backward();
    one.step();
    other.step();
  }
  for (std::size_t i = 0; i < alone->parameters().size(); ++i) {
    expect_near(wrapped->parameters()[i], alone->parameters()[i]);
  }
}

TEST(DataParallelBackward, TakesTheLossWithinReplicas) {
  auto net = make<TwoLayers>();
  const auto x = random_batch(7);
  const auto y = x.slice(1, 1);
  (net->forward(x) - y).pow(2).mean().backward();
  auto wrapped = make<TwoLayers>();
  DataParallel model(wrapped, {.num_replicas = 2});
  const auto losses = model.parallel_apply(
      [](TwoLayersImpl& replica, const at::Tensor& input, const at::Tensor& target) {
        return (replica.forward(input) - target).pow(2).sum();
      },
      x, y);
  EXPECT_EQ(losses.numel(), 2);
  (losses.sum() / y.numel()).backward();
  expect_near_gradients(wrapped->parameters(), net->parameters());
}

struct PartlyUsedImpl : torch::nn::Cloneable<PartlyUsedImpl> {
  PartlyUsedImpl() { reset(); }
  void reset() override {
    used = register_module("used", torch::nn::Linear(4, 2));
    sometimes = register_module("sometimes", torch::nn::Linear(4, 2));
    unused = register_module("unused", torch::nn::Linear(4, 2));
  }
  // Only the replica with the first sample, whose first feature is the largest, uses both.
  at::Tensor forward(const at::Tensor& x) {
    const bool has_largest = x.select(1, 0).max().item<double>() > 100;
    return has_largest ? used(x) + sometimes(x) : used(x);
  }
  torch::nn::Linear used{nullptr};
  torch::nn::Linear sometimes{nullptr};
  torch::nn::Linear unused{nullptr};
};
TORCH_MODULE(PartlyUsed);

TEST(DataParallelBackward, UnusedParametersGetNoGradient) {
  auto net = make<PartlyUsed>();
  DataParallel model(net, {.num_replicas = 2});
  auto x = random_batch(4);
  x[0][0] = 1000;
  model(x).sum().backward();
  EXPECT_FALSE(net->unused->weight.grad().defined());
  expect_near(net->used->weight.grad()[0], x.sum(0));
  expect_near(net->sometimes->weight.grad()[0], x.slice(0, 0, 2).sum(0));
}

// Whether the first weight requires a gradient in all replicas.
bool trains_first_weight(DataParallel<TwoLayersImpl>& model) {
  const auto sees = [](TwoLayersImpl& replica, const at::Tensor&) {
    return torch::tensor(replica.first->weight.requires_grad());
  };
  const auto all = model.parallel_apply(sees, random_batch(4));
  EXPECT_TRUE(all.equal(all[0].expand_as(all)));
  return all[0].item<bool>();
}

TEST(DataParallelBackward, FrozenParametersGetNoGradient) {
  auto net = make<TwoLayers>();
  net->first->weight.set_requires_grad(false);
  DataParallel model(net, {.num_replicas = 2});
  EXPECT_FALSE(trains_first_weight(model));
  model(random_batch(4)).sum().backward();
  EXPECT_FALSE(net->first->weight.grad().defined());
  EXPECT_TRUE(net->first->bias.grad().defined());
  net->zero_grad();
  net->first->weight.set_requires_grad(true);
  net->first->bias.set_requires_grad(false);
  EXPECT_TRUE(trains_first_weight(model));
  model(random_batch(4)).sum().backward();
  EXPECT_TRUE(net->first->weight.grad().defined());
  EXPECT_FALSE(net->first->bias.grad().defined());
  for (const auto& parameter : net->parameters()) parameter.set_requires_grad(false);
  EXPECT_FALSE(model(random_batch(4)).requires_grad());
}

TEST(DataParallelBackward, AParameterMayBeFrozenBeforeAPendingBackward) {
  auto net = make<TwoLayers>();
  DataParallel model(net, {.num_replicas = 2});
  const auto y = model(random_batch(4));
  net->first->weight.set_requires_grad(false);
  model(random_batch(4));
  y.sum().backward();
  EXPECT_FALSE(net->first->weight.grad().defined());
  EXPECT_TRUE(net->first->bias.grad().defined());
}

struct TiedImpl : torch::nn::Cloneable<TiedImpl> {
  TiedImpl() { reset(); }
  void reset() override {
    layer = register_module("layer", torch::nn::Linear(4, 4));
    again = register_module("again", layer);
    weight = register_parameter("weight", layer->weight);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(layer(x)).mm(weight) + again(x); }
  torch::nn::Linear layer{nullptr};
  torch::nn::Linear again{nullptr};
  at::Tensor weight;
};
TORCH_MODULE(Tied);

// clone() loses the tie between `weight` and layer->weight; the function that makes modules has it.
TEST(DataParallelBackward, ParametersWithSeveralNamesGetOneGradient) {
  const auto x = random_batch(5);
  auto alone = make<Tied>();
  alone->forward(x).pow(2).sum().backward();
  const auto check = [&](DataParallel<TiedImpl> model) {
    EXPECT_TRUE(model.module()->weight.is_same(model.module()->layer->weight));
    model(x).pow(2).sum().backward();
    expect_near_gradients(model.parameters(), alone->parameters());
  };
  check(DataParallel(make<Tied>(), {.num_replicas = 2}));
  check(DataParallel([] { return make<Tied>().ptr(); }, 2));
}

TEST(DataParallelBackward, RunsFromAnyOfSeveralOutputs) {
  const auto halves = [](TwoLayersImpl& net, const at::Tensor& x) {
    const auto y = net.forward(x);
    return std::pair(y.select(1, 0) * 1, y.pow(2).sum());
  };
  for (const bool first : {true, false}) {
    auto net = make<TwoLayers>();
    const auto x = random_batch(5);
    (first ? net->forward(x).select(1, 0).sum() : net->forward(x).pow(2).sum()).backward();
    auto wrapped = make<TwoLayers>();
    DataParallel model(wrapped, {.num_replicas = 2});
    const auto [half, square] = model.parallel_apply(halves, x);
    (first ? half.sum() : square.sum()).backward();
    expect_near_gradients(wrapped->parameters(), net->parameters());
  }
}

TEST(DataParallelBackward, ParametersOfOtherOutputsGetNoGradient) {
  auto net = make<TwoLayers>();
  DataParallel model(net, {.num_replicas = 2});
  const auto heads = [](TwoLayersImpl& replica, const at::Tensor& x) {
    return std::pair(replica.first(x), replica.last(at::cat({x, x.slice(1, 0, 1)}, 1)));
  };
  model.parallel_apply(heads, random_batch(4)).second.sum().backward();
  EXPECT_FALSE(net->first->weight.grad().defined());
  EXPECT_TRUE(net->last->weight.grad().defined());
}

TEST(DataParallelBackward, KeepsTheGraphIfAsked) {
  auto net = make<TwoLayers>();
  DataParallel model(net, {.num_replicas = 2});
  const auto loss = model(random_batch(5)).pow(2).sum();
  loss.backward({}, true);
  const auto once = net->first->weight.grad().clone();
  loss.backward();
  expect_near(net->first->weight.grad(), once * 2);
  EXPECT_THAT([&] { loss.backward(); }, ThrowsMessage<std::exception>(HasSubstr("second time")));
}

TEST(DataParallelBackward, ASecondBackwardWithoutTheGraphIsAnError) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 2});
  const auto y = model(random_batch(5));
  y.sum().backward();
  EXPECT_THAT([&] { y.sum().backward(); }, ThrowsMessage<UsageError>(HasSubstr("retain_graph")));
}

TEST(DataParallelBackward, RefusesCreateGraph) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 2});
  const auto x = random_batch(5).requires_grad_();
  const auto loss = model(x).pow(2).sum();
  EXPECT_THAT([&] { torch::autograd::grad({loss}, {x}, {}, true, true); },
              ThrowsMessage<UsageError>(HasSubstr("create_graph")));
}

TEST(DataParallelBackward, FollowsTwoForwards) {
  auto net = make<TwoLayers>();
  (net->forward(random_batch(5, 1)).sum() * net->forward(random_batch(6, 2)).sum()).backward();
  auto wrapped = make<TwoLayers>();
  DataParallel model(wrapped, {.num_replicas = 2});
  const auto one = model(random_batch(5, 1)).sum();
  const auto other = model(random_batch(6, 2)).sum();
  (one * other).backward();
  expect_near_gradients(wrapped->parameters(), net->parameters());
}

TEST(DataParallelBackward, HooksSeeTheSumOfTheReplicas) {
  auto net = make<TwoLayers>();
  DataParallel model(net, {.num_replicas = 3});
  std::vector<at::Tensor> seen;
  net->first->weight.register_hook([&](const at::Tensor& gradient) {
    seen.push_back(gradient.clone());
    return gradient;
  });
  model(random_batch(6)).sum().backward();
  ASSERT_EQ(seen.size(), 1);
  expect_near(seen[0], net->first->weight.grad());
}

TEST(DataParallelBackward, GivesGradientsOfInputsAlone) {
  auto net = make<TwoLayers>();
  DataParallel model(net, {.num_replicas = 2});
  const auto x = random_batch(5).requires_grad_();
  const auto got = torch::autograd::grad({model(x).pow(2).sum()}, {x})[0];
  expect_near(got, torch::autograd::grad({net->forward(x).pow(2).sum()}, {x})[0]);
  EXPECT_FALSE(net->first->weight.grad().defined());
}

TEST(DataParallelBackward, TakesInputsThatOneReplicaDoesNotUse) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 2});
  const auto x = random_batch(4).requires_grad_();
  const auto use_first = [](TwoLayersImpl&, const at::Tensor& part, const at::Tensor& use) {
    return use.all().item<bool>() ? part * 3 : part.detach();
  };
  model.parallel_apply(use_first, x, torch::tensor({true, true, false, false})).sum().backward();
  expect_near(x.grad(), torch::tensor({3., 3., 0., 0.}, at::kDouble).unsqueeze(1).expand({4, 4}));
}

TEST(DataParallelBackward, TakesOutputsThatAreParametersOrInputs) {
  auto net = make<TwoLayers>();
  DataParallel model(net, {.num_replicas = 2});
  const auto x = random_batch(4).requires_grad_();
  const auto [weight, same] = model.parallel_apply(
      [](TwoLayersImpl& replica, const at::Tensor& part) {
        return std::pair(replica.last->bias, part);
      },
      x);
  expect_near(weight, at::cat({net->last->bias, net->last->bias}));
  (weight.sum() + same.sum()).backward();
  expect_near(net->last->bias.grad(), torch::full(3, 2, at::kDouble));
  expect_near(x.grad(), torch::ones_like(x));
}

struct SparseImpl : torch::nn::Cloneable<SparseImpl> {
  SparseImpl() { reset(); }
  void reset() override {
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true)));
  }
  at::Tensor forward(const at::Tensor& words) { return table(words).pow(2).sum(1); }
  torch::nn::Embedding table{nullptr};
};
TORCH_MODULE(Sparse);

TEST(DataParallelBackward, AddsSparseGradients) {
  auto net = make<Sparse>();
  DataParallel model(net, {.num_replicas = 2});
  const auto words = torch::tensor({1, 4, 4, 9});
  model(words).sum().backward();
  ASSERT_TRUE(net->table->weight.grad().is_sparse());
  auto expected = torch::zeros({10, 3}, at::kDouble);
  expected.index_add_(0, words, 2 * net->table->weight.detach().index_select(0, words));
  expect_near(net->table->weight.grad().to_dense(), expected);
}

// As for a module in one process.
TEST(DataParallelBackward, NoticesParametersThatChangedAfterTheForward) {
  auto net = make<TwoLayers>();
  DataParallel model(net, {.num_replicas = 2});
  const auto loss = model(random_batch(4)).pow(2).sum();
  {
    const torch::NoGradGuard guard;
    net->last->weight.add_(1);
  }
  EXPECT_THAT([&] { loss.backward(); },
              ThrowsMessage<Error>(HasSubstr("modified by an inplace operation")));
}

TEST(DataParallelBackward, NoticesInputsThatChangedAfterTheForward) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 2});
  const auto x = random_batch(4);
  const auto loss = model(x).pow(2).sum();
  x.add_(1);
  EXPECT_THAT([&] { loss.backward(); },
              ThrowsMessage<Error>(HasSubstr("modified by an inplace operation")));
}

TEST(DataParallelBackward, FollowsAModuleThatChangedItsMemory) {
  auto net = make<TwoLayers>();
  DataParallel model(net, {.num_replicas = 2});
  const auto check = [&](const at::Tensor& x) {
    net->zero_grad();
    const auto y = model(x);
    EXPECT_EQ(y.scalar_type(), x.scalar_type());
    EXPECT_TRUE(torch::allclose(y, net->forward(x)));
    y.sum().backward();
    const auto got = net->first->weight.grad().clone();
    net->zero_grad();
    net->forward(x).sum().backward();
    EXPECT_TRUE(torch::allclose(got, net->first->weight.grad()));
  };
  check(random_batch(4));
  for (const auto& parameter : net->parameters()) parameter.set_data(parameter.detach() * 2);
  check(random_batch(4));
  net->zero_grad();
  net->to(at::kFloat);
  check(random_batch(4).to(at::kFloat));
  std::stringstream saved;
  torch::save(net, saved);
  auto loaded = net;
  torch::load(loaded, saved);
  check(random_batch(4).to(at::kFloat));
}

TEST(DataParallelBackward, RunsAfterTheWrapperIsGone) {
  auto net = make<TwoLayers>();
  at::Tensor loss;
  {
    DataParallel model(net, {.num_replicas = 2});
    loss = model(random_batch(4)).sum();
  }
  loss.backward();
  EXPECT_TRUE(net->first->weight.grad().defined());
}

// Keeps watch over a tensor that only the graph of a replica holds.
struct WatchedImpl : torch::nn::Cloneable<WatchedImpl> {
  WatchedImpl() { reset(); }
  void reset() override { layer = register_module("layer", torch::nn::Linear(4, 4)); }
  at::Tensor forward(const at::Tensor& x) {
    const auto saved = torch::tanh(layer(x));
    const std::scoped_lock lock(*mutex);
    watched->emplace_back(saved.getIntrusivePtr());
    return saved.pow(2) * 2;
  }
  std::size_t alive() const {
    return static_cast<std::size_t>(
        std::ranges::count_if(*watched, [](const auto& one) { return !one.expired(); }));
  }
  torch::nn::Linear layer{nullptr};
  std::shared_ptr<std::mutex> mutex = std::make_shared<std::mutex>();
  std::shared_ptr<std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>>> watched =
      std::make_shared<std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>>>();
};
TORCH_MODULE(Watched);

TEST(DataParallelBackward, FreesTheGraphsOfTheReplicas) {
  auto net = make<Watched>();
  DataParallel model(net, {.num_replicas = 2});
  {
    const torch::NoGradGuard guard;
    const auto y = model(random_batch(4));
    EXPECT_EQ(net->alive(), 0);
  }
  auto y = model(random_batch(4));
  EXPECT_EQ(net->alive(), 2);
  y.sum().backward();
  EXPECT_EQ(net->alive(), 0);
  auto dropped = model(random_batch(4));
  EXPECT_EQ(net->alive(), 2);
  dropped.reset();
  EXPECT_EQ(net->alive(), 0);
}

// Notes whether its thread destroys it.
struct ThreadNote : torch::CustomClassHolder {
  explicit ThreadNote(std::atomic<int>& elsewhere_count) : elsewhere(elsewhere_count) {}
  ~ThreadNote() override {
    if (std::this_thread::get_id() != made_on) ++elsewhere;
  }
  std::atomic<int>& elsewhere;
  std::thread::id made_on = std::this_thread::get_id();
};

struct Noted : torch::autograd::Function<Noted> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& y,
                            std::atomic<int>* elsewhere) {
    context->saved_data["note"] =
        at::IValue::make_capsule(c10::make_intrusive<ThreadNote>(*elsewhere));
    return y * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0], {}};
  }
};

TEST(DataParallelBackward, FreesEachGraphOnTheThreadOfItsReplica) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 3});
  std::atomic<int> elsewhere = 0;
  const auto noted = [&](TwoLayersImpl& replica, const at::Tensor& x) {
    return Noted::apply(replica.forward(x), &elsewhere);
  };
  model.parallel_apply(noted, random_batch(6)).sum().backward();
  EXPECT_EQ(elsewhere, 0);
}

TEST(DataParallelBackward, GivesTheSameBitsInEveryRun) {
  const auto run = [] {
    torch::manual_seed(3);
    torch::nn::Sequential net(torch::nn::Linear(64, 64), torch::nn::ReLU(),
                              torch::nn::Linear(64, 64));
    DataParallel model(net, {.num_replicas = 4});
    torch::optim::SGD sgd(model.parameters(), 0.01);
    for (int step = 0; step < 10; ++step) {
      sgd.zero_grad();
      model(torch::randn({37, 64})).pow(2).mean().backward();
      sgd.step();
    }
    return net->parameters();
  };
  const auto once = run();
  const auto again = run();
  for (std::size_t i = 0; i < once.size(); ++i) EXPECT_TRUE(once[i].equal(again[i]));
}

}  // namespace
}  // namespace paceline
