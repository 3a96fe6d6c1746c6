// Groups that are destroyed before the world is.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/ddp.h>

#include "support/cases.h"
#include "support/thoroughness.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::backends;
using test::expect_torch_ranks;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

long entries_of(const std::string& directory) {
  return std::distance(std::filesystem::directory_iterator(directory),
                       std::filesystem::directory_iterator());
}

// A line of /proc/self/status, in KiB.
long status_of(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(name + ":")) return std::stol(line.substr(name.size() + 1));
  }
  return -1;
}

TEST(Groups, ThousandsDestroyedLeakNothing) {
  if (test::kSanitized) GTEST_SKIP() << "a sanitizer keeps memory that is freed";
  constexpr int kFirst = 200;
  constexpr int kGroups = 2000;
  expect_torch_ranks(2, "paceline", [](int, int) {
    rlimit files{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
    files.rlim_cur = 256;
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
    long descriptors = 0, threads = 0, space = 0, memory = 0;
    for (int i = 0; i < kGroups; ++i) {
      const ProcessGroup group = new_group();
      const auto t = torch::ones({1000});
      all_reduce_async(t, {.group = group}).wait();
      ASSERT_EQ(t[999].item<float>(), 2);
      destroy_process_group(group);
      if (i != kFirst) continue;
      descriptors = entries_of("/proc/self/fd");
      threads = entries_of("/proc/self/task");
      space = status_of("VmSize");
      memory = status_of("VmRSS");
    }
    EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
    EXPECT_EQ(entries_of("/proc/self/task"), threads);
    EXPECT_LT(status_of("VmSize") - space, 64 << 10);  // of which one group has 2x RAM
    EXPECT_LT(status_of("VmRSS") - memory, 16 << 10);  // and 16 pages of staging buffers at least
  });
}

using DestroyedGroupsBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, DestroyedGroupsBackends, ::testing::ValuesIn(backends()),
                         test::CaseName());

TEST_P(DestroyedGroupsBackends, RejectCallsAndOthersGoOn) {
  expect_torch_ranks(3, GetParam(), [&](int rank, int) {
    const ProcessGroup kept = new_group();
    const ProcessGroup pair = new_group({0, 2});
    auto t = torch::ones({4});
    if (pair.is_member()) all_reduce(t, {.group = pair});
    EXPECT_EQ(t[0].item<float>(), rank == 1 ? 1 : 2);
    destroy_process_group(pair);
    if (pair.is_member()) {
      for (const std::function<void()>& use : std::vector<std::function<void()>>{
               [&] { all_reduce(t, {.group = pair}); },
               [&] { static_cast<void>(all_reduce_async(t, {.group = pair})); },
               [&] { static_cast<void>(get_rank(pair)); },
               [&] { static_cast<void>(get_world_size(pair)); },
               [&] { static_cast<void>(get_backend(pair)); },
               [&] {
                 const DistributedDataParallel model(torch::nn::Linear(2, 2),
                                                     {.process_group = pair});
               },
               [&] { destroy_process_group(pair); }}) {
        EXPECT_THAT(use,
                    ThrowsMessage<UsageError>(HasSubstr("destroy_process_group has ended it")));
      }
    }
    for (const ProcessGroup& group : {kept, ProcessGroup()}) {
      t.fill_(1);
      all_reduce(t, {.group = group});
      EXPECT_EQ(t[0].item<float>(), 3);
    }
    destroy_process_group({});
    EXPECT_FALSE(is_initialized());
    destroy_process_group(kept);  // as the world before it
  });
}

TEST_P(DestroyedGroupsBackends, RejectStepsOfTheirModels) {
  expect_torch_ranks(2, GetParam(), [&](int, int) {
    const ProcessGroup group = new_group();
    DistributedDataParallel model(torch::nn::Linear(2, 2), {.process_group = group});
    const auto step = [&] { model(torch::ones({1, 2})).sum().backward(); };
    // The buckets are put in order in the second.
    for (int i = 0; i < 4; ++i) step();
    destroy_process_group(group);
    EXPECT_THROW(step(), UsageError);
  });
}

TEST(Groups, DestroyRejectsGroupsNotMadeByNewGroup) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    const auto world = ProcessGroup().c10d();
    const auto made = c10::make_intrusive<c10d::ProcessGroup>(world->getStore(), 0, 1);
    const ProcessGroup others(made);
    EXPECT_THAT([&] { destroy_process_group(others); },
                ThrowsMessage<UsageError>(HasSubstr("that new_group did not make")));
    destroy_process_group(ProcessGroup(world));
    EXPECT_FALSE(is_initialized());
  });
}

TEST(Groups, TensorsAndWorksOutliveThem) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const ProcessGroup group = new_group();
    DistributedDataParallel model(torch::nn::Linear(100, 200), {.process_group = group});
    const auto input = torch::ones({1, 100});
    for (int step = 0; step < 3; ++step) model(input).sum().backward();
    const auto backend = group.c10d()->getBackend(at::kCPU);
    const at::Tensor lent = backend->allocateTensor(1000, at::kFloat);
    lent.fill_(rank + 1);
    const auto t = torch::ones({100'000});
    Work work = all_reduce_async(t, {.group = group});
    Work reduced = all_reduce_async(lent, {.group = group});
    destroy_process_group(group);  // waits for them
    EXPECT_TRUE(work.is_completed() && reduced.is_completed());
    work.wait();
    reduced.wait();
    EXPECT_EQ(t.sum().item<float>(), 200'000);
    EXPECT_EQ(lent.sum().item<float>(), 3'000);
    EXPECT_EQ(model.parameters()[1].grad()[0].item<float>(), 3);
    EXPECT_THAT([&] { model(input).sum().backward(); },
                ThrowsMessage<UsageError>(HasSubstr("group 1")));
    EXPECT_EQ(model.parameters()[1].grad().numel(), 200);
    barrier();
  });
}

// A future's callback runs on a thread that destroying the group waits for.
TEST(Groups, CallbacksMayUseTheApiDuringDestruction) {
  expect_torch_ranks(2, "paceline", [](int, int size) {
    ProcessGroup group = new_group();
    std::vector<at::Tensor> tensors{torch::ones({1000})};
    std::atomic<int> seen = 0;
    {
      auto backend = group.c10d()->getBackend(at::kCPU);
      backend->allreduce(tensors, {.asyncOp = true})->getFuture()->addCallback([&](auto&) {
        seen = get_world_size();
      });
    }
    destroy_process_group(group);
    EXPECT_EQ(seen, size);
  });
}

}  // namespace
}  // namespace paceline
