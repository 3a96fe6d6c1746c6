#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>

#include <paceline/data_parallel.h>
#include <paceline/error.h>

#include "parallel/data_parallel/nets.h"

namespace paceline {
namespace {

using test::expect_near;
using test::expect_near_gradients;
using test::make;
using test::random_batch;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

struct NormedImpl : torch::nn::Cloneable<NormedImpl> {
  NormedImpl() { reset(); }
  void reset() override {
    layer = register_module("layer", torch::nn::Linear(4, 3));
    norm = register_module("norm", torch::nn::BatchNorm1d(3));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(layer(x)); }
  torch::nn::Linear layer{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Normed);

// As in PyTorch: the statistics of the other chunks are lost.
TEST(DataParallelReplicas, BuffersAreThoseOfTheFirstChunk) {
  auto alone = make<Normed>();
  auto wrapped = make<Normed>();
  DataParallel model(wrapped, {.num_replicas = 3});
  for (std::uint64_t step = 0; step < 3; ++step) {
    const auto chunks = random_batch(9, step).chunk(3);
    std::vector<at::Tensor> expected;
    for (std::size_t i = 1; i < 3; ++i) {
      // A copy, since only the first chunk may change the buffers.
      expected.push_back(std::dynamic_pointer_cast<NormedImpl>(alone->clone())->forward(chunks[i]));
    }
    expected.insert(expected.begin(), alone->forward(chunks[0]));
    expect_near(model(random_batch(9, step)), at::cat(expected));
    for (std::size_t i = 0; i < alone->buffers().size(); ++i) {
      EXPECT_TRUE(wrapped->buffers()[i].equal(alone->buffers()[i]));
    }
  }
}

TEST(DataParallelReplicas, EvaluatesWithTheModulesBuffersAndModes) {
  auto net = make<Normed>();
  DataParallel model(net, {.num_replicas = 2});
  model(random_batch(8));
  model.eval();
  const auto x = random_batch(5, 2);
  expect_near(model(x), net->forward(x));
  model.train();
  net->norm->eval();  // one submodule only
  expect_near(model(x), net->forward(x));
  net->norm->running_mean.add_(1);
  expect_near(model(x), net->forward(x));
}

TEST(DataParallelReplicas, TwoForwardsMayComeBeforeABackwardOfBatchNorm) {
  auto net = make<Normed>();
  DataParallel model(net, {.num_replicas = 2});
  const auto one = model(random_batch(6, 1)).pow(3).sum();
  const auto other = model(random_batch(6, 2)).pow(3).sum();
  (one + other).backward();
  auto alone = make<Normed>();
  for (const auto seed : {1, 2}) {
    for (const auto& part : random_batch(6, static_cast<std::uint64_t>(seed)).chunk(2)) {
      alone->forward(part).pow(3).sum().backward();
    }
  }
  expect_near_gradients(net->parameters(), alone->parameters());
}

TEST(DataParallelReplicas, StayFitForTrainingAfterInferenceMode) {
  auto net = make<Normed>();
  const auto construct = [&] {
    const c10::InferenceMode guard;
    return DataParallel(net, {.num_replicas = 2});
  };
  auto model = construct();
  model(random_batch(4)).sum().backward();
  net->zero_grad();
  net->to(at::kFloat);
  {
    const c10::InferenceMode guard;
    model(random_batch(4).to(at::kFloat));  // the first with the new memory
  }
  model(random_batch(4).to(at::kFloat)).sum().backward();
  EXPECT_EQ(net->layer->weight.grad().scalar_type(), at::kFloat);
}

struct CounterImpl : torch::nn::Cloneable<CounterImpl> {
  CounterImpl() { reset(); }
  void reset() override { count = register_buffer("count", torch::zeros(1)); }
  // The buffer gets other memory, and another shape.
  at::Tensor forward(const at::Tensor& x) {
    count.set_data(at::cat({count, x.select(1, 0)}));
    return x;
  }
  at::Tensor count;
};
TORCH_MODULE(Counter);

TEST(DataParallelReplicas, TakesOverABufferThatReplica0Replaced) {
  Counter net;
  DataParallel model(net, {.num_replicas = 2});
  const auto x = torch::arange(1, 5, at::kFloat).unsqueeze(1);
  model(x);
  EXPECT_TRUE(net->count.equal(torch::tensor({0.F, 1.F, 2.F})));
  model(x);
  EXPECT_TRUE(net->count.equal(torch::tensor({0.F, 1.F, 2.F, 1.F, 2.F})));
}

TEST(DataParallelReplicas, RefusesABackwardWithinAReplica) {
  auto net = make<Normed>();
  DataParallel model(net, {.num_replicas = 2});
  const auto x = random_batch(4);
  const auto backward = [](NormedImpl& replica, const at::Tensor& part) {
    replica.forward(part).sum().backward();
  };
  EXPECT_THAT([&] { model.parallel_apply(backward, x); },
              ThrowsMessage<UsageError>(HasSubstr("run backward on the result")));
  EXPECT_NO_THROW(model(x));
}

// A gradient penalty, say.
TEST(DataParallelReplicas, MayDifferentiateWithinAReplica) {
  const auto penalty = [](NormedImpl& net, const at::Tensor& x) {
    const auto y = net.layer(torch::tanh(net.layer->weight.t().mm(x.t().slice(0, 0, 3)).t()));
    return torch::autograd::grad({y.pow(2).sum()}, {net.layer->weight}, {}, true, true)[0]
        .pow(2)
        .sum();
  };
  auto alone = make<Normed>();
  for (const auto& part : random_batch(6).chunk(2)) penalty(*alone, part).backward();
  auto net = make<Normed>();
  DataParallel model(net, {.num_replicas = 2});
  model.parallel_apply(penalty, random_batch(6)).sum().backward();
  expect_near_gradients(net->parameters(), alone->parameters());
}

TEST(DataParallelReplicas, RefusesModulesThatCannotBeCopied) {
  struct Outside : torch::nn::Cloneable<Outside> {
    Outside() { register_parameter("weight", torch::ones(1)); }
    void reset() override {}
    at::Tensor forward(const at::Tensor& x) { return x; }
  };
  EXPECT_THAT([] { DataParallel model(std::make_shared<Outside>(), {.num_replicas = 2}); },
              ThrowsMessage<UsageError>(HasSubstr("in reset()")));
  struct Derived : NormedImpl {};  // clone() makes a NormedImpl
  EXPECT_THAT([] { DataParallel model(std::make_shared<Derived>(), {.num_replicas = 2}); },
              ThrowsMessage<UsageError>(HasSubstr("another class")));
  EXPECT_THAT([] { DataParallel model(std::shared_ptr<NormedImpl>(), {.num_replicas = 2}); },
              ThrowsMessage<UsageError>(HasSubstr("null")));
}

struct WideImpl : torch::nn::Module {
  explicit WideImpl(std::int64_t width, bool norm = false, bool more = false) {
    register_parameter("weight", torch::ones(width));
    if (norm) register_buffer("norm", torch::ones(1));
    if (more) register_parameter("more", torch::ones(1));
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};

// Makes two modules, the module and replica 0.
void wrap(const std::shared_ptr<WideImpl>& module, const std::shared_ptr<WideImpl>& replica) {
  int made = 0;
  DataParallel<WideImpl> model([&] { return made++ == 0 ? module : replica; }, 1);
}

TEST(DataParallelReplicas, RefusesAFunctionThatMakesDifferentModules) {
  const auto module = std::make_shared<WideImpl>(3);
  const auto fails = [&](const std::shared_ptr<WideImpl>& replica, const auto& message) {
    EXPECT_THAT([&] { wrap(module, replica); }, ThrowsMessage<UsageError>(message));
  };
  fails(std::make_shared<WideImpl>(4),
        AllOf(HasSubstr("weight"), HasSubstr("[3]"), HasSubstr("[4] in replica 0")));
  fails(std::make_shared<WideImpl>(3, true), HasSubstr("0 buffers and replica 0 has 1"));
  fails(std::make_shared<WideImpl>(3, false, true), HasSubstr("1 parameters and replica 0 has 2"));
  fails(module, HasSubstr("a new one in each call"));
  fails(nullptr, HasSubstr("null"));
  EXPECT_THAT([] { DataParallel<WideImpl> model(std::function<std::shared_ptr<WideImpl>()>(), 2); },
              ThrowsMessage<UsageError>(HasSubstr("empty")));
  EXPECT_NO_THROW(wrap(module, std::make_shared<WideImpl>(3)));
}

TEST(DataParallelReplicas, RefusesTiesThatTheModuleDoesNotHave) {
  struct Pair : torch::nn::Module {
    explicit Pair(bool tied) {
      const auto one = register_parameter("one", torch::ones(1));
      register_parameter("other", tied ? one : torch::ones(1));
    }
    at::Tensor forward(const at::Tensor& x) { return x; }
  };
  bool tied = true;
  const auto factory = [&] { return std::make_shared<Pair>(tied = !tied); };
  EXPECT_THAT([&] { DataParallel<Pair> model(factory, 1); },
              ThrowsMessage<UsageError>(HasSubstr("other is a parameter of its own")));
}

TEST(DataParallelReplicas, RefusesOptionsThatDoNotFit) {
  const auto fails = [](const DataParallelOptions& options, const char* message) {
    EXPECT_THAT([&] { DataParallel model(make<Normed>(), options); },
                ThrowsMessage<UsageError>(HasSubstr(message)));
  };
  const at::Device cpu(at::kCPU);
  const at::Device meta(at::kMeta);
  fails({.num_replicas = -1}, "num_replicas is -1");
  fails({.device_ids = {cpu}, .num_replicas = 2}, "not both");
  fails({.device_ids = {cpu, meta, meta}}, "meta twice");
  fails({.device_ids = {meta, cpu}}, "must be on meta");
  const auto on_meta = [] { return std::make_shared<test::ScaleImpl>(at::kMeta); };
  EXPECT_THAT([&] { DataParallel model(on_meta, 2); },
              ThrowsMessage<UsageError>(HasSubstr("num_replicas is for modules on the CPU")));
}

TEST(DataParallelReplicas, RefusesAModuleOnTwoDevices) {
  struct OnTwo : test::ScaleImpl {
    explicit OnTwo(at::Device far) : ScaleImpl(at::kCPU) {
      register_buffer("far", torch::ones(1, far));
    }
  };
  int made = 0;
  const auto factory = [&] { return std::make_shared<OnTwo>(made++ == 0 ? at::kMeta : at::kCPU); };
  EXPECT_THAT(
      [&] { DataParallel model(factory, 2); },
      ThrowsMessage<UsageError>(AllOf(HasSubstr("far is on meta"), HasSubstr("replica 0 on cpu"))));
}

TEST(DataParallelReplicas, HasOneReplicaOnEachOfDeviceIds) {
  auto net = make<Normed>();
  DataParallel model(net, {.device_ids = {at::kCPU, at::kCPU, at::kCPU}});
  EXPECT_EQ(model.stats().replicas.size(), 3);
  const auto x = random_batch(6);
  EXPECT_EQ(model(x).size(0), 6);
}

TEST(DataParallelReplicas, MovesInputsAndParametersToOtherDevices) {
  auto model = test::make_with_meta();
  std::atomic<int> on_meta = 0;
  const auto note = [&](test::ScaleImpl& replica, const at::Tensor& x) {
    const auto y = replica.forward(x);
    EXPECT_EQ(y.scalar_type(), x.scalar_type());
    if (y.is_meta()) ++on_meta;
  };
  model.parallel_apply(note, random_batch(4).to(at::kFloat));
  model.module()->to(at::kDouble);
  model.parallel_apply(note, random_batch(4));
  EXPECT_EQ(on_meta, 2);
}

TEST(DataParallelReplicas, PutsOutputsOnTheOutputDevice) {
  DataParallel model(make<Normed>(), {.output_device = at::kMeta, .num_replicas = 2});
  EXPECT_TRUE(model(random_batch(4)).is_meta());
}

}  // namespace
}  // namespace paceline
