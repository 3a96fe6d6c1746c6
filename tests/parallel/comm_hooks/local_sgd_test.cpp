#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/local_sgd.h>

#include "support/small_net.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using comm_hooks::PostLocalSgdState;
using test::expect_torch_ranks;
using ::testing::HasSubstr;

// Trains copies of a net as ranks would, in one process: `average` changes the gradients before the
// optimizers' step, or the parameters after it.
class Simulation {
 public:
  explicit Simulation(int ranks) {
    for (int rank = 0; rank < ranks; ++rank) nets_.push_back(test::make_net(at::kDouble));
  }

  // Averages gradients over groups of `size` consecutive ranks, and parameters over groups of
  // `averaged` ones; 1: not.
  void step(int number, int size, int averaged) {
    for (std::size_t rank = 0; rank < nets_.size(); ++rank) {
      nets_[rank]->zero_grad();
      const auto x = test::batch_of(static_cast<int>(rank), number, at::kDouble);
      test::loss_of(nets_[rank](x), x).backward();
    }
    average(size, [](const at::Tensor& parameter) { return parameter.grad(); });
    const at::NoGradGuard no_grad;
    for (auto& net : nets_) {
      for (auto& parameter : net->parameters()) parameter.sub_(0.1 * parameter.grad());
    }
    average(averaged, [](const at::Tensor& parameter) { return parameter; });
  }
  std::vector<at::Tensor> parameters(int rank) const {
    return nets_[static_cast<std::size_t>(rank)]->parameters();
  }

 private:
  void average(int size, const std::function<at::Tensor(const at::Tensor&)>& part) {
    const at::NoGradGuard no_grad;
    const auto of = [&](std::size_t rank, std::size_t i) {
      return part(nets_[rank]->parameters()[i]);
    };
    const auto group = static_cast<std::size_t>(size);
    for (std::size_t first = 0; first < nets_.size(); first += group) {
      for (std::size_t i = 0; i < nets_[0]->parameters().size(); ++i) {
        at::Tensor sum = torch::zeros_like(of(first, i));
        for (std::size_t rank = first; rank < first + group; ++rank) sum += of(rank, i);
        for (std::size_t rank = first; rank < first + group; ++rank) {
          of(rank, i).copy_(sum / size);
        }
      }
    }
  }

  std::vector<test::Net> nets_;
};

void train_step(DistributedDataParallel<test::NetImpl>& model, torch::optim::Optimizer& optimizer,
                int rank, int number) {
  model.zero_grad();
  const auto x = test::batch_of(rank, number, at::kDouble);
  test::loss_of(model(x), x).backward();
  optimizer.step();
}

// As a rank does that evaluates averaged weights.
void swap_and_restore(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters) parameter.copy_(parameter.clone());
}

class LocalSgdBackend : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(, LocalSgdBackend, test::backends_and_nodes());

// Four ranks in two subgroups: three steps over all, then local ones, and every second step all
// parameters are averaged.
TEST_P(LocalSgdBackend, PostLocalSgdTrainsAsSimulated) {
  expect_torch_ranks(4, GetParam(), [](int rank, int) {
    DistributedDataParallel model(test::make_net(at::kDouble),
                                  {.bucket_cap_mb = test::kTinyBucket});
    const PostLocalSgdState state(
        {.subgroup = new_subgroups(2).current, .start_local_sgd_iter = 3});
    model.register_comm_hook(comm_hooks::post_local_sgd(state));
    PeriodicModelAverager averager({.period = 2, .warmup_steps = 3});
    torch::optim::SGD sgd(model.parameters(), 0.1);
    Simulation expected(4);
    for (int step = 0; step < 8; ++step) {
      if (rank == 0) swap_and_restore(model.parameters());
      train_step(model, sgd, rank, step);
      averager.average_parameters(model.parameters());
      const bool averages = step >= 3 && (step - 3) % 2 == 0;
      expected.step(step, step < 3 ? 4 : 2, averages ? 4 : 1);
      test::expect_close(model.parameters(), expected.parameters(rank), 1e-12);
    }
  });
}

TEST_P(LocalSgdBackend, HierarchicalAveragesUseTheLargestPeriodThatFits) {
  expect_torch_ranks(4, GetParam(), [](int rank, int) {
    DistributedDataParallel model(test::make_net(at::kDouble));
    const PostLocalSgdState state(
        {.start_local_sgd_iter = 0, .post_local_gradient_all_reduce = false});
    model.register_comm_hook(comm_hooks::post_local_sgd(state));
    HierarchicalModelAverager averager({.period_group_sizes = {{2, 2}, {4, 4}}, .warmup_steps = 1});
    torch::optim::SGD sgd(model.parameters(), 0.1);
    Simulation expected(4);
    for (int step = 0; step < 9; ++step) {
      train_step(model, sgd, rank, step);
      averager.average_parameters(model.parameters());
      expected.step(step, 1, step == 0 ? 1 : step % 4 == 0 ? 4 : step % 2 == 0 ? 2 : 1);
      test::expect_close(model.parameters(), expected.parameters(rank), 1e-12);
    }
  });
}

// Under the backend of two nodes the subgroups are the nodes, of 2 ranks each; otherwise all ranks
// are on one.
TEST_P(LocalSgdBackend, TheSubgroupIsTheNodeByDefault) {
  expect_torch_ranks(4, GetParam(), [](int rank, int) {
    torch::nn::Linear layer(torch::nn::LinearOptions(1, 1).bias(false));
    DistributedDataParallel model(layer);
    model.register_comm_hook(comm_hooks::post_local_sgd(PostLocalSgdState({})));
    model(torch::full({1, 1}, static_cast<double>(1 << rank)).to(at::kFloat)).sum().backward();
    const bool several = topology().size() == 2;
    EXPECT_EQ(layer->weight.grad().item<float>(), !several ? 15.0f / 4 : rank < 2 ? 1.5f : 6.0f);
  });
}

TEST(LocalSgd, AResumedRunGoesOnAtItsStep) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    PostLocalSgdState state({.subgroup = new_subgroups(1).current, .start_local_sgd_iter = 2});
    PeriodicModelAverager averager({.period = 4, .warmup_steps = 2});
    state.load_state_dict(2);
    averager.load_state_dict(3);
    torch::nn::Linear layer(torch::nn::LinearOptions(1, 1).bias(false));
    DistributedDataParallel model(layer);
    model.register_comm_hook(comm_hooks::post_local_sgd(state));
    model(torch::full({1, 1}, rank + 1.0f)).sum().backward();
    EXPECT_EQ(layer->weight.grad().item<float>(), rank + 1.0f);
    torch::nn::init::constant_(layer->weight, rank);
    averager.average_parameters(model.parameters());
    EXPECT_EQ(layer->weight.item<float>(), rank);
    averager.load_state_dict(6);
    averager.average_parameters(model.parameters());
    EXPECT_EQ(layer->weight.item<float>(), 0.5f);
    EXPECT_EQ(state.state_dict().toInt(), 3);
    EXPECT_EQ(averager.state_dict().toInt(), 7);
    EXPECT_THAT([&] { averager.load_state_dict("six"); },
                ThrowsMessage<Error>(HasSubstr("PeriodicModelAverager::load_state_dict")));
  });
}

TEST(LocalSgd, AveragesOnlyParametersWithAGradient) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const auto with = torch::full({2}, rank, at::kDouble).requires_grad_();
    const auto without = torch::full({2}, rank, at::kDouble).requires_grad_();
    with.mutable_grad() = torch::ones({2}, at::kDouble);
    PeriodicModelAverager averager({.period = 1});
    averager.average_parameters({without, with});
    EXPECT_EQ(with[0].item<double>(), 0.5);
    EXPECT_EQ(without[0].item<double>(), rank);
  });
}

TEST(LocalSgd, RejectsOptionsOutOfTheirRange) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    EXPECT_THAT([] { PostLocalSgdState({.start_local_sgd_iter = -1}); },
                ThrowsMessage<UsageError>(HasSubstr("start_local_sgd_iter of -1")));
    const PostLocalSgdState state({});
    const CommHook hook = comm_hooks::post_local_sgd(state);
    EXPECT_THAT([&] { comm_hooks::post_local_sgd(state); },
                ThrowsMessage<UsageError>(HasSubstr("a state of its own")));
    EXPECT_THAT([] { PeriodicModelAverager({.period = 0}); },
                ThrowsMessage<UsageError>(HasSubstr("period of 0")));
    EXPECT_THAT([] { PeriodicModelAverager({.warmup_steps = -2}); },
                ThrowsMessage<UsageError>(HasSubstr("warmup_steps of -2")));
    EXPECT_THAT(
        [] {
          HierarchicalModelAverager({.period_group_sizes = {{4, 1}}});
        },
        ThrowsMessage<UsageError>(HasSubstr("all ranks of the world")));
    EXPECT_THAT(
        [] {
          HierarchicalModelAverager({.period_group_sizes = {{4, 2}, {2, 2}}});
        },
        ThrowsMessage<UsageError>(HasSubstr("have period 2 with 2 ranks, of 2")));
  });
}

}  // namespace
}  // namespace paceline
