#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <limits>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/sampler.h>

#include "parallel/ddp/bucketing.h"
#include "support/small_net.h"
#include "support/thread_ranks.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using test::backends;
using test::batch_of;
using test::bytes_of;
using test::expect_close;
using test::expect_same_gradients;
using test::expect_torch_ranks;
using test::loss_of;
using test::make_net;
using test::Net;
using test::NetImpl;
using test::RankContext;
using test::whole_batch_gradients;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kSteps = 20;

std::vector<torch::Tensor> train_whole_batches(int size, at::ScalarType type) {
  auto net = make_net(type);
  torch::optim::SGD sgd(net->parameters(), 0.05);
  for (int step = 0; step < kSteps; ++step) {
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
  for (int step = 0; step < kSteps; ++step) {
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
  for (int step = 0; step < kSteps; ++step) {
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

// Part of the model is used only when told; `extra` never gets a gradient otherwise.
struct BranchesImpl : torch::nn::Module {
  torch::nn::Linear base{register_module("base", torch::nn::Linear(9, 4))};
  torch::nn::Linear extra{register_module("extra", torch::nn::Linear(9, 4))};
  torch::Tensor forward(const torch::Tensor& x, bool use_extra) {
    return use_extra ? base(x) + extra(x) : base(x);
  }
};
TORCH_MODULE(Branches);

Branches make_branches() {
  torch::manual_seed(4);
  Branches net;
  net->to(at::kDouble);
  return net;
}

// Whether a rank uses the extra branch in a micro-batch of a step: in step 0 nobody, in step 1
// rank 0, in step 2 the last rank in the first micro-batch only, in step 3 everybody, and in step 4
// nobody again.
bool uses_extra(int rank, int size, int step, int micro) {
  if (step == 1) return rank == 0;
  if (step == 2) return rank == size - 1 && micro == 0;
  return step == 3;
}

using DdpWorldsUpTo5 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, DdpWorldsUpTo5, test::worlds({2, 3, 5}), test::CaseName());

TEST_P(DdpWorldsUpTo5, AccumulatesWithUnusedParameters) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    DistributedDataParallel model(make_branches(),
                                  {.bucket_cap_mb = 0.0001, .find_unused_parameters = true});
    auto plain = make_branches();
    const auto mark = torch::full({4, 9}, 7.0, at::kDouble);
    model.module()->extra->weight.mutable_grad() = mark.clone();
    plain->extra->weight.mutable_grad() = mark.clone();
    for (int step = 0; step < 5; ++step) {
      if (step > 0) {
        model.module()->zero_grad(step % 2 == 0);
        plain->zero_grad(step % 2 == 0);
      }
      for (int micro = 0; micro < 3; ++micro) {
        const auto guard = model.no_sync(micro < 2);
        const auto x = batch_of(rank, 10 * step + micro, at::kDouble);
        model(x, uses_extra(rank, n, step, micro)).pow(2).sum().backward();
        for (int r = 0; r < n; ++r) {
          const auto y = batch_of(r, 10 * step + micro, at::kDouble);
          (plain(y, uses_extra(r, n, step, micro)).pow(2).sum() / n).backward();
        }
      }
      for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
        const auto expected = plain->parameters()[i].grad();
        const auto got = model.parameters()[i].grad();
        ASSERT_EQ(got.defined(), expected.defined()) << "step " << step << " tensor " << i;
        if (expected.defined()) {
          EXPECT_TRUE(torch::allclose(got, expected, 1e-12, 1e-13)) << "step " << step << i;
        }
      }
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

using DdpRanksUpTo3 = test::SizeTest;
INSTANTIATE_TEST_SUITE_P(, DdpRanksUpTo3, ::testing::Values(2, 3), test::CaseName());

TEST_P(DdpRanksUpTo3, EveryRankNamesParametersWithoutGradient) {
  const int size = GetParam();
  const auto ends = test::run_torch_ranks(size, "paceline", [](const RankContext& context) {
    const World world = init_process_group(context.init);
    DistributedDataParallel model(make_branches());
    const auto x = batch_of(context.rank, 0, at::kDouble);
    model(x, context.rank != 1).sum().backward();
    return std::string("no error");
  });
  for (const auto& end : ends) {
    EXPECT_THAT(end.report,
                AllOf(HasSubstr("2 of 4 parameters got no gradient"),
                      HasSubstr("extra.weight, extra.bias"), HasSubstr("find_unused_parameters")));
  }
}

// A backward that reaches this tensor throws.
void throw_at(const torch::Tensor& tensor) {
  tensor.register_hook(
      [](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("bad grad"); });
}

TEST_P(DdpWorldsUpTo8, TrainsAfterABackwardThatThrewOnAllRanks) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    DistributedDataParallel model(make_net(at::kDouble), {.bucket_cap_mb = 0.0001});
    for (int step = 0; step < 4; ++step) {
      model.module()->zero_grad();
      const auto x = batch_of(rank, step, at::kDouble);
      if (step % 2 == 0) {
        const auto hidden = torch::tanh(model.module()->first(x));
        throw_at(hidden);
        static_cast<void>(model(x));  // arms the step
        const auto output = model.module()->last(torch::tanh(model.module()->second(hidden)));
        EXPECT_THROW(loss_of(output, x).backward(), std::exception);
        continue;
      }
      loss_of(model(x), x).backward();
      expect_same_gradients(model.parameters(), whole_batch_gradients(step, n));
    }
  });
}

using DdpBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, DdpBackends, ::testing::ValuesIn(backends()), test::CaseName());

TEST_P(DdpBackends, NamesTheFirstDifferenceOfModels) {
  const std::string& backend = GetParam();
  const auto construct = [&](auto make) {
    return test::run_torch_ranks(3, backend, [&](const RankContext& context) {
      const World world = init_process_group(context.init);
      const DistributedDataParallel model(make(context.rank));
      return std::string("no error");
    });
  };
  for (const auto& end :
       construct([](int rank) { return torch::nn::Linear(9, rank == 1 ? 5 : 4); })) {
    EXPECT_THAT(end.report,
                AllOf(HasSubstr("weight, a parameter of shape [4, 9] and type Float on rank 0"),
                      HasSubstr("weight, a parameter of shape [5, 9] and type Float on rank 1")));
  }
  for (const auto& end : construct([](int rank) {
         torch::nn::Linear linear(9, 4);
         if (rank == 2) linear->to(at::kDouble);
         return linear;
       })) {
    EXPECT_THAT(end.report,
                HasSubstr("weight, a parameter of shape [4, 9] and type Double on rank 2"));
  }
  for (const auto& end : construct([](int rank) {
         return torch::nn::Linear(torch::nn::LinearOptions(9, 4).bias(rank != 1));
       })) {
    EXPECT_THAT(end.report, AllOf(HasSubstr("2 parameters and buffers on rank 0, 1 on rank 1"),
                                  HasSubstr("nothing more on rank 1")));
  }
  for (const auto& end : construct([](int rank) {
         torch::nn::Conv2d conv(3, 4, 2);
         if (rank == 1)
           conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
         return conv;
       })) {
    EXPECT_THAT(end.report, HasSubstr("type Float with strides [12, 1, 6, 3] on rank 1"));
  }
  for (const auto& end : construct([](int rank) {
         torch::nn::Linear linear(9, 4);
         linear->bias.requires_grad_(rank != 2);
         return linear;
       })) {
    EXPECT_THAT(end.report, HasSubstr("bias, a frozen parameter of shape [4] and type Float on "
                                      "rank 2"));
  }
  for (const auto& end : construct([](int rank) {
         torch::nn::BatchNorm1d norm(4);
         if (rank == 1) norm->running_mean.resize_({2, 2});
         return norm;
       })) {
    EXPECT_THAT(end.report, HasSubstr("running_mean, a buffer of shape [2, 2]"));
  }
}

// Rank 1's backward throws when some of its buckets are published; the others learn of it and all
// go on, whatever zero_grad does.
TEST_P(DdpWorldsUpTo8, TrainsAfterOneRanksBackwardThrew) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    DistributedDataParallel model(make_net(at::kDouble), {.bucket_cap_mb = 0.0001});
    for (int step = 0; step < 6; ++step) {
      const auto x = batch_of(rank, step, at::kDouble);
      if (step % 2 == 0) {
        static_cast<void>(model(x));  // arms the step
        const auto hidden = torch::tanh(model.module()->first(x));
        if (rank == 1) throw_at(hidden);
        const auto output = model.module()->last(torch::tanh(model.module()->second(hidden)));
        EXPECT_THROW(loss_of(output, x).backward(), std::exception) << "rank " << rank;
        model.module()->zero_grad(step % 4 == 0);
        continue;
      }
      loss_of(model(x), x).backward();
      expect_same_gradients(model.parameters(), whole_batch_gradients(step, n));
      model.module()->zero_grad(false);
    }
  });
}

TEST_P(DdpBackends, RejectsABackwardAfterOneThatThrewWithoutAForward) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    DistributedDataParallel model(make_net(at::kDouble), {.bucket_cap_mb = 0.0001});
    const auto x = batch_of(rank, 0, at::kDouble);
    static_cast<void>(model(x));
    const auto hidden = torch::tanh(model.module()->first(x));
    throw_at(hidden);
    const auto loss = model.module()->last(torch::tanh(model.module()->second(hidden))).sum();
    EXPECT_ANY_THROW(loss.backward({}, /*retain_graph=*/true));
    EXPECT_THAT([&] { loss.backward(); },
                ThrowsMessage<UsageError>(HasSubstr("run a forward before the next")));
    model(x).sum().backward();
  });
}

TEST_P(DdpBackends, AllowsAForwardInEvalModeOnOneRank) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    DistributedDataParallel model(torch::nn::BatchNorm1d(3));
    const auto x = torch::randn({5, 3});
    for (int step = 0; step < 3; ++step) {
      if (rank == 0) {
        model.eval();
        static_cast<void>(model(x));
        model.train();
      }
      model(x).pow(2).sum().backward();
    }
  });
}

TEST_P(DdpBackends, BuffersFollowRankZeroByPyTorchsRule) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    for (const bool broadcast_buffers : {true, false}) {
      torch::nn::BatchNorm1d norm(3);
      norm->running_mean.fill_(rank);
      DistributedDataParallel model(norm, {.broadcast_buffers = broadcast_buffers});
      EXPECT_EQ(norm->running_mean[0].item<float>(), 0) << "construction makes them equal";

      const auto x = torch::randn({5, 3}) + rank;
      const auto step = [&](bool sync) {
        const auto guard = model.no_sync(!sync);
        model(x).pow(2).sum().backward();
      };
      norm->running_mean.fill_(rank);
      step(true);
      norm->running_mean.fill_(rank);
      {
        const at::NoGradGuard no_grad;
        model.eval();
        static_cast<void>(model(x));
        model.train();
      }
      EXPECT_EQ(norm->running_mean[0].item<float>(), rank) << "not with grad mode off";
      norm->options.momentum(0.0);
      step(false);  // the step before was synchronised
      EXPECT_EQ(norm->running_mean[0].item<float>(), broadcast_buffers ? 0 : rank);
      norm->running_mean.fill_(rank);
      step(true);  // the step before was not
      EXPECT_EQ(norm->running_mean[0].item<float>(), rank);
    }
  });
}

struct PairImpl : torch::nn::Module {
  torch::Tensor w{register_parameter("w", torch::ones({2}))};
  std::pair<torch::Tensor, int> forward(const torch::Tensor& a, const std::string& b, int c) {
    return {(w * a).sum() * static_cast<double>(b.size()), c};
  }
};
TORCH_MODULE(Pair);

TEST(Ddp, SupportsAnyForwardSignatureAndSharedParameters) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    DistributedDataParallel model(Pair{});
    const auto [loss, number] = model(torch::full({2}, rank + 1.0f), "abc", 5);
    loss.backward();
    EXPECT_EQ(number, 5);
    EXPECT_EQ(model.module()->w.grad()[0].item<float>(), 4.5f);

    auto shared = std::make_shared<torch::nn::Linear>(3, 3);
    torch::nn::Sequential twice(*shared, torch::nn::Tanh(), *shared);
    DistributedDataParallel tied(twice);
    tied(torch::ones({1, 3})).sum().backward();
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

// The order of arrival is that of the first step, whatever follows it before the next forward.
TEST_P(DdpBackends, BucketsArePutInOrderAfterASecondBackwardThroughTheFirstForward) {
  expect_torch_ranks(2, GetParam(), [](int rank, int n) {
    DistributedDataParallel model(make_net(at::kDouble), {.bucket_cap_mb = 0.001});
    const auto first = batch_of(rank, 0, at::kDouble);
    const auto output = model(first);
    loss_of(output, first).backward({}, /*retain_graph=*/true);
    output.sum().backward();
    model.module()->zero_grad();
    const auto x = batch_of(rank, 1, at::kDouble);
    loss_of(model(x), x).backward();
    expect_same_gradients(model.parameters(), test::whole_batch_gradients(1, n));
  });
}

TEST(Ddp, BucketsAreFilledInOrder) {
  const auto floats = [](std::int64_t n) { return torch::zeros({n}); };
  const std::vector<at::Tensor> parameters{floats(100), floats(3), floats(40),
                                           torch::zeros({5}, at::kDouble), floats(17)};
  ddp::BucketPlan plan;
  ddp::add_buckets(plan, parameters, std::vector<std::size_t>{4, 3, 2, 1, 0},
                   {.caps = {4 * 32, 4 * 64}, .dedicated = 4 * 1000});
  ASSERT_EQ(plan.buckets.size(), 4u);
  EXPECT_THAT(plan.buckets[0].parameters, ElementsAre(4)) << "the first is smaller";
  EXPECT_THAT(plan.buckets[1].parameters, ElementsAre(3)) << "of a type of its own";
  EXPECT_THAT(plan.buckets[2].parameters, ElementsAre(2, 1));
  EXPECT_THAT(plan.buckets[3].parameters, ElementsAre(0)) << "larger than a bucket";
  EXPECT_EQ(plan.places[1].offset, 48) << "on a cache line";
  EXPECT_EQ(plan.buckets[2].count, 64);
}

TEST(Ddp, LargeGradientsHaveBucketsOfTheirOwn) {
  const auto floats = [](std::int64_t n) { return torch::zeros({n}); };
  const std::vector<at::Tensor> parameters{floats(7), floats(1001), floats(8), floats(1000)};
  ddp::BucketPlan plan;
  ddp::add_buckets(plan, parameters, std::vector<std::size_t>{3, 2, 1, 0},
                   {.caps = {4 * 64}, .dedicated = 4 * 1000});
  ASSERT_EQ(plan.buckets.size(), 3u);
  EXPECT_THAT(plan.buckets[0].parameters, ElementsAre(3));
  EXPECT_THAT(plan.buckets[1].parameters, ElementsAre(2, 0)) << "a large one between them";
  EXPECT_THAT(plan.buckets[2].parameters, ElementsAre(1));
  EXPECT_TRUE(plan.buckets[2].dedicated);
  EXPECT_EQ(plan.buckets[2].count, 1001) << "there is nothing to align";
}

TEST(DistributedSampler, TakesRankAndSizeFromTheWorld) {
  expect_torch_ranks(3, "paceline", [](int rank, int size) {
    EXPECT_EQ(data::DistributedSampler(10).indices(),
              data::DistributedSampler(10, {.num_replicas = size, .rank = rank}).indices());
    EXPECT_NE(
        data::DistributedSampler(10).indices(),
        data::DistributedSampler(10, {.num_replicas = size, .rank = (rank + 1) % size}).indices());
  });
}

TEST(Ddp, RejectsInvalidOptions) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    EXPECT_THROW(DistributedDataParallel(Net{}, {.bucket_cap_mb = 0}), UsageError);
    EXPECT_THROW(DistributedDataParallel(torch::nn::Tanh()), UsageError);
    EXPECT_THROW(DistributedDataParallel(std::shared_ptr<NetImpl>()), UsageError);
    const DistributedDataParallel all_in_one(
        Net{}, {.bucket_cap_mb = std::numeric_limits<double>::infinity()});
  });
}

}  // namespace
}  // namespace paceline
