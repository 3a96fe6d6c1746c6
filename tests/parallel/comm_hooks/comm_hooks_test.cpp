#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <chrono>
#include <cmath>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
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
using test::expect_same_gradients;
using test::expect_torch_ranks;
using test::kTinyBucket;
using test::loss_of;
using test::make_net;
using test::RankContext;
using test::whole_batch_gradients;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

using DdpCommHookWorldsUpTo4 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, DdpCommHookWorldsUpTo4, test::worlds({2, 3, 4}), test::CaseName());

TEST_P(DdpCommHookWorldsUpTo4, BuiltInHooksAverage) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    // Sees what it gets from a wrapper.
    const CommHook inner = [](GradBucket& bucket) {
      EXPECT_EQ(bucket.getBuffer().scalar_type(), at::kFloat);
      EXPECT_EQ(bucket.getGradients()[0].scalar_type(), at::kFloat);
      return comm_hooks::all_reduce()(bucket);
    };
    const std::pair<CommHook, double> hooks[] = {{comm_hooks::all_reduce(), 1e-12},
                                                 {comm_hooks::predivided_all_reduce(3), 1e-12},
                                                 {comm_hooks::fp32_wrapper(inner), 2e-6},
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

// The average over `group` that `hook` computes. `gradient` is of this rank.
float averaged_by(const CommHook& hook, double gradient, const ProcessGroup& group = {}) {
  torch::nn::Linear layer(torch::nn::LinearOptions(1, 1).bias(false));
  DistributedDataParallel model(layer, {.process_group = group});
  model.register_comm_hook(hook);
  model(torch::full({1, 1}, gradient)).sum().backward();
  return layer->weight.grad().item<float>();
}

// The gradient of a rank is 2 to the power of its number, which all types represent.
TEST(DdpCommHook, BuiltInHooksAverageOverTheModelsGroup) {
  for (const auto& backend : test::backends()) {
    expect_torch_ranks(4, backend, [](int rank, int) {
      const auto low = new_group({0, 1});
      const auto high = new_group({2, 3});
      const auto& own = rank < 2 ? low : high;
      const double gradient = std::exp2(rank);
      const auto custom = [&](GradBucket& bucket) {
        const torch::AutoGradMode train(true);
        EXPECT_EQ(averaged_by(comm_hooks::all_reduce(), gradient), 15.0f / 4);
        return comm_hooks::all_reduce()(bucket);
      };
      for (const CommHook& hook : {comm_hooks::all_reduce(), comm_hooks::fp16_compress(),
                                   comm_hooks::bf16_compress(), CommHook(custom)}) {
        EXPECT_EQ(averaged_by(hook, gradient, own), rank < 2 ? 1.5f : 6.0f);
      }
      EXPECT_EQ(averaged_by(comm_hooks::all_reduce(ProcessGroup()), gradient, own), 15.0f / 4);
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
    const double gradient = rank == 0 ? 2048.0 : 1.0;
    EXPECT_FLOAT_EQ(averaged_by(comm_hooks::fp16_compress(), gradient), 513.0f);
  });
}

// The sum of 4 times 40000 is too large for float16.
TEST(DdpCommHook, CompressedAveragesStayInTheRangeOfFloat16) {
  for (const auto& backend : test::backends()) {
    expect_torch_ranks(4, backend, [](int, int) {
      EXPECT_EQ(averaged_by(comm_hooks::fp16_compress(), 40000), 40000.0f);
    });
  }
}

// The sum of 4 times 30000 is too large for float16, that of 4 times 7500 is not.
TEST(DdpCommHook, PredividedSumsStayInTheRangeOfFloat16) {
  for (const auto& backend : test::backends()) {
    expect_torch_ranks(4, backend, [](int, int) {
      const auto hook = comm_hooks::fp16_compress_wrapper(comm_hooks::predivided_all_reduce(4));
      EXPECT_EQ(averaged_by(hook, 30000), 30000.0f);
    });
  }
}

TEST(DdpCommHook, WrappersAndFactorsAreChecked) {
  EXPECT_THAT([] { comm_hooks::predivided_all_reduce(0); },
              ThrowsMessage<UsageError>(HasSubstr("positive and finite")));
  EXPECT_THAT([] { comm_hooks::fp16_compress_wrapper(nullptr); },
              ThrowsMessage<UsageError>(HasSubstr("fp16_compress_wrapper needs a hook")));
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

// What each rank throws in a step in which the hook of rank 1 throws.
std::vector<std::string> errors_of_a_hook_that_throws(int ranks, const char* backend) {
  std::vector<std::string> errors;
  const auto ends = test::run_torch_ranks(ranks, backend, [](const RankContext& context) {
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
  for (const auto& end : ends) errors.push_back(end.report);
  return errors;
}

TEST(DdpCommHook, EveryRankNamesAHookThatThrows) {
  EXPECT_THAT(errors_of_a_hook_that_throws(3, "paceline"),
              Each(AllOf(HasSubstr("communication hook of rank 1 failed"), HasSubstr("last.bias"),
                         HasSubstr("no such wire"))));
}

// A call in rank 0's hook fails there because rank 1 has ended.
TEST(DdpCommHook, OverGlooARankDoesNotBlameItselfForAnotherRanksHook) {
  const auto errors = errors_of_a_hook_that_throws(2, "gloo");
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    EXPECT_THAT(errors[rank],
                AllOf(HasSubstr("running the communication hook for bucket 0 (last.bias"),
                      HasSubstr(") on rank " + std::to_string(rank) + ": "),
                      Not(HasSubstr("hook of rank"))));
  }
  EXPECT_THAT(errors[1], HasSubstr("no such wire"));
}

// Expects `backward` of a loss to throw Timeout on every rank: the hook never completes its future.
void expect_incomplete_hook_is_named(const std::function<void(const at::Tensor& loss)>& backward) {
  const auto ends = test::run_torch_ranks(2, "paceline", [&](const RankContext& context) {
    InitOptions init = context.init;
    init.timeout = std::chrono::seconds(4);
    try {
      const World world = init_process_group(init);
      DistributedDataParallel model(make_net(at::kDouble));
      model.register_comm_hook([](GradBucket&) {
        return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      });
      const auto x = batch_of(context.rank, 0, at::kDouble);
      backward(loss_of(model(x), x));
    } catch (const Timeout& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  });
  for (const auto& end : ends) {
    EXPECT_THAT(end.report, HasSubstr("has not completed its future for bucket 0 (last.bias"));
  }
}

TEST(DdpCommHook, EveryRankNamesAHookThatNeverCompletes) {
  expect_incomplete_hook_is_named([](const at::Tensor& loss) { loss.backward(); });
}

// Calls that have nothing to do with the hook do not put its end off.
TEST(DdpCommHook, OneThatNeverAnswersIsNamedWhileOtherCallsGoOn) {
  expect_incomplete_hook_is_named([](const at::Tensor& loss) {
    const std::jthread other([] {
      try {
        while (true) all_reduce_async(torch::ones({1 << 16})).wait();
      } catch (const Error&) {  // the group has failed
      }
    });
    loss.backward();
  });
}

}  // namespace
}  // namespace paceline
