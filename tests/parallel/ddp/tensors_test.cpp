#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/error.h>

#include "support/small_net.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

// DistributedDataParallel of named tensors and a function, with no module of torch::nn.
namespace paceline {
namespace {

using at::Tensor;
using test::backends;
using test::batch_of;
using test::bytes_of;
using test::expect_same_gradients;
using test::expect_torch_ranks;
using test::loss_of;
using test::make_net;
using test::Net;
using test::whole_batch_gradients;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// A net's tensors, as a program has them that keeps no module.
NamedTensors tensors_of(const Net& net) {
  NamedTensors result;
  for (const auto& item : net->named_parameters()) result.emplace_back(item.key(), item.value());
  return result;
}

Tensor ones_with_grad() {
  return torch::ones({3}, at::kDouble).requires_grad_();
}

using DdpTensorsWorldsUpTo3 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, DdpTensorsWorldsUpTo3, test::worlds({1, 2, 3}), test::CaseName());

TEST_P(DdpTensorsWorldsUpTo3, LeaveTheGradientOfTheWholeBatch) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    auto net = make_net(at::kDouble);
    DistributedDataParallel model(tensors_of(net),
                                  [net](const Tensor& x) mutable { return net->forward(x); },
                                  {.bucket_cap_mb = 0.001});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const auto x = batch_of(rank, step, at::kDouble);
      loss_of(model(x), x).backward();
      expect_same_gradients(model.parameters(), whole_batch_gradients(step, n));
    }
  });
}

using DdpTensorsBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, DdpTensorsBackends, ::testing::ValuesIn(backends()), test::CaseName());

TEST_P(DdpTensorsBackends, StartAsThoseOfRankZero) {
  expect_torch_ranks(3, GetParam(), [](int rank, int) {
    const Tensor w = torch::full({3}, rank + 1.0, at::kDouble).requires_grad_();
    const Tensor frozen = torch::full({2}, rank + 1.0, at::kDouble);
    const Tensor mean = torch::full({3}, rank + 1.0, at::kDouble);
    DistributedDataParallel model({{"w", w}, {"frozen", frozen}}, {{"mean", mean}},
                                  [&](const Tensor& x) {
                                    mean.add_(x);
                                    return w * x;
                                  });
    for (const Tensor& tensor : {w, frozen, mean}) {
      EXPECT_TRUE(tensor.detach().eq(1).all().item<bool>());
    }
    const Tensor x = torch::full({3}, rank + 1.0, at::kDouble);
    model(x).sum().backward();
    EXPECT_TRUE(w.grad().allclose(torch::full({3}, 2.0, at::kDouble)));
    EXPECT_TRUE(mean.equal(torch::full({3}, rank + 2.0, at::kDouble)));
    model(x).sum().backward();  // rank 0's buffer first
    EXPECT_TRUE(mean.equal(torch::full({3}, rank + 3.0, at::kDouble)));
  });
}

TEST_P(DdpTensorsBackends, AreNamedWhereTheyDifferOrGetNoGradient) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    const Tensor w = ones_with_grad();
    const Tensor b = torch::ones({rank + 1}, at::kDouble).requires_grad_();
    const auto forward = [&] { return w.sum(); };
    EXPECT_THAT(
        [&] {
          DistributedDataParallel({{"w", w}, {"b", b}}, forward);
        },
        ThrowsMessage<Mismatch>(HasSubstr("b, a parameter of shape [2]")));
  });
  expect_torch_ranks(2, GetParam(), [](int, int) {
    const Tensor w = ones_with_grad();
    const Tensor b = ones_with_grad();
    DistributedDataParallel model({{"w", w}, {"b", b}}, [&] { return w.sum(); });
    barrier();  // a rank's failure must not meet another one's construction
    EXPECT_THAT([&] { model().backward(); },
                ThrowsMessage<Error>(HasSubstr("1 of 2 parameters got no gradient in this "
                                               "backward: b.")));
  });
}

TEST(DdpTensors, ThatCannotWorkAreRefused) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    const Tensor w = ones_with_grad();
    const auto refuses = [&](const NamedTensors& parameters, const NamedTensors& buffers,
                             const char* text) {
      EXPECT_THAT([&] { DistributedDataParallel(parameters, buffers, [&] { return w.sum(); }); },
                  ThrowsMessage<UsageError>(HasSubstr(text)));
    };
    refuses({}, {}, "needs a parameter that requires a gradient");
    refuses({{"w", w.detach()}}, {}, "needs a parameter that requires a gradient");
    refuses({{"w", w}, {"v", {}}}, {}, "parameter v is undefined");
    refuses({{"w", w}}, {{"mean", {}}}, "buffer mean is undefined");
    refuses({{"w", w}, {"w", ones_with_grad()}}, {}, "are called w");
    refuses({{"w", w}}, {{"w", torch::ones({1})}}, "are called w");
    refuses({{"w", w * 2}}, {}, "parameter w was computed from");
    refuses({{"w", w}, {"v", torch::ones({1}).expand({3}).requires_grad_()}}, {},
            "parameter v: its elements share memory");
    DistributedDataParallel model({{"w", w}}, [&] { return w.sum(); });
    refuses({{"w", w}}, {}, "parameter w is wrapped by another");
  });
}

TEST(DdpTensors, AreLeftByAMove) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    const Tensor w = ones_with_grad();
    DistributedDataParallel model({{"w", w}}, [&] { return w.sum(); });
    auto moved = std::move(model);
    moved().backward();
    EXPECT_THAT([&] { model(); },  // NOLINT(bugprone-use-after-move): that is what it is about
                ThrowsMessage<UsageError>(HasSubstr("moved from")));
    model = std::move(moved);
    model().backward();
  });
}

// A tensor may have two names, as shared ones of a module have.
TEST(DdpTensors, CountOnceUnderTwoNames) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const Tensor w = ones_with_grad();
    DistributedDataParallel model({{"in", w}, {"out", w}},
                                  [&](double x) { return (w * w * x).sum(); });
    model(rank + 1.0).backward();
    EXPECT_TRUE(w.grad().equal(torch::full({3}, 3.0, at::kDouble)));
  });
}

struct Trainer {
  Tensor w = ones_with_grad();
  DistributedDataParallel<std::function<Tensor(double)>> model{
      {{"w", w}}, [this](double x) { return (w * x).sum(); }};
};

TEST_P(DdpTensorsBackends, AccumulateAndJoinAsModulesDo) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    Trainer trainer;
    auto& model = trainer.model;
    {
      const auto guard = model.no_sync();
      model(rank + 1.0).backward();
    }
    model(rank + 1.0).backward();
    EXPECT_TRUE(trainer.w.grad().equal(torch::full({3}, 3.0, at::kDouble)));
    torch::optim::SGD sgd(model.parameters(), 1.0);
    model.join([&] {
      for (int step = 0; step <= rank; ++step) {
        sgd.zero_grad();
        model(1).backward();
        sgd.step();
      }
    });
    // 1, then half of 1, as one of two ranks has joined.
    EXPECT_TRUE(trainer.w.detach().equal(torch::full({3}, -0.5, at::kDouble)));
    EXPECT_EQ(model.stats().steps, rank + 2U);
  });
}

}  // namespace
}  // namespace paceline
