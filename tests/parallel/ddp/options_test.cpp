#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <atomic>
#include <cmath>
#include <numeric>
#include <thread>

#include <paceline/collectives.h>
#include <paceline/ddp.h>

#include "support/eventually.h"
#include "support/shared.h"
#include "support/small_net.h"
#include "support/thread_ranks.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using test::backends;
using test::batch_of;
using test::expect_same_gradients;
using test::expect_torch_ranks;
using test::loss_of;
using test::make_net;
using test::RankContext;
using test::whole_batch_gradients;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr double kTinyBucket = 0.001;

// Three steps with the options, each against the whole batch in one process.
void expect_whole_batch(const DdpOptions& options, int rank, int size) {
  DistributedDataParallel model(make_net(at::kDouble), options);
  for (int step = 0; step < 3; ++step) {
    model.module()->zero_grad(step != 1);
    const auto x = batch_of(rank, step, at::kDouble);
    loss_of(model(x), x).backward();
    expect_same_gradients(model.parameters(), whole_batch_gradients(step, size));
  }
}

using DdpOptionsWorldsUpTo3 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, DdpOptionsWorldsUpTo3, test::worlds({2, 3}), test::CaseName());

TEST_P(DdpOptionsWorldsUpTo3, EachGivesTheGradientOfTheWholeBatch) {
  const std::vector<DdpOptions> all{
      {.broadcast_buffers = false},
      {.init_sync = false},
      {.bucket_cap_mb = 25},
      {.bucket_cap_mb = kTinyBucket},
      {.gradient_as_bucket_view = false},
      {.bucket_cap_mb = kTinyBucket,
       .find_unused_parameters = true,
       .gradient_as_bucket_view = false},
      {.bucket_cap_mb = kTinyBucket, .static_graph = true},
      {.static_graph = true, .bucket_cap_mb_list = {kTinyBucket, 0.01}},
      {.delay_all_reduce_named_params = {"last.weight", "second.bias"},
       .param_to_hook_all_reduce = "first.weight"},
      {.bucket_cap_mb = kTinyBucket,
       .find_unused_parameters = true,
       .skip_all_reduce_unused_params = true},
      {.check_sync_every = 1}};
  expect_torch_ranks(GetParam(), [&](int rank, int n) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      SCOPED_TRACE(i);
      expect_whole_batch(all[i], rank, n);
    }
  });
}

TEST(DdpOptions, RejectsInvalidValues) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    const auto refuses = [](const DdpOptions& options, const char* text) {
      EXPECT_THAT([&] { DistributedDataParallel(make_net(at::kFloat), options); },
                  ThrowsMessage<UsageError>(HasSubstr(text)));
    };
    refuses({.device_ids = {at::kCPU}}, "this one is on the CPU");
    refuses({.output_device = at::Device(at::kCPU)}, "this one is on the CPU");
    refuses({.bucket_cap_mb = 1, .bucket_cap_mb_list = {1}}, "exclude each other");
    refuses({.bucket_cap_mb_list = {1, -1}}, "bucket_cap_mb_list of -1");
    refuses({.delay_all_reduce_named_params = {"last.bias"}}, "need each other");
    refuses({.delay_all_reduce_named_params = {"nothing"}, .param_to_hook_all_reduce = "last.bias"},
            "names nothing");
    refuses(
        {.delay_all_reduce_named_params = {"last.bias"}, .param_to_hook_all_reduce = "last.bias"},
        "its own gradient");
    refuses({.skip_all_reduce_unused_params = true}, "find_unused_parameters");
    refuses({.find_unused_parameters = true,
             .static_graph = true,
             .skip_all_reduce_unused_params = true},
            "no static_graph");
    refuses({.check_sync_every = -1}, "check_sync_every of -1");
    DistributedDataParallel model(make_net(at::kFloat));
    EXPECT_THROW(model.set_samples(3), UsageError);
    EXPECT_THROW(model.register_comm_hook(CommHook()), UsageError);
  });
}

TEST(DdpOptions, WithoutBucketViewGradientsKeepTheirMemory) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    DistributedDataParallel model(make_net(at::kDouble), {.gradient_as_bucket_view = false});
    const auto parameter = model.parameters()[0];
    const void* first = nullptr;
    for (int step = 0; step < 2; ++step) {
      const auto x = batch_of(rank, step, at::kDouble);
      loss_of(model(x), x).backward();
      if (step == 0) first = parameter.grad().data_ptr();
      EXPECT_EQ(parameter.grad().data_ptr(), first);
    }
    // No optimizer nor other rank sees what one does with it.
    const auto kept = parameter.grad();
    model.module()->zero_grad();
    const auto before = kept.clone();
    const auto x = batch_of(rank, 2, at::kDouble);
    loss_of(model(x), x).backward();
    EXPECT_TRUE(torch::equal(kept, before));
  });
}

TEST(DdpOptions, WithoutInitSyncEachRankKeepsItsModel) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const auto seed = static_cast<std::uint64_t>(10 + rank);
    const DistributedDataParallel model(make_net(at::kDouble, seed), {.init_sync = false});
    EXPECT_TRUE(torch::equal(model.parameters()[0], make_net(at::kDouble, seed)->parameters()[0]));
  });
}

// Gradients of the mean loss over all samples, from one process.
std::vector<torch::Tensor> gradients_of_all(const std::vector<torch::Tensor>& batches) {
  auto net = make_net(at::kDouble);
  const auto x = torch::cat(batches);
  loss_of(net(x), x).backward();
  return net->parameters();
}

torch::Tensor uneven_batch(int rank, int step) {
  return batch_of(rank, step, at::kDouble).narrow(0, 0, 1 + (rank + step) % 5);
}

using DdpAverageWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, DdpAverageWorlds, test::worlds(), test::CaseName());

TEST_P(DdpAverageWorlds, OverSamplesIsTheGradientOfTheWholeBatch) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    DistributedDataParallel model(make_net(at::kDouble),
                                  {.bucket_cap_mb = kTinyBucket, .average = Average::samples});
    for (int step = 0; step < 4; ++step) {
      model.module()->zero_grad();
      std::vector<torch::Tensor> all;
      for (int r = 0; r < n; ++r) all.push_back(uneven_batch(r, step));
      // In the third step rank 0 has nothing, and a loss that is not a number.
      const bool idle = step == 2 && rank == 0 && n > 1;
      if (step == 2 && n > 1) all.erase(all.begin());
      const auto x = idle ? torch::empty({0, 9}, at::kDouble) : uneven_batch(rank, step);
      model.set_samples(static_cast<double>(x.size(0)));
      loss_of(model(x), x).backward();
      expect_same_gradients(model.parameters(), gradients_of_all(all));
    }
  });
}

TEST(DdpAverage, RejectsAStepWithoutSetSamples) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    DistributedDataParallel model(make_net(at::kDouble), {.average = Average::samples});
    EXPECT_THROW(model.set_samples(-1), UsageError);
    const auto x = batch_of(rank, 0, at::kDouble);
    model.set_samples(6);
    loss_of(model(x), x).backward();
    EXPECT_THAT([&] { loss_of(model(x), x).backward(); },
                ThrowsMessage<UsageError>(HasSubstr("set_samples")));
    EXPECT_THROW(model.register_comm_hook(comm_hooks::all_reduce()), UsageError);
  });
}

using DdpAverageBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, DdpAverageBackends, ::testing::ValuesIn(backends()), test::CaseName());

TEST_P(DdpAverageBackends, IgnoresTheGradientOfARankWithoutSamples) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    torch::nn::Linear fc(2, 1);
    DistributedDataParallel model(torch::nn::Sequential(table, fc), {.average = Average::samples});
    const double factor = rank == 0 ? std::nan("") : 1;
    model.set_samples(rank == 0 ? 0 : 5);
    (model(torch::tensor({rank})) * factor).sum().backward();
    const auto grad = table->weight.grad().to_dense();
    EXPECT_TRUE(grad[0].equal(torch::zeros({2})));
    EXPECT_TRUE(grad[1].equal(fc->weight[0]));
    EXPECT_EQ(fc->bias.grad().item<float>(), 1);
  });
}

using DdpCommHookWorldsUpTo4 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, DdpCommHookWorldsUpTo4, test::worlds({2, 3, 4}), test::CaseName());

TEST_P(DdpCommHookWorldsUpTo4, BuiltInHooksAverage) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    const std::pair<CommHook, double> hooks[] = {{comm_hooks::all_reduce(), 1e-12},
                                                 {comm_hooks::fp16_compress(), 2e-3},
                                                 {comm_hooks::bf16_compress(), 2e-2}};
    for (const auto& [hook, relative] : hooks) {
      DistributedDataParallel model(make_net(at::kDouble), {.bucket_cap_mb = kTinyBucket});
      model.register_comm_hook(hook);
      for (int step = 0; step < 3; ++step) {
        model.module()->zero_grad();
        const auto x = batch_of(rank, step, at::kDouble);
        loss_of(model(x), x).backward();
        const auto expected = whole_batch_gradients(step, n);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          const auto difference = model.parameters()[i].grad() - expected[i].grad();
          EXPECT_LE(difference.norm().item<double>(),
                    relative * expected[i].grad().norm().item<double>());
        }
      }
    }
  });
}

// The gradient of a rank is 2 to the power of its number, which all types represent.
TEST(DdpCommHook, BuiltInHooksAverageOverTheModelsGroup) {
  for (const auto& backend : test::backends()) {
    expect_torch_ranks(4, backend, [](int rank, int) {
      const auto low = new_group({0, 1});
      const auto high = new_group({2, 3});
      const auto& own = rank < 2 ? low : high;
      const auto gradient_by = [rank](const CommHook& hook, const ProcessGroup& group) {
        torch::nn::Linear layer(torch::nn::LinearOptions(1, 1).bias(false));
        DistributedDataParallel model(layer, {.process_group = group});
        model.register_comm_hook(hook);
        model(torch::full({1, 1}, std::exp2(rank))).sum().backward();
        return layer->weight.grad().item<float>();
      };
      const auto custom = [&](GradBucket& bucket) {
        const torch::AutoGradMode train(true);
        EXPECT_EQ(gradient_by(comm_hooks::all_reduce(), {}), 15.0f / 4);
        return comm_hooks::all_reduce()(bucket);
      };
      for (const CommHook& hook : {comm_hooks::all_reduce(), comm_hooks::fp16_compress(),
                                   comm_hooks::bf16_compress(), CommHook(custom)}) {
        EXPECT_EQ(gradient_by(hook, own), rank < 2 ? 1.5f : 6.0f);
      }
      EXPECT_EQ(gradient_by(comm_hooks::all_reduce(ProcessGroup()), own), 15.0f / 4);
    });
  }
}

TEST(DdpCommHook, BuiltInHooksWithoutAModelNeedAGroup) {
  const at::Tensor gradient = at::ones({1});
  GradBucket bucket(0, 1, gradient, {0}, {1}, {gradient.sizes()}, {gradient}, std::nullopt);
  EXPECT_THAT([&] { comm_hooks::all_reduce()(bucket); },
              ThrowsMessage<UsageError>(HasSubstr("comm_hooks::all_reduce(group)")));
}

// In float16 2048 + 1 is 2048, so sums in it would come to 512. The average is 512.75, and 513 is
// the float16 next to it.
TEST(DdpCommHook, CompressedGradientsAddUpInFloat32) {
  expect_torch_ranks(4, "paceline", [](int rank, int) {
    torch::nn::Linear layer(torch::nn::LinearOptions(1, 1).bias(false));
    DistributedDataParallel model(layer);
    model.register_comm_hook(comm_hooks::fp16_compress());
    model(torch::full({1, 1}, rank == 0 ? 2048.0 : 1.0)).sum().backward();
    EXPECT_FLOAT_EQ(layer->weight.grad().item<float>(), 513.0f);
  });
}

TEST(DdpCommHook, SeesEveryBucketOfEveryStepInOrder) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    DistributedDataParallel model(make_net(at::kDouble), {.bucket_cap_mb = kTinyBucket});
    std::vector<std::size_t> seen;
    int lasts = 0;
    // Stateful: it counts, and leaves every rank its own gradient.
    model.register_comm_hook([&](GradBucket& bucket) {
      seen.push_back(bucket.getIndex());
      lasts += bucket.isLast() ? 1 : 0;
      const auto gradients = bucket.getGradients();
      const auto parameters = bucket.getParameters();
      EXPECT_EQ(gradients.size(), parameters.size());
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        EXPECT_EQ(gradients[i].sizes(), parameters[i].sizes());
      }
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(bucket.getBuffer() * 2);
      return future;
    });
    for (int step = 0; step < 2; ++step) {
      model.module()->zero_grad();
      const auto x = batch_of(rank, step, at::kDouble);
      loss_of(model(x), x).backward();
      auto plain = make_net(at::kDouble);
      (2 * loss_of(plain(x), x)).backward();
      expect_same_gradients(model.parameters(), plain->parameters());
    }
    EXPECT_EQ(lasts, 2);
    ASSERT_GT(seen.size(), 4u);
    for (std::size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i], i % (seen.size() / 2));
  });
}

TEST(DdpCommHook, EveryRankNamesAHookThatThrows) {
  const auto ends = test::run_torch_ranks(3, "paceline", [](const RankContext& context) {
    const World world = init_process_group(context.init);
    DistributedDataParallel model(make_net(at::kDouble));
    model.register_comm_hook([&](GradBucket& bucket) {
      if (context.rank == 1) throw std::runtime_error("no such wire");
      return comm_hooks::all_reduce()(bucket);
    });
    const auto x = batch_of(context.rank, 0, at::kDouble);
    loss_of(model(x), x).backward();
    return std::string("no error");
  });
  for (const auto& end : ends) {
    EXPECT_THAT(end.report, AllOf(HasSubstr("communication hook of rank 1 failed"),
                                  HasSubstr("last.bias"), HasSubstr("no such wire")));
  }
}

TEST(DdpCommHook, EveryRankNamesAHookThatNeverCompletes) {
  const auto ends = test::run_torch_ranks(2, "paceline", [](const RankContext& context) {
    InitOptions init = context.init;
    init.timeout = std::chrono::seconds(10);
    const World world = init_process_group(init);
    DistributedDataParallel model(make_net(at::kDouble));
    model.register_comm_hook([](GradBucket&) {
      return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    });
    const auto x = batch_of(context.rank, 0, at::kDouble);
    loss_of(model(x), x).backward();
    return std::string("no error");
  });
  for (const auto& end : ends) {
    EXPECT_THAT(end.report, HasSubstr("has not completed its future for bucket 0 (last.bias"));
  }
}

// Calls that have nothing to do with the hook do not put its end off.
TEST(DdpCommHook, OneThatNeverAnswersIsNamedWhileOtherCallsGoOn) {
  const auto ends = test::run_torch_ranks(2, "paceline", [](const RankContext& context) {
    InitOptions init = context.init;
    init.timeout = std::chrono::seconds(4);
    const World world = init_process_group(init);
    DistributedDataParallel model(make_net(at::kDouble));
    model.register_comm_hook([](GradBucket&) {
      return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    });
    const auto x = batch_of(context.rank, 0, at::kDouble);
    const auto loss = loss_of(model(x), x);
    std::thread other([] {
      try {
        while (true) all_reduce_async(torch::ones({1 << 16})).wait();
      } catch (const Error&) {  // the group has failed
      }
    });
    std::string text = "no error";
    try {
      loss.backward();
    } catch (const Timeout& error) {
      text = error.what();
    }
    other.join();
    return text;
  });
  for (const auto& end : ends) {
    EXPECT_THAT(end.report, HasSubstr("has not completed its future for bucket 0 (last.bias"));
  }
}

TEST(DdpCheckSync, NamesTheFirstDifference) {
  const auto ends = test::run_torch_ranks(3, "paceline", [](const RankContext& context) {
    const World world = init_process_group(context.init);
    DistributedDataParallel model(make_net(at::kDouble), {.check_sync_every = 2});
    torch::optim::SGD sgd(model.parameters(), 0.1);
    for (int step = 0; step < 5; ++step) {
      const auto x = batch_of(context.rank, step, at::kDouble);
      sgd.zero_grad();
      loss_of(model(x), x).backward();
      sgd.step();
      if (step == 2 && context.rank == 2) {
        const torch::NoGradGuard no_grad;
        model.module()->second->bias[5] += 1e-9;
      }
    }
    return std::string("no error");
  });
  for (const auto& end : ends) {
    EXPECT_THAT(end.report, AllOf(HasSubstr("step 4"), HasSubstr("second.bias on rank 2 differs")));
  }
}

struct WordsImpl : torch::nn::Module {
  WordsImpl() {
    torch::manual_seed(8);
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(20, 3).sparse(true)));
    fc = register_module("fc", torch::nn::Linear(3, 2));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& words) { return fc(table(words)).pow(2).sum(); }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Words);

using DdpBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, DdpBackends, ::testing::ValuesIn(backends()), test::CaseName());

TEST_P(DdpBackends, SparseGradientsStaySparse) {
  for (const Average average : {Average::ranks, Average::samples}) {
    expect_torch_ranks(3, GetParam(), [&](int rank, int n) {
      DistributedDataParallel model(Words(), {.average = average});
      for (int step = 0; step < 2; ++step) {
        model.module()->zero_grad();
        Words plain;
        double total = 0;
        for (int r = 0; r < n; ++r) total += average == Average::ranks ? 1 : r + 1;
        for (int r = 0; r < n; ++r) {
          const double weight = average == Average::ranks ? 1 : r + 1;
          (plain(torch::tensor({r, r + step, 7})) * (weight / total)).backward();
        }
        if (average == Average::samples) model.set_samples(rank + 1);
        model(torch::tensor({rank, rank + step, 7})).backward();
        const auto got = model.module()->table->weight.grad();
        ASSERT_TRUE(got.is_sparse());
        EXPECT_LE(got._nnz(), 8) << "rows that nobody used";
        EXPECT_TRUE(torch::allclose(got.to_dense(), plain->table->weight.grad().to_dense()));
        EXPECT_TRUE(torch::allclose(model.module()->fc->weight.grad(), plain->fc->weight.grad()));
      }
    });
  }
}

TEST_P(DdpBackends, SparseGradientsMayBeDelayed) {
  expect_torch_ranks(2, GetParam(), [](int rank, int n) {
    DistributedDataParallel model(Words(), {.delay_all_reduce_named_params = {"table.weight"},
                                            .param_to_hook_all_reduce = "fc.weight"});
    for (int step = 0; step < 2; ++step) {
      model.module()->zero_grad();
      Words plain;
      for (int r = 0; r < n; ++r) (plain(torch::tensor({r, 7})) / n).backward();
      model(torch::tensor({rank, 7})).backward();
      const auto got = model.module()->table->weight.grad().to_dense();
      EXPECT_TRUE(torch::allclose(got, plain->table->weight.grad().to_dense()));
    }
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

TEST(Ddp, RejectsUnsupportedModels) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    auto net = make_net(at::kDouble);
    DistributedDataParallel model(net);
    EXPECT_THAT([&] { const DistributedDataParallel second(net); },
                ThrowsMessage<UsageError>(HasSubstr("first.weight is wrapped by another")));
    const auto x = batch_of(rank, 0, at::kDouble);
    EXPECT_THAT([&] { loss_of(model(x), x).backward({}, false, true); },
                ThrowsMessage<UsageError>(HasSubstr("create_graph")));
    net->register_module("late", torch::nn::Linear(1, 1));
    EXPECT_THAT(
        [&] {
          for (int i = 0; i < 8; ++i) model(x);
        },
        ThrowsMessage<UsageError>(HasSubstr("8 parameters and had 6")));
  });
}

TEST_P(DdpBackends, StatsContainTheTimesOfAStep) {
  const test::Shared<std::atomic<int>> begun;  // backwards, on rank 0
  expect_torch_ranks(2, GetParam(), [&](int rank, int /*size*/) {
    DistributedDataParallel model(make_net(at::kDouble), {.bucket_cap_mb = 0.004});
    constexpr std::chrono::milliseconds kSlow(200);
    for (int step = 0; step < 3; ++step) {
      const auto x = batch_of(rank, step, at::kDouble);
      const auto output = model(x);
      model.module()->zero_grad();
      if (rank == 0) {
        ++*begun;
      } else {
        EXPECT_TRUE(test::eventually([&] { return *begun > step; }));
        std::this_thread::sleep_for(kSlow);  // takes part in its backward's time
      }
      loss_of(output, x).backward();
    }
    const DdpStats& stats = model.stats();
    EXPECT_EQ(stats.steps, 3u);
    std::size_t bytes = 0;
    for (const auto& parameter : model.parameters()) bytes += parameter.nbytes();
    EXPECT_GE(stats.last.bytes, bytes);
    EXPECT_LE(stats.last.bytes, bytes + 64 * model.parameters().size());
    EXPECT_EQ(stats.last.copied, bytes);
    EXPECT_GT(stats.last.buckets, 1u);
    EXPECT_EQ(stats.total.buckets, 3 * stats.last.buckets);
    EXPECT_GT(stats.last.forward.count(), 0);
    EXPECT_GE(stats.last.communication, stats.last.overlap);
    EXPECT_GE(stats.last.communication, stats.last.waiting);
    EXPECT_GE(stats.hidden(), 0);
    EXPECT_LE(stats.hidden(), 1);
    // Nothing but the other rank's sleep makes one wait so long.
    EXPECT_GT(rank == 0 ? stats.total.waiting : stats.total.backward, kSlow);
  });
}

struct LayersImpl : torch::nn::Module {
  explicit LayersImpl(bool backwards) {
    if (!backwards) register_module("first", first);
    register_module("last", last);
    if (backwards) register_module("first", first);
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::tanh(first(x))); }
  torch::nn::Linear first{9, 33};
  torch::nn::Linear last{33, 2};
};

// However they were registered.
TEST(Ddp, BucketsFollowTheOrderOfArrival) {
  for (const bool backwards : {false, true}) {
    for (const bool is_static : {false, true}) {
      expect_torch_ranks(2, "paceline", [=](int, int) {
        auto net = std::make_shared<LayersImpl>(backwards);
        DistributedDataParallel model(net, {.bucket_cap_mb = 0.0001, .static_graph = is_static});
        std::vector<const void*> order;
        model.register_comm_hook([&](GradBucket& bucket) {
          for (const auto& one : bucket.getParameters()) order.push_back(one.unsafeGetTensorImpl());
          return comm_hooks::all_reduce()(bucket);
        });
        for (int step = 0; step < 2; ++step) {
          order.clear();
          model(torch::ones({1, 9})).sum().backward();
        }
        const auto of = [](const torch::nn::Linear& layer) {
          return std::vector<const void*>{layer->weight.unsafeGetTensorImpl(),
                                          layer->bias.unsafeGetTensorImpl()};
        };
        ASSERT_EQ(order.size(), 4U);
        const auto half = order.begin() + 2;
        EXPECT_THAT(std::vector(order.begin(), half),
                    ::testing::UnorderedElementsAreArray(of(net->last)));
        EXPECT_THAT(std::vector(half, order.end()),
                    ::testing::UnorderedElementsAreArray(of(net->first)));
      });
    }
  }
}

TEST(Ddp, NewBucketsKeepGradients) {
  expect_torch_ranks(2, "paceline", [](int rank, int n) {
    const auto make = [] {
      torch::manual_seed(1);
      auto net = std::make_shared<LayersImpl>(true);
      net->to(torch::kDouble);
      return net;
    };
    DistributedDataParallel model(make(), {.bucket_cap_mb = 0.0001});
    auto plain = make();
    // Accumulation, local steps and views across the rebuild, all at once.
    for (int step = 0; step < 6; ++step) {
      if (step % 4 == 3) {
        model.module()->zero_grad(step == 3);
        plain->zero_grad(step == 3);
      }
      {
        const auto guard = model.no_sync(step % 3 == 1);
        const auto x = batch_of(rank, step, at::kDouble);
        loss_of(model(x), x).backward();
      }
      for (int r = 0; r < n; ++r) {
        const auto x = batch_of(r, step, at::kDouble);
        (loss_of(plain->forward(x), x) / n).backward();
      }
      if (step % 3 != 1) expect_same_gradients(model.parameters(), plain->parameters());
    }
  });
}

}  // namespace
}  // namespace paceline
