#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/ddp.h>

#include "support/small_net.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using test::batch_of;
using test::bytes_of;
using test::expect_close;
using test::expect_same_gradients;
using test::expect_torch_ranks;
using test::loss_of;
using test::make_net;
using test::RankContext;

constexpr int kTrainingSteps = 20;

std::vector<torch::Tensor> train_whole_batches(int size, at::ScalarType type) {
  auto net = make_net(type);
  torch::optim::SGD sgd(net->parameters(), 0.05);
  for (int step = 0; step < kTrainingSteps; ++step) {
    std::vector<torch::Tensor> parts;
    for (int rank = 0; rank < size; ++rank) parts.push_back(batch_of(rank, step, type));
    const auto x = torch::cat(parts);
    sgd.zero_grad();
    loss_of(net(x), x).backward();
    sgd.step();
  }
  return net->parameters();
}

std::vector<torch::Tensor> train_accumulating(int size, at::ScalarType type) {
  auto net = make_net(type);
  torch::optim::SGD sgd(net->parameters(), 0.05);
  for (int step = 0; step < kTrainingSteps; ++step) {
    sgd.zero_grad();
    for (int rank = 0; rank < size; ++rank) {
      const auto x = batch_of(rank, step, type);
      (loss_of(net(x), x) / size).backward();
    }
    sgd.step();
  }
  return net->parameters();
}

// Trains with DDP, starting from another model on every rank but 0, and gives the parameters'
// bytes.
std::string train_ddp(int rank, int size, at::ScalarType type, bool set_to_none) {
  DistributedDataParallel model(make_net(type, rank == 0 ? 3 : 77), {.bucket_cap_mb = 0.004});
  torch::optim::SGD sgd(model.parameters(), 0.05);
  for (int step = 0; step < kTrainingSteps; ++step) {
    const auto x = batch_of(rank, step, type);
    sgd.zero_grad(set_to_none);
    loss_of(model(x), x).backward();
    sgd.step();
  }
  const double relative = type == at::kDouble ? 1e-12 : 1e-5;
  expect_close(model.parameters(), train_whole_batches(size, type), relative);
  expect_close(model.parameters(), train_accumulating(size, type), relative);
  return bytes_of(model.parameters());
}

using DdpWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, DdpWorlds, test::worlds(), test::CaseName());

TEST_P(DdpWorlds, EqualsOneProcess) {
  const std::string& backend = GetParam().backend;
  const int size = GetParam().size;
  std::string first_run;
  for (int run = 0; run < 2; ++run) {
    const auto ends = test::run_torch_ranks(size, backend, [](const RankContext& context) {
      const World world = init_process_group(context.init);
      train_ddp(context.rank, context.size, at::kDouble, false);
      const std::string mine = train_ddp(context.rank, context.size, at::kFloat, true);
      return std::to_string(std::hash<std::string>{}(mine));
    });
    if (run == 0) first_run = ends[0].report;
    for (const auto& end : ends) {
      EXPECT_TRUE(end.exited_cleanly()) << backend << ' ' << size << ": " << end.report;
      EXPECT_EQ(end.report, ends[0].report) << "ranks differ on " << backend;
      if (backend == "paceline") {
        EXPECT_EQ(end.report, first_run) << "runs differ";
      }
    }
  }
}

TEST_P(DdpWorlds, GradientsEqualThoseOfPyTorchsReducer) {
  expect_torch_ranks(GetParam(), [](int rank, int) {
    const auto x = batch_of(rank, 0, at::kDouble);
    DistributedDataParallel ours(make_net(at::kDouble));
    loss_of(ours(x), x).backward();

    auto net = make_net(at::kDouble);
    const auto parameters = net->parameters();
    std::vector<std::size_t> all(parameters.size());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = all.size() - 1 - i;
    c10d::Reducer reducer(parameters, {all}, ProcessGroup().c10d(),
                          std::vector<bool>(parameters.size(), false), 25 << 20, false, false, {},
                          1 << 20, false, false, {});
    reducer.prepare_for_forward();
    const auto output = net(x);
    reducer.prepare_for_backward({});
    loss_of(output, x).backward();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto mine = ours.parameters()[i].grad();
      EXPECT_TRUE(torch::allclose(mine, parameters[i].grad(), 1e-13, 1e-15)) << i;
    }
  });
}

using DdpWorldsUpTo8 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, DdpWorldsUpTo8, test::worlds({2, 3, 8}), test::CaseName());

TEST_P(DdpWorldsUpTo8, AllowsTwoModelsAndOtherCollectivesInOneStep) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    DistributedDataParallel one(make_net(at::kDouble));
    DistributedDataParallel two(make_net(at::kDouble, 5));
    auto plain_one = make_net(at::kDouble);
    auto plain_two = make_net(at::kDouble, 5);
    for (int step = 0; step < 5; ++step) {
      one.module()->zero_grad();
      two.module()->zero_grad();
      const auto x = batch_of(rank, step, at::kDouble);
      const auto from_one = one(x);
      auto count = torch::ones({1});
      all_reduce(count);
      EXPECT_EQ(count.item<float>(), n);
      // One backward through both models.
      loss_of(two(x) + from_one, x).backward();

      plain_one->zero_grad();
      plain_two->zero_grad();
      for (int r = 0; r < n; ++r) {
        const auto y = batch_of(r, step, at::kDouble);
        (loss_of(plain_two(y) + plain_one(y), y) / n).backward();
      }
      expect_same_gradients(one.parameters(), plain_one->parameters());
      expect_same_gradients(two.parameters(), plain_two->parameters());
    }
  });
}

TEST(Ddp, NothingIsReducedUnderNoSync) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    DistributedDataParallel model(make_net(at::kDouble));
    auto plain = make_net(at::kDouble);
    const auto x = batch_of(rank, 0, at::kDouble);
    {
      const auto guard = model.no_sync();
      loss_of(model(x), x).backward();
    }
    loss_of(plain(x), x).backward();
    for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
      EXPECT_TRUE(torch::equal(model.parameters()[i].grad(), plain->parameters()[i].grad()));
    }
  });
}

TEST(Ddp, NoSyncGuardsMayEndInAnyOrder) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    DistributedDataParallel model(make_net(at::kDouble));
    auto plain = make_net(at::kDouble);
    std::optional<NoSyncGuard> guard;
    for (int micro = 0; micro < 3; ++micro) {
      guard.emplace(model.no_sync(micro < 2));  // made before the one that it replaces ends
      const auto x = batch_of(rank, micro, at::kDouble);
      loss_of(model(x), x).backward();
      for (int other = 0; other < 2; ++other) {
        const auto y = batch_of(other, micro, at::kDouble);
        if (micro == 2 || other == rank) (loss_of(plain(y), y) / (micro == 2 ? 2 : 1)).backward();
      }
      if (micro < 2) expect_same_gradients(model.parameters(), plain->parameters());
    }
  });
}

struct PairOutputImpl : torch::nn::Module {
  torch::Tensor w{register_parameter("w", torch::ones({2}))};
  std::pair<torch::Tensor, int> forward(const torch::Tensor& a, const std::string& b, int c) {
    return {(w * a).sum() * static_cast<double>(b.size()), c};
  }
};
TORCH_MODULE(PairOutput);

TEST(Ddp, SupportsAnyForwardSignatureAndSharedParameters) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    DistributedDataParallel model(PairOutput{});
    const auto [loss, number] = model(torch::full({2}, rank + 1.0f), "abc", 5);
    loss.backward();
    EXPECT_EQ(number, 5);
    EXPECT_EQ(model.module()->w.grad()[0].item<float>(), 4.5f);

    auto shared = std::make_shared<torch::nn::Linear>(3, 3);
    torch::nn::Sequential twice(*shared, torch::nn::Tanh(), *shared);
    DistributedDataParallel tied(twice);
    const auto x = torch::ones({1, 3});
    const auto expected = torch::autograd::grad({twice->forward(x).sum()}, {(*shared)->weight})[0];
    tied(x).sum().backward();
    EXPECT_TRUE((*shared)->weight.grad().allclose(expected));
  });
}

TEST(Ddp, SecondBackwardThroughOneForwardIsReducedToo) {
  expect_torch_ranks(3, "paceline", [](int rank, int n) {
    DistributedDataParallel model(make_net(at::kDouble));
    auto plain = make_net(at::kDouble);
    const auto x = batch_of(rank, 0, at::kDouble);
    const auto output = model(x);
    loss_of(output, x).backward({}, /*retain_graph=*/true);
    output.sum().backward();
    for (int r = 0; r < n; ++r) {
      const auto y = batch_of(r, 0, at::kDouble);
      ((loss_of(plain(y), y) + plain(y).sum()) / n).backward();
    }
    expect_same_gradients(model.parameters(), plain->parameters());
  });
}

TEST(Ddp, SupportsLateFreezingChannelsLastAndHalf) {
  expect_torch_ranks(2, "paceline", [](int rank, int n) {
    const auto make = [](at::ScalarType type) {
      torch::manual_seed(6);
      torch::nn::Sequential net(torch::nn::Conv2d(3, 4, 3), torch::nn::Conv2d(4, 2, 3));
      net->to(type);
      for (auto& parameter : net->parameters()) {
        if (parameter.dim() == 4) {
          parameter.set_data(parameter.contiguous(at::MemoryFormat::ChannelsLast));
        }
      }
      return net;
    };
    for (const auto type : {at::kDouble, at::kBFloat16}) {
      DistributedDataParallel model(make(type));
      const auto batch = [&](int r) {
        torch::manual_seed(static_cast<std::uint64_t>(r));
        return torch::randn({2, 3, 8, 8}, at::kDouble).to(type);
      };
      model(batch(rank)).pow(2).mean().backward();
      auto plain = make(at::kDouble);
      for (int r = 0; r < n; ++r) {
        (plain->forward(batch(r).to(at::kDouble)).pow(2).mean() / n).backward();
      }
      const double tolerance = type == at::kDouble ? 1e-10 : 5e-2;
      for (std::size_t i = 0; i < 4; ++i) {
        const auto got = model.parameters()[i].grad().to(at::kDouble);
        const auto expected = plain->parameters()[i].grad();
        EXPECT_LE((got - expected).norm().item<double>(),
                  tolerance * expected.norm().item<double>());
        EXPECT_EQ(model.parameters()[i].grad().strides(), model.parameters()[i].strides());
      }
      // Frozen from here on, on every rank.
      model.parameters()[0].set_requires_grad(false);
      const auto kept = model.parameters()[0].grad().clone();
      model(batch(rank)).pow(2).mean().backward();
      EXPECT_TRUE(torch::equal(model.parameters()[0].grad(), kept));
    }
  });
}

}  // namespace
}  // namespace paceline
