#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <paceline/ddp.h>
#include <paceline/logical_data_loader.h>
#include <paceline/sampler.h>
#include <paceline/tensor_dataset.h>

#include "parallel/ddp/step_by.h"
#include "support/same_everywhere.h"
#include "support/small_net.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::batch_of;
using test::bytes_of;
using test::cpu_generator;
using test::expect_same_everywhere;
using test::expect_torch_ranks;
using test::loss_of;
using test::make_net;
using test::step_by;

constexpr int kLogical = 6;
constexpr int kSteps = 3;

// The gradients of all logical ranks in the documented order, accumulated in float32.
std::vector<torch::Tensor> half_gradients(test::Net& net, int step, at::ScalarType type) {
  std::vector<std::vector<torch::Tensor>> leaves;
  for (int rank = 0; rank < kLogical; ++rank) {
    net->zero_grad();
    const auto x = batch_of(rank, step, type);
    loss_of(net(x), x).backward();
    leaves.emplace_back();
    for (const auto& one : net->parameters()) leaves.back().push_back(one.grad().to(at::kFloat));
  }
  std::vector<torch::Tensor> averages;
  for (std::size_t i = 0; i < leaves[0].size(); ++i) {
    const auto sum = [&](std::size_t a, std::size_t b) { return leaves[a][i] + leaves[b][i]; };
    averages.push_back((((sum(0, 1) + sum(2, 3)) + sum(4, 5)) / kLogical).to(type));
  }
  return averages;
}

std::string train_half(at::ScalarType type) {
  auto net = make_net(type);
  auto alone = make_net(type);
  DistributedDataParallel model(net, {.bucket_cap_mb = 0.001, .logical_ranks = kLogical});
  std::string bytes;
  for (int step = 0; step < kSteps; ++step) {
    for (const int rank : model.logical_ranks()) {
      const auto x = batch_of(rank, step, type);
      loss_of(model(x), x).backward();
    }
    if (get_world_size() == 1) {
      std::vector<torch::Tensor> got;
      for (const auto& one : net->parameters()) got.push_back(one.grad());
      EXPECT_TRUE(bytes_of(got) == bytes_of(half_gradients(alone, step, type))) << "step " << step;
    }
    step_by(0.01, net->parameters());
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      alone->parameters()[i].copy_(net->parameters()[i]);
    }
    bytes += bytes_of(net->parameters());
  }
  return std::to_string(std::hash<std::string>{}(bytes));
}

TEST(LogicalRanks, HalfTypesAreRoundedOnce) {
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    expect_same_everywhere({1, 2, 3, 4, 6}, [=] { return train_half(type); });
  }
}

struct PicturesImpl : torch::nn::Module {
  torch::nn::Conv2d first{
      register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 16, 3).padding(1)))};
  torch::nn::BatchNorm2d norm{register_module("norm", torch::nn::BatchNorm2d(16))};
  torch::nn::Conv2d second{
      register_module("second", torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 8, 3).stride(2)))};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(8 * 5 * 5, 10))};
  torch::Tensor forward(const torch::Tensor& x) {
    return last(torch::relu(second(torch::relu(norm(first(x))))).flatten(1));
  }
};
TORCH_MODULE(Pictures);

// Each logical rank has its share of an epoch's order, whichever rank runs it.
TEST(LogicalRanks, TrainConvolutionsOnShuffledData) {
  expect_same_everywhere({1, 2, 3, 4, 6}, [] {
    torch::manual_seed(11);
    data::TensorDataset set(torch::randn({50, 3, 12, 12}), torch::randint(10, {50}));
    Pictures net;
    DistributedDataParallel model(net, {.logical_ranks = kLogical});
    data::LogicalDataLoader loader(set, model.logical_ranks(),
                                   [&](int rank) {
                                     return data::DistributedSampler(
                                         set.size(), {.num_replicas = kLogical, .rank = rank});
                                   },
                                   {.batch_size = 4, .num_workers = 1});
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (const int epoch : {0, 1}) {
      for (auto& batches : loader.epoch(epoch)) {
        sgd.zero_grad();
        for (const int rank : model.logical_ranks()) {
          auto& [x, y] = batches[rank];
          torch::nn::functional::cross_entropy(model(x), y).backward();
        }
        sgd.step();
      }
    }
    auto state = net->parameters();
    for (const auto& buffer : net->buffers()) state.push_back(buffer);
    return std::to_string(std::hash<std::string>{}(bytes_of(state)));
  });
}

struct WordsImpl : torch::nn::Module {
  explicit WordsImpl(bool sparse)
      : words(register_module(
            "words", torch::nn::Embedding(torch::nn::EmbeddingOptions(50, 4).sparse(sparse)))),
        last(register_module("last", torch::nn::Linear(4, 1))) {}
  torch::Tensor forward(const torch::Tensor& x) { return last(words(x).tanh()); }
  torch::nn::Embedding words;
  torch::nn::Linear last;
};
TORCH_MODULE(Words);

torch::Tensor words_of(int rank, int step) {
  auto random = at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 * step + rank));
  return torch::randint(50, {7}, random, at::kLong);
}

TEST(LogicalRanks, SparseGradientsAreAddedUpAsLeaves) {
  for (const bool weighted : {false, true}) {
    expect_same_everywhere({1, 2, 4, 6}, [=] {
      torch::manual_seed(1);
      Words net(true);
      torch::manual_seed(1);
      Words dense(false);
      DistributedDataParallel model(net, {.average = weighted ? Average::samples : Average::ranks,
                                          .logical_ranks = kLogical});
      const auto samples = [=](int rank) { return weighted ? rank % 3 * 1.5 : 1.0; };
      for (int step = 0; step < kSteps; ++step) {
        for (const int rank : model.logical_ranks()) {
          if (weighted) model.set_samples(samples(rank));
          model(words_of(rank, step)).pow(2).sum().backward();
        }
        double total = 0;
        for (int rank = 0; rank < kLogical; ++rank) {
          total += samples(rank);
          (dense(words_of(rank, step)).pow(2).sum() * samples(rank)).backward();
        }
        EXPECT_TRUE(net->words->weight.grad().is_sparse());
        EXPECT_TRUE(torch::allclose(net->words->weight.grad().to_dense(),
                                    dense->words->weight.grad() / total, 1e-5, 1e-6));
        step_by(0.1, net->parameters());
        step_by(0.1 / total, dense->parameters());
      }
      return std::to_string(std::hash<std::string>{}(bytes_of(net->parameters())));
    });
  }
}

// Trains with dropout; `between` runs before each step.
std::string train_with_dropout(const std::function<void(LogicalRanks&, int)>& between) {
  auto net = make_net(at::kFloat);
  torch::manual_seed(7);
  DistributedDataParallel model(net, {.logical_ranks = kLogical});
  for (int step = 0; step < kSteps; ++step) {
    LogicalRanks logical(model.logical_ranks());
    if (between) between(logical, step);
    for (const int rank : model.logical_ranks()) {
      const auto state = cpu_generator().get_state();
      const auto x = batch_of(rank, step, at::kFloat);
      cpu_generator().set_state(state);
      const auto output = model(torch::dropout(x, 0.5, true));
      loss_of(output, x).backward();
    }
    step_by(0.1, net->parameters());
  }
  return std::to_string(std::hash<std::string>{}(bytes_of(net->parameters())));
}

TEST(LogicalRanks, MayBeAssignedAnewBetweenSteps) {
  expect_same_everywhere({1, 2, 3}, [] {
    const std::string expected = train_with_dropout({});
    std::vector<double> carried(kLogical, -1);
    const std::string moved = train_with_dropout([&](LogicalRanks& logical, int step) {
      if (step == 0) {
        logical.register_state(
            "a", [&](int rank) { return torch::tensor(carried[static_cast<std::size_t>(rank)]); },
            [&](int rank, const at::Tensor& value) {
              carried[static_cast<std::size_t>(rank)] = value.item<double>();
            });
        const auto [first, count] = logical.range();
        for (int rank = first; rank < first + count; ++rank) {
          carried[static_cast<std::size_t>(rank)] = 10 * rank;
        }
        return;
      }
      // The last rank gets the first logical ranks, and all but one of them.
      const int size = get_world_size();
      const int most = kLogical - size + 1;
      const int rank = size - 1 - get_rank();
      logical.assign(rank == 0 ? LogicalRange{0, most} : LogicalRange{most + rank - 1, 1});
      const auto [first, count] = logical.range();
      for (int one = first; one < first + count; ++one) {
        EXPECT_EQ(carried[static_cast<std::size_t>(one)], 10 * one);
      }
    });
    EXPECT_EQ(moved, expected);
    return moved;
  });
}

// Where each rank runs one logical rank, too.
TEST(LogicalRanks, MayBePermutedAmongRanks) {
  for (const bool weighted : {false, true}) {
    expect_same_everywhere({1, 2, 5}, [=] {
      auto net = make_net(at::kFloat);
      DistributedDataParallel model(
          net, {.average = weighted ? Average::samples : Average::ranks, .logical_ranks = 5});
      const auto [first, count] = model.logical_ranks().range();
      model.logical_ranks().assign({5 - first - count, count});
      for (int step = 0; step < kSteps; ++step) {
        for (const int rank : model.logical_ranks()) {
          if (weighted) model.set_samples(rank * rank);
          const auto x = batch_of(rank, step, at::kFloat);
          loss_of(model(x), x).backward();
        }
        step_by(0.1, net->parameters());
      }
      return std::to_string(std::hash<std::string>{}(bytes_of(net->parameters())));
    });
  }
}

TEST(LogicalRanks, StatesGoOnInAnotherModel) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    DistributedDataParallel model(make_net(at::kFloat), {.logical_ranks = 4});
    DistributedDataParallel other(make_net(at::kFloat), {.logical_ranks = 4});
    std::vector<torch::Tensor> drawn;
    for (const int rank : model.logical_ranks()) {
      static_cast<void>(rank);
      torch::randn({3});
    }
    const auto [first, count] = model.logical_ranks().range();
    for (int rank = first; rank < first + count; ++rank) {
      other.logical_ranks().set_state(rank, model.logical_ranks().state(rank));
    }
    for (const int rank : model.logical_ranks()) {
      static_cast<void>(rank);
      drawn.push_back(torch::randn({3}));
    }
    EXPECT_FALSE(drawn[0].equal(drawn[1]));
    for (const int rank : other.logical_ranks()) {
      EXPECT_TRUE(torch::randn({3}).equal(drawn[static_cast<std::size_t>(rank - first)]));
    }
  });
}

TEST(LogicalRanks, OfSeveralModelsDrawByTheSeedOfEach) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    const auto drawn_with_seed = [](std::uint64_t seed) {
      auto net = make_net(at::kFloat);
      torch::manual_seed(seed);
      DistributedDataParallel model(net, {.logical_ranks = 4});
      std::vector<torch::Tensor> drawn;
      for (const int rank : model.logical_ranks()) {
        static_cast<void>(rank);
        drawn.push_back(torch::randn({3}));
      }
      return torch::stack(drawn);
    };
    const auto first = drawn_with_seed(1);
    EXPECT_FALSE(drawn_with_seed(2).equal(first));
    EXPECT_TRUE(drawn_with_seed(1).equal(first));
  });
}

TEST(LogicalRanks, LeaveTheProcessItsOwnRandomNumbers) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    DistributedDataParallel model(make_net(at::kFloat), {.logical_ranks = 4});
    torch::manual_seed(5);
    const auto expected = torch::randn({4});
    torch::manual_seed(5);
    for (const int rank : model.logical_ranks()) torch::randn({rank + 1});
    EXPECT_TRUE(torch::randn({4}).equal(expected));
    torch::manual_seed(5);
    EXPECT_THROW(
        {
          for (const int rank : model.logical_ranks()) {
            torch::randn({rank + 1});
            throw std::runtime_error("a sample is broken");
          }
        },
        std::runtime_error);
    EXPECT_TRUE(torch::randn({4}).equal(expected));
  });
}

TEST(LogicalRanks, AreTheRanksWithoutTheOption) {
  expect_torch_ranks(3, "paceline", [](int rank, int size) {
    auto net = make_net(at::kFloat);
    DistributedDataParallel model(net);
    std::vector<int> seen;
    for (const int logical : model.logical_ranks()) {
      seen.push_back(logical);
      const auto x = batch_of(logical, 0, at::kFloat);
      loss_of(model(x), x).backward();
    }
    EXPECT_EQ(seen, std::vector{rank});
    EXPECT_EQ(model.logical_ranks().total(), size);
    EXPECT_EQ(model.logical_ranks().range().first, rank);
    EXPECT_EQ(model.stats().steps, 1u);
  });
}

// The most leaves that there may be; complex numbers; and a parameter without elements.
TEST(LogicalRanks, SixtyFourOfUnusualParameters) {
  expect_same_everywhere({1, 2, 3}, [] {
    torch::manual_seed(8);
    const auto number = torch::randn({5, 3}, at::kComplexFloat).requires_grad_();
    const auto empty = torch::randn({0, 4}).requires_grad_();
    const auto apart = torch::randn({0}, at::kDouble).requires_grad_();
    DistributedDataParallel model(
        {{"number", number}, {"empty", empty}, {"apart", apart}},
        [&](const at::Tensor& x) { return (number * x).abs().sum() + empty.sum() + apart.sum(); },
        DdpOptions{.logical_ranks = 64});
    std::string bytes;
    for (int step = 0; step < 2; ++step) {
      for (const int rank : model.logical_ranks()) {
        model(torch::full({3}, 0.1 * rank + step)).backward();
      }
      const auto expected = number.detach() / number.detach().abs() *
                            (0.1 * 31.5 + step);  // of the mean of the losses
      EXPECT_TRUE(torch::allclose(number.grad(), expected, 1e-5));
      EXPECT_EQ(empty.grad().sizes(), empty.sizes());
      bytes += bytes_of({number.grad()});
      step_by(0.1, {number, empty, apart});
    }
    return std::to_string(std::hash<std::string>{}(bytes));
  });
}

TEST(LogicalRanks, KeepTheProgramsGradientTensors) {
  expect_same_everywhere({1, 2, 4}, [] {
    auto net = make_net(at::kFloat);
    DistributedDataParallel model(net, {.gradient_as_bucket_view = false, .logical_ranks = 4});
    std::vector<torch::Tensor> own;
    for (auto& parameter : net->parameters()) {
      own.push_back(torch::zeros_like(parameter));
      parameter.mutable_grad() = own.back();
    }
    for (const int rank : model.logical_ranks()) {
      const auto x = batch_of(rank, 0, at::kFloat);
      loss_of(model(x), x).backward();
    }
    std::vector<torch::Tensor> grads;
    for (const auto& parameter : net->parameters()) grads.push_back(parameter.grad());
    EXPECT_TRUE(bytes_of(own) == bytes_of(grads));
    EXPECT_GT(own[0].abs().max().item<float>(), 0);
    return std::to_string(std::hash<std::string>{}(bytes_of(own)));
  });
}

}  // namespace
}  // namespace paceline
