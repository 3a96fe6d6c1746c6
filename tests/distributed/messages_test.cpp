#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>

#include <paceline/collectives.h>

#include "support/eventually.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using namespace std::chrono_literals;
using test::backends;
using test::expect_torch_ranks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using MessagesWorldsUpTo5 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, MessagesWorldsUpTo5, test::worlds({2, 3, 5}), test::CaseName());

TEST_P(MessagesWorldsUpTo5, TravelAroundARing) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    for (const std::int64_t count : {0, 1, 5000, 300'000}) {
      const auto mine = torch::full({count}, rank, at::kInt);
      auto theirs = torch::empty({count}, at::kInt);
      const int next = (rank + 1) % size;
      const int previous = (rank + size - 1) % size;
      auto works = batch_isend_irecv(
          {{P2POp::Kind::isend, mine, next, {}, 4}, {P2POp::Kind::irecv, theirs, previous, {}, 4}});
      for (Work& work : works) work.wait();
      EXPECT_TRUE(theirs.eq(previous).all().item<bool>());
      EXPECT_EQ(works[1].source_rank(), previous);
    }
  });
}

TEST_P(MessagesWorldsUpTo5, ArriveInOrder) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    // Not contiguous on the way in, nor on the way out.
    auto wide = torch::zeros({100, 2});
    auto column = wide.select(1, 1);
    EXPECT_TRUE(rank == 0 || recv(column, {.src = rank - 1}) == rank - 1);
    column += 1;
    if (rank + 1 < size) send(column, rank + 1);
    EXPECT_TRUE(column.eq(rank + 1).all().item<bool>());
    EXPECT_TRUE(wide.select(1, 0).eq(0).all().item<bool>());
  });
}

TEST_P(MessagesWorldsUpTo5, MayComeFromAnyRankOfAGroup) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    const auto last = new_group({size - 2, size - 1});
    if (last.is_member()) {
      auto t = torch::full({7}, static_cast<float>(rank));
      if (rank == size - 1) {
        EXPECT_EQ(recv(t, {.group = last, .tag = 3}), size - 2);
        EXPECT_EQ(t[0].item<float>(), static_cast<float>(size - 2));
      } else {
        send(t, size - 1, {.group = last, .tag = 3});
      }
    }
    barrier();
  });
}

TEST(Messages, ProgressWithoutAWait) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    auto large = torch::full({1'000'000}, static_cast<float>(rank));
    if (rank == 0) {
      const Work work = send_async(large, 1);
      while (!work.is_completed()) std::this_thread::yield();
    } else {
      recv(large, {.src = 0});
      EXPECT_TRUE(large.eq(0).all().item<bool>());
    }
  });
}

TEST(Messages, RejectInvalidArguments) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    auto t = torch::ones({3});
    EXPECT_THROW(send(t, rank), UsageError);
    EXPECT_THROW(send(t, 2), UsageError);
    EXPECT_THROW(send(t, 1 - rank, {.tag = -1}), UsageError);
    EXPECT_THROW(send(t.to_sparse(), 1 - rank), UsageError);
    EXPECT_THAT(
        [&] {
          rank == 0 ? send(t, 1) : static_cast<void>(recv(torch::ones({4}), {.src = 0}));
          barrier();  // a small message is sent before it is received
        },
        ThrowsMessage<Mismatch>(HasSubstr("rank 0 sent 3 float32 to rank 1 with tag 0, which "
                                          "received 4 float32")));
  });
}

// It cannot be written back, and the sender has no part in that.
TEST(Messages, RejectAnExpandedTensorToReceive) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    std::vector<at::Tensor> tensors{rank == 0 ? torch::ones({4}) : torch::empty({1}).expand({4})};
    if (rank == 0) {
      backend->send(tensors, 1, 0)->wait();
    } else {
      EXPECT_THROW(backend->recv(tensors, 0, 0), UsageError);
    }
    barrier();
  });
}

// A forked child has none of this rank's threads, and must not take its messages.
TEST(Messages, RejectCallsInAForkedChild) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    auto t = torch::full({3}, static_cast<float>(rank));
    if (rank == 0) {
      Work work = recv_async(t, {.src = 1});
      const pid_t child = ::fork();
      if (child == 0) {
        try {
          work.wait();
        } catch (const UsageError&) {
          ::_exit(0);
        }
        ::_exit(1);
      }
      int status = -1;
      ::waitpid(child, &status, 0);
      EXPECT_EQ(status, 0);
      barrier();
      work.wait();
      EXPECT_EQ(t[0].item<float>(), 1);
    } else {
      barrier();
      send(t, 0);
    }
  });
}

// PowerSGD's hook does this.
TEST(Futures, ACallbackMayWaitForALaterCall) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    std::vector<at::Tensor> first{torch::ones({10})};
    std::vector<at::Tensor> second{torch::ones({10})};
    std::vector<at::Tensor> third{torch::ones({10})};
    const auto after = backend->allreduce(first)->getFuture()->then(
        [&](c10::ivalue::Future&) {
          backend->allreduce(second)
              ->getFuture()
              ->then(
                  [&](c10::ivalue::Future&) {
                    backend->allreduce(third)->getFuture()->wait();
                    return c10::IValue();
                  },
                  c10::NoneType::get())
              ->wait();
          return c10::IValue();
        },
        c10::NoneType::get());
    after->wait();
    for (const auto& tensors : {first, second, third}) EXPECT_EQ(tensors[0][0].item<float>(), 2);
  });
}

TEST(Futures, ACallbackMayWaitForAnotherMessage) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    std::vector<at::Tensor> a{torch::full({5}, static_cast<float>(rank))};
    std::vector<at::Tensor> b{torch::full({5}, static_cast<float>(10 + rank))};
    if (rank == 0) {
      const auto one = backend->send(a, 1, 0);
      const auto two = backend->send(b, 1, 1);
      one->wait();
      two->wait();
    } else {
      const auto one = backend->recv(a, 0, 0)->getFuture();
      const auto two = backend->recv(b, 0, 1)->getFuture();
      one->then(
             [two](c10::ivalue::Future&) {
               two->wait();
               return c10::IValue();
             },
             c10::NoneType::get())
          ->wait();
      EXPECT_EQ(a[0][0].item<float>(), 0);
      EXPECT_EQ(b[0][0].item<float>(), 10);
    }
    barrier();
  });
}

TEST(Futures, HoldTheTensorsAndTheError) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    std::vector<at::Tensor> tensors{torch::ones({10})};
    auto future = backend->allreduce(tensors)->getFuture();
    future->waitAndThrow();
    EXPECT_TRUE(future->value().toTensorVector()[0].eq(2).all().item<bool>());
    tensors = {torch::ones({10 + rank})};
    future = backend->allreduce(tensors)->getFuture();
    EXPECT_THROW(future->waitAndThrow(), Mismatch);
    EXPECT_EQ(backend->getError(), c10d::ErrorType::COMM_ERROR);
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

TEST(MonitoredBarrier, RejectsNegativeTimeout) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    EXPECT_THROW(monitored_barrier({.timeout = -1ms}), UsageError);
  });
}

using MonitoredBarrierBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, MonitoredBarrierBackends, ::testing::ValuesIn(backends()),
                         test::CaseName());

TEST_P(MonitoredBarrierBackends, NamesAllMissingRanks) {
  expect_torch_ranks(4, GetParam(), [](int rank, int) {
    monitored_barrier();
    const auto world = new_group({}, {.backend = "gloo"});  // to come together again
    if (rank == 0) {
      EXPECT_THAT([] { monitored_barrier({.timeout = 100ms, .wait_all_ranks = true}); },
                  ThrowsMessage<Error>(
                      HasSubstr("Ranks 1, 2, 3 failed to pass monitoredBarrier in 100 ms")));
    }
    barrier({.group = world});
  });
}

TEST(MonitoredBarrier, NamesAMissingRankAndLeavesTheGroupUsable) {
  expect_torch_ranks(3, "paceline", [](int rank, int) {
    const auto gloo = new_group({}, {.backend = "gloo"});
    if (rank == 0) {
      try {
        monitored_barrier({.timeout = 50ms});
        ADD_FAILURE() << "nobody came";
      } catch (const Timeout& error) {
        EXPECT_THAT(error.ranks(), ElementsAre(1));
      }
    }
    barrier({.group = gloo});
    if (rank != 0) {  // they come too late
      EXPECT_THAT([] { monitored_barrier({.timeout = 20s}); },
                  ThrowsMessage<Timeout>(HasSubstr("but received errors while waiting for "
                                                   "send/recv from rank 0")));
    }
    monitored_barrier();
    auto t = torch::ones({2});
    all_reduce(t);
    EXPECT_EQ(t[0].item<float>(), 3);
  });
}

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

TEST(Backend, SplitsAndReportsItsOptions) {
  expect_torch_ranks(3, "paceline", [](int rank, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    EXPECT_EQ(backend->getBackendOptions()->group_name, "world");
    EXPECT_EQ(backend->getMemoryStats().at("allocated_bytes"), 0u);
    const auto memory = backend->allocateTensor(1000, at::kFloat);
    EXPECT_GE(backend->getMemoryStats().at("allocated_bytes"), 4000u);
    EXPECT_EQ(backend->getError(), c10d::ErrorType::SUCCESS);
    const auto store =
        c10::make_intrusive<c10d::PrefixStore>("split", ProcessGroup().c10d()->getStore());
    const auto part = backend->split(store, {0, 2}, nullptr);
    ASSERT_EQ(part == nullptr, rank == 1);
    if (part) {
      EXPECT_EQ(part->getSize(), 2);
      EXPECT_EQ(part->getRank(), rank / 2);
      std::vector<at::Tensor> t{torch::ones({2})};
      part->allreduce(t)->wait();
      EXPECT_EQ(t[0][0].item<float>(), 2);
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
      backend->shutdown();  // calling back is allowed, and so is throwing
      throw std::runtime_error("a hook that throws");
    });
    std::vector<at::Tensor> t{torch::ones({2})};
    const auto one = backend->allreduce(t, {.asyncOp = false});
    const auto two = backend->allreduce(t);
    two->wait();
    barrier();
    {
      std::lock_guard lock(mutex);
      EXPECT_EQ(keys.size(), 3u);
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

TEST(Work, AcceptsTheLongestTimeout) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    auto t = torch::full({2}, rank);
    if (rank == 0) {
      auto asked = torch::zeros({1});
      recv(asked, {.src = 1});
      send(t, 1);
      return;
    }
    Work work = recv_async(t, {.src = 0});
    auto waiting =
        std::async(std::launch::async, [&] { return work.wait(std::chrono::milliseconds::max()); });
    EXPECT_EQ(waiting.wait_for(100ms), std::future_status::timeout);
    send(torch::zeros({1}), 0);
    EXPECT_NO_THROW(waiting.get());
    EXPECT_EQ(t[0].item<float>(), 0);
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

}  // namespace
}  // namespace paceline
