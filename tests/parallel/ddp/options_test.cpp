#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/error.h>

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
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

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
      {.all_reduce_trigger_params = {"second.weight", "first.bias"}},
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
    refuses({.bucket_cap_mb = 1, .bucket_cap_mb_list = {1}}, "not both");
    refuses({.bucket_cap_mb = 1, .all_reduce_trigger_params = {"second.weight"}}, "trigger");
    refuses({.all_reduce_trigger_params = {"third.weight"}},
            "all_reduce_trigger_params names third.weight");
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
            "without static_graph");
    refuses({.check_sync_every = -1}, "check_sync_every of -1");
    refuses({.average = static_cast<Average>(9)}, "average is 9, which is no Average");
    DistributedDataParallel model(make_net(at::kFloat));
    EXPECT_THROW(model.set_samples(3), UsageError);
    EXPECT_THROW(model.register_comm_hook(CommHook()), UsageError);
  });
}

TEST(DdpOptions, ThatDifferBetweenRanksAreNamed) {
  const std::vector<std::pair<DdpOptions, const char*>> cases{
      {{.broadcast_buffers = false},
       "broadcast_buffers = true on rank 0 and broadcast_buffers = false"},
      {{.bucket_cap_mb = 2.5}, "bucket_cap_mb = unset on rank 0 and bucket_cap_mb = 2.5"},
      {{.find_unused_parameters = true}, "find_unused_parameters = true on rank 1"},
      {{.static_graph = true}, "static_graph = true on rank 1"},
      {{.find_unused_parameters = true, .skip_all_reduce_unused_params = true},
       "find_unused_parameters = true on rank 1"},
      {{.bucket_cap_mb_list = {1, 2}}, "bucket_cap_mb_list = {1, 2} on rank 1"},
      {{.all_reduce_trigger_params = {"weight"}}, "all_reduce_trigger_params = {weight} on rank 1"},
      {{.zero_copy = false}, "zero_copy = false on rank 1"},
      {{.check_sync_every = 3}, "check_sync_every = 3 on rank 1"}};
  for (const auto& backend : test::backends()) {
    expect_torch_ranks(2, backend, [&](int rank, int) {
      for (const auto& [options, text] : cases) {
        const auto wrap = [&, &options = options] {
          DistributedDataParallel model(torch::nn::Linear(2, 1),
                                        rank == 1 ? options : DdpOptions());
        };
        EXPECT_THAT(wrap, ThrowsMessage<Mismatch>(
                              AllOf(HasSubstr(text), HasSubstr("must be the same on all ranks"))));
      }
      // It concerns the rank alone.
      DistributedDataParallel(torch::nn::Linear(2, 1), {.gradient_as_bucket_view = rank == 0});
    });
  }
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

}  // namespace
}  // namespace paceline
