#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "parallel/parameter_server/jobs.h"

namespace paceline {
namespace {

using test::JobContext;
using test::JobShape;
using test::run_job;

// Parameters of several sizes, so that two servers share them.
torch::nn::Sequential make_net() {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(3, 5), torch::nn::Tanh(), torch::nn::Linear(5, 2));
  net->to(torch::kFloat64);
  return net;
}

at::Tensor batch_of(int worker, int step) {
  const auto values = torch::arange(12, torch::kFloat64).reshape({4, 3});
  return torch::sin(values * (worker + 1) + step);
}

at::Tensor loss_of(torch::nn::Sequential& net, int worker, int step) {
  return net->forward(batch_of(worker, step)).square().sum();
}

std::unique_ptr<torch::optim::Optimizer> adam_or_sgd(std::vector<at::Tensor> parameters,
                                                     bool adam) {
  if (adam) return std::make_unique<torch::optim::Adam>(std::move(parameters));
  return test::sgd(0.05, 0.9)(std::move(parameters));
}

std::string bytes_of(const std::vector<at::Tensor>& tensors) {
  std::string bytes;
  for (const auto& tensor : tensors) {
    bytes.append(static_cast<const char*>(tensor.data_ptr()), tensor.nbytes());
  }
  return bytes;
}

constexpr int kSteps = 6;

// The same training in one process: gradients are added in the order of workers, then divided.
std::string train_alone(int workers, bool adam) {
  auto net = make_net();
  const auto parameters = net->parameters();
  const auto optimizer = adam_or_sgd(parameters, adam);
  for (int step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> sums(parameters.size());
    for (int worker = 0; worker < workers; ++worker) {
      net->zero_grad();
      loss_of(net, worker, step).backward();
      for (std::size_t i = 0; i < sums.size(); ++i) {
        const auto& gradient = parameters[i].grad();
        sums[i] = sums[i].defined() ? sums[i] + gradient : gradient.clone();
      }
    }
    for (std::size_t i = 0; i < sums.size(); ++i) parameters[i].mutable_grad() = sums[i] / workers;
    optimizer->step();
  }
  return bytes_of(parameters);
}

std::string train_in_job(const JobContext& context, bool adam) {
  auto net = make_net();
  if (context.rank > 0) {
    // The servers' values count, of which each has its own.
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) {
      if (context.rank >= context.options.servers) parameter.fill_(context.rank);
    }
  }
  ParameterServer server(
      net, [&](auto parameters) { return adam_or_sgd(std::move(parameters), adam); },
      context.options);
  if (server.is_server()) {
    server.serve();
    EXPECT_EQ(server.stats().version, kSteps);
    EXPECT_EQ(server.stats().staleness.size(), 1U);
    return "";
  }
  const int worker = context.rank - context.options.servers;
  for (int step = 0; step < kSteps; ++step) {
    net->zero_grad();
    loss_of(net, worker, step).backward();
    server.step();
  }
  server.leave();
  return bytes_of(net->parameters());
}

struct Shape {
  int servers;
  int workers;
};

class SynchronousTraining : public ::testing::TestWithParam<Shape> {};

// Bit for bit, so any number of servers gives the same.
TEST_P(SynchronousTraining, EqualsOneProcessWithAveragedGradients) {
  const auto [servers, workers] = GetParam();
  for (const bool adam : {false, true}) {
    const auto expected = train_alone(workers, adam);
    const auto ends = run_job({.servers = servers, .workers = workers},
                              [&](const auto& context) { return train_in_job(context, adam); });
    test::expect_clean(ends);
    for (auto end = ends.begin() + servers; end != ends.end(); ++end) {
      EXPECT_TRUE(end->report == expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Jobs, SynchronousTraining,
                         ::testing::Values(Shape{1, 1}, Shape{1, 2}, Shape{1, 3}, Shape{1, 4},
                                           Shape{2, 1}, Shape{2, 2}, Shape{2, 3}, Shape{2, 4}),
                         [](const auto& shape) {
                           return fmt::format("{}Servers{}Workers", shape.param.servers,
                                              shape.param.workers);
                         });

TEST(ParameterServer, WorksAcrossNodes) {
  const auto expected = train_alone(2, true);
  const auto ends = run_job({.servers = 2, .workers = 2, .two_nodes = true},
                            [&](const auto& context) { return train_in_job(context, true); });
  test::expect_clean(ends);
  EXPECT_TRUE(ends[2].report == expected);
  EXPECT_TRUE(ends[3].report == expected);
}

// y = w x + b, where only w or neither gets a gradient.
TEST(ParameterServer, LeavesOutParametersThatNoWorkerHasAGradientOf) {
  const auto ends = run_job({.workers = 2}, [](const JobContext& context) {
    const auto options = torch::TensorOptions(torch::kFloat64).requires_grad(true);
    auto w = torch::ones({2}, options);
    auto b = torch::ones({3}, options);
    // With momentum, a gradient of zero would move b on.
    ParameterServer server({{"w", w}, {"b", b}}, test::sgd(0.5, 0.9), context.options);
    if (server.is_server()) {
      server.serve();
      return std::string();
    }
    // b has a gradient on worker 1 only, in the first step only.
    w.mutable_grad() = torch::full({2}, context.rank == 1 ? 2.0 : 4.0, torch::kFloat64);
    if (context.rank == 2) b.mutable_grad() = torch::full({3}, 8.0, torch::kFloat64);
    server.step();
    EXPECT_TRUE(torch::equal(w, torch::full({2}, 1 - 0.5 * (2 + 4) / 2, torch::kFloat64)));
    EXPECT_TRUE(torch::equal(b, torch::full({3}, 1 - 0.5 * 8 / 2, torch::kFloat64)));
    b.mutable_grad() = at::Tensor();
    server.step();
    EXPECT_TRUE(torch::equal(b, torch::full({3}, 1 - 0.5 * 8 / 2, torch::kFloat64)));
    server.leave();
    server.leave();
    return std::string();
  });
  test::expect_clean(ends);
}

TEST(ParameterServer, HoldsTensorsOfSeveralTypesAndLayouts) {
  const auto ends = run_job({.servers = 2, .workers = 1}, [](const JobContext& context) {
    auto half = torch::ones({4, 3}, torch::kBFloat16).t().requires_grad_(true);
    auto image = torch::ones({1, 2, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast);
    image.requires_grad_(true);
    auto empty = torch::ones({0, 3}, torch::TensorOptions().requires_grad(true));
    auto counter = torch::full({}, 7, torch::kLong);
    ParameterServer server(
        {{"half", half}, {"image", image}, {"empty", empty}, {"counter", counter}}, test::sgd(1),
        context.options);
    if (server.is_server()) {
      server.serve();
      return std::string();
    }
    half.mutable_grad() = torch::arange(12, torch::kBFloat16).reshape({3, 4});
    image.mutable_grad() = torch::arange(8, torch::kFloat32).reshape({1, 2, 2, 2});
    counter.fill_(1);
    server.step();
    EXPECT_TRUE(torch::equal(half, 1 - torch::arange(12, torch::kBFloat16).reshape({3, 4})));
    EXPECT_TRUE(torch::equal(image, 1 - torch::arange(8).reshape({1, 2, 2, 2})));
    EXPECT_EQ(counter.item<int>(), 7);
    return std::string();
  });
  test::expect_clean(ends);
}

// As DistributedDataParallel does: sums of half types are float.
TEST(ParameterServer, AveragesHalfTypesInFloat) {
  const auto ends = run_job({.workers = 3}, [](const JobContext& context) {
    auto w = torch::zeros({1}, torch::TensorOptions(torch::kHalf).requires_grad(true));
    ParameterServer server({{"w", w}}, test::sgd(1), context.options);
    if (server.is_server()) {
      server.serve();
      return std::string();
    }
    w.mutable_grad() = torch::full({1}, -60000.0, torch::kHalf);
    server.step();
    EXPECT_EQ(w.item<float>(), 60000);
    return std::string();
  });
  test::expect_clean(ends);
}

// One worker pushes alone, twice, with parameters of the beginning; the other one sees both steps.
TEST(ParameterServer, CountsTheStalenessOfEachUpdate) {
  const auto ends = run_job({.workers = 2, .staleness = std::nullopt}, [](const auto& context) {
    auto w = torch::zeros({1}, torch::TensorOptions(torch::kFloat64).requires_grad(true));
    ParameterServer server({{"w", w}}, test::sgd(1), context.options);
    if (server.is_server()) {
      server.serve();
      const auto stats = server.stats();
      EXPECT_EQ(stats.version, 3);
      EXPECT_EQ(stats.workers.at(1).updates, 2);
      EXPECT_EQ(stats.workers.at(2).updates, 1);
      EXPECT_EQ(stats.staleness, (std::map<std::int64_t, std::int64_t>{{0, 1}, {1, 1}, {2, 1}}));
      constexpr std::int64_t kMessage = 64 + 1;
      EXPECT_EQ(stats.workers.at(1).bytes_received, 2 * kMessage);
      EXPECT_EQ(stats.workers.at(2).bytes_received, kMessage);
      EXPECT_EQ(stats.workers.at(1).bytes_sent, kMessage);  // at its begin
      EXPECT_EQ(stats.workers.at(2).bytes_sent, 2 * kMessage);
      return std::string();
    }
    w.mutable_grad() = -torch::ones({1}, torch::kFloat64);
    if (context.rank == 1) {
      context.store->wait({"pulled"});
      server.push();
      server.push();
      context.store->set("pushed", "");
    } else {
      context.store->set("pulled", "");
      context.store->wait({"pushed"});
      server.step();
      EXPECT_EQ(w.template item<double>(), 3);
    }
    return std::string();
  });
  test::expect_clean(ends);
}

// Worker 2 makes its step only once worker 1 has come as far as it may.
TEST(ParameterServer, KeepsTheStalenessWhileAWorkerIsHeldBack) {
  static constexpr std::int64_t kStaleness = 2;
  static constexpr std::int64_t kPushes = 8;
  for (const int servers : {1, 2}) {
    const JobShape shape{.servers = servers, .workers = 2, .staleness = kStaleness};
    const auto ends = run_job(shape, [](const JobContext& context) {
      const auto options = torch::TensorOptions(torch::kFloat64).requires_grad(true);
      auto v = torch::zeros({1}, options);
      auto w = torch::zeros({1}, options);
      ParameterServer server({{"v", v}, {"w", w}}, test::sgd(1), context.options);
      if (server.is_server()) {
        server.serve();
        EXPECT_EQ(server.stats().largest_lead, kStaleness);
        EXPECT_EQ(server.stats().version, 2 * kPushes);
        EXPECT_LE(server.stats().staleness.rbegin()->first, 2 * kStaleness);
        return std::string();
      }
      v.mutable_grad() = -torch::ones({1}, torch::kFloat64);
      w.mutable_grad() = -torch::ones({1}, torch::kFloat64);
      const bool fast = context.rank == context.options.servers;
      for (std::int64_t i = 0; i < kPushes; ++i) {
        if (!fast) context.store->wait({fmt::format("{}", std::min(i + kStaleness, kPushes))});
        server.step();
        if (fast) context.store->set(fmt::format("{}", i + 1), "");
      }
      return std::string();
    });
    test::expect_clean(ends);
  }
}

// Gradients of more bytes than a message has at once.
TEST(ParameterServer, MovesLargeParameters) {
  const auto ends = run_job({.servers = 2, .workers = 2}, [](const JobContext& context) {
    constexpr std::int64_t kElements = 3'000'001;
    auto v = torch::zeros({kElements}, torch::TensorOptions().requires_grad(true));
    auto w = torch::zeros({kElements}, torch::TensorOptions().requires_grad(true));
    ParameterServer server({{"v", v}, {"w", w}}, test::sgd(1), context.options);
    if (server.is_server()) {
      server.serve();
      return std::string();
    }
    for (int step = 1; step <= 3; ++step) {
      v.mutable_grad() = torch::arange(kElements, torch::kFloat32);
      w.mutable_grad() = torch::full({kElements}, context.rank == 2 ? 1.0F : 3.0F);
      server.step();
      EXPECT_TRUE(torch::equal(v, -step * torch::arange(kElements, torch::kFloat32)));
      EXPECT_TRUE(torch::equal(w, torch::full({kElements}, -2.0F * static_cast<float>(step))));
    }
    return std::string();
  });
  test::expect_clean(ends);
}

}  // namespace
}  // namespace paceline
