#include <ATen/record_function.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "support/cases.h"
#include "support/eventually.h"
#include "support/torch_ranks.h"

// The interface of c10d::Backend besides its collectives, and the backend's threads.
namespace paceline {
namespace {

using namespace std::chrono_literals;
using test::expect_torch_ranks;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Whether each thread of this process but the main one blocks `signal`.
std::vector<bool> threads_that_block(int signal) {
  std::vector<bool> result;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == std::to_string(::getpid())) continue;
    std::ifstream status(task.path() / "status");
    for (std::string line; std::getline(status, line);) {
      if (!line.starts_with("SigBlk:")) continue;
      const auto mask = std::stoull(line.substr(line.find_last_of(" \t")), nullptr, 16);
      result.push_back((mask >> (signal - 1) & 1) != 0);
    }
  }
  return result;
}

TEST(Backend, ThreadsBlockAllSignalsExceptFaults) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    barrier_async().wait();
    auto t = torch::ones({3});
    Work work = rank == 0 ? send_async(t, 1) : recv_async(t, {.src = 0});
    work.wait();
    EXPECT_THAT(threads_that_block(SIGTERM), ElementsAre(true, true));
    // A thread blocks all of them until it runs.
    EXPECT_TRUE(test::eventually([] {
      return threads_that_block(SIGSEGV) == std::vector<bool>{false, false};
    }));
  });
}

TEST(Backend, ReportsItsOptions) {
  expect_torch_ranks(3, "paceline", [](int, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    EXPECT_EQ(backend->getBackendOptions()->group_name, "world");
    EXPECT_EQ(backend->getMemoryStats().at("allocated_bytes"), 0u);
    const auto memory = backend->allocateTensor(1000, at::kFloat);
    EXPECT_GE(backend->getMemoryStats().at("allocated_bytes"), 4000u);
    EXPECT_EQ(backend->getError(), c10d::ErrorType::SUCCESS);
    barrier();
  });
}

using BackendOwnWorlds = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, BackendOwnWorlds, ::testing::Values("paceline", test::kAcrossNodes),
                         test::CaseName());

TEST_P(BackendOwnWorlds, SplitsOnOneNodeAndAcrossNodes) {
  expect_torch_ranks(4, GetParam(), [](int rank, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    EXPECT_TRUE(backend->supportsSplitting());
    for (const std::vector<int>& ranks : {std::vector<int>{rank, rank}, {rank, 4}, {rank, -1}}) {
      EXPECT_THROW(backend->split(ProcessGroup().c10d()->getStore(), ranks, nullptr), UsageError);
    }
    const std::vector<std::vector<int>> parts{{0, 1}, {3, 0}, {1, 2, 3}};
    for (const std::vector<int>& ranks : parts) {
      const auto name = fmt::format("split {}", fmt::join(ranks, " "));
      const auto store =
          c10::make_intrusive<c10d::PrefixStore>(name, ProcessGroup().c10d()->getStore());
      const auto part = backend->split(store, ranks, nullptr);
      const auto own = std::find(ranks.begin(), ranks.end(), rank);
      ASSERT_EQ(part == nullptr, own == ranks.end());
      if (!part) continue;
      EXPECT_EQ(part->getSize(), static_cast<int>(ranks.size()));
      EXPECT_EQ(part->getRank(), own - ranks.begin());
      std::vector<at::Tensor> t{torch::full({2}, rank)};
      part->allreduce(t)->wait();
      EXPECT_EQ(t[0][0].item<int>(), std::accumulate(ranks.begin(), ranks.end(), 0));
    }
    barrier();
  });
}

TEST(Backend, CallsHooksOnCompletionAndFailure) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    std::mutex mutex;
    std::vector<std::uint64_t> keys;
    std::atomic<int> aborts{0};
    backend->registerCompletionHook(1, [&](const c10d::CompletionHookArgs& args) {
      std::lock_guard lock(mutex);
      keys.push_back(args.completionKey);
    });
    backend->registerAbortHook(2, [&] {
      ++aborts;
      EXPECT_NE(backend->getError(), c10d::ErrorType::SUCCESS);  // calling back is allowed
      EXPECT_THROW(backend->shutdown(), UsageError);             // but it would wait for this
      EXPECT_THROW(destroy_process_group(), UsageError);
      throw std::runtime_error("a hook that throws");
    });
    std::vector<at::Tensor> t{torch::ones({2})};
    const auto one = backend->allreduce(t, {.asyncOp = false});
    const auto two = backend->allreduce(t);
    two->wait();
    all_reduce(t[0]);
    barrier();
    {
      std::lock_guard lock(mutex);
      EXPECT_EQ(keys.size(), 4u);
      EXPECT_EQ(keys[0], one->getCompletionKey());
      EXPECT_EQ(keys[1], two->getCompletionKey());
    }
    EXPECT_EQ(aborts, 0);
    EXPECT_THROW(all_reduce(torch::ones({2 + rank})), Mismatch);
    EXPECT_EQ(aborts, 1);
    backend->unregisterCompletionHook(1);
    backend->unregisterAbortHook(2);
  });
}

// The thread that waits for the message runs the hook.
TEST(Backend, AHookOfAMessageCannotLeaveTheGroup) {
  if (!is_gloo_available()) GTEST_SKIP() << "built without Gloo";
  expect_torch_ranks(2, test::kAcrossNodes, [](int rank, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    if (rank == 1) {
      EXPECT_THROW(barrier(), PeerError);
      return;
    }
    std::atomic<int> refusals = 0;
    backend->registerAbortHook(1, [&] {
      EXPECT_THROW(backend->shutdown(), UsageError);
      ++refusals;
    });
    backend->setTimeout(100ms);
    EXPECT_THROW(recv(torch::ones({2}), {.src = 1}), Timeout);
    EXPECT_GT(refusals, 0);
    backend->unregisterAbortHook(1);
  });
}

thread_local std::vector<std::string> seen_by_profiler;

TEST(Backend, ShowsCallsThatWaitToAProfiler) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
        [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
          seen_by_profiler.emplace_back(call.name());
          return nullptr;
        }));
    all_reduce(torch::ones({2}));
    at::removeCallback(handle);
    EXPECT_THAT(seen_by_profiler, Contains("paceline:all_reduce"));
  });
}

TEST(Backend, CountsCallsThatWait) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    const std::uint64_t before = backend->getSequenceNumberForGroup();
    all_reduce(torch::ones({2}));
    EXPECT_EQ(backend->getSequenceNumberForGroup(), before + 1);
  });
}

TEST(Backend, SetTimeoutAppliesToLaterCalls) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    backend->setTimeout(100ms);
    EXPECT_EQ(backend->getBackendOptions()->timeout, 100ms);
    if (rank == 0) {
      EXPECT_THAT([] { barrier(); }, ThrowsMessage<Timeout>(HasSubstr("the timeout of 0.1 s")));
    } else {
      while (backend->getError() == c10d::ErrorType::SUCCESS) std::this_thread::yield();
      EXPECT_EQ(backend->getError(), c10d::ErrorType::TIMEOUT);
    }
  });
}

TEST(Coalescing, CallsCompleteTogether) {
  expect_torch_ranks(3, "paceline", [](int rank, int size) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    std::vector<at::Tensor> sum{torch::full({4}, 1.0)};
    std::vector<at::Tensor> sent{torch::full({4}, static_cast<float>(rank))};
    std::vector<at::Tensor> received{torch::empty({4})};
    backend->startCoalescing();
    backend->allreduce(sum);
    backend->send(sent, (rank + 1) % size, 0);
    backend->recv(received, (rank + size - 1) % size, 0);
    const auto work = backend->endCoalescing();
    work->wait();
    EXPECT_TRUE(work->isSuccess());
    EXPECT_EQ(work->result().size(), 3u);
    EXPECT_EQ(sum[0][0].item<double>(), size);
    EXPECT_EQ(received[0][0].item<float>(), static_cast<float>((rank + size - 1) % size));
    EXPECT_THROW(backend->endCoalescing(), UsageError);
  });
}

}  // namespace
}  // namespace paceline
