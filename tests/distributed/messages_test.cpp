#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "support/eventually.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using namespace std::chrono_literals;
using test::expect_torch_ranks;
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

TEST(Messages, FromAnyRankAcrossNodesAreRefused) {
  if (!is_gloo_available()) GTEST_SKIP() << "built without Gloo";
  expect_torch_ranks(3, test::kAcrossNodes, [](int, int) {
    const auto t = torch::zeros({7});
    EXPECT_THAT([&] { recv(t); }, ::testing::ThrowsMessage<UsageError>(
                                      ::testing::HasSubstr("spans 2 nodes: name the sender")));
  });
}

// By how a rank of another node leaves, as its leader or not, and whether it has had a message of
// rank 0 before, so that the two are connected.
TEST(Messages, ToAndFromARankThatHasLeftFail) {
  if (!is_gloo_available()) GTEST_SKIP() << "built without Gloo";
  for (const auto& [leaver, connected] : {std::pair(2, false), {3, false}, {3, true}}) {
    for (const bool sends : {false, true}) {
      const auto ends = test::run_torch_ranks(
          4, test::kAcrossNodes,
          [leaver = leaver, connected = connected, sends](const test::RankContext& context) {
            const World world = init_process_group(context.init);
            const auto t = torch::ones({3});
            if (connected && context.rank == 0) send(t, leaver);
            if (connected && context.rank == leaver) recv(t, {.src = 0});
            barrier();
            if (context.rank != 0) return std::string();
            try {
              sends ? send(t, leaver) : static_cast<void>(recv(t, {.src = leaver}));
            } catch (const PeerLost& error) {
              return std::string(error.what());
            }
            return std::string("no error");
          });
      EXPECT_THAT(ends[0].report,
                  HasSubstr(fmt::format("rank {0} on node 1 has left the group and is missing in "
                                        "{1} of 3 float32 {2} rank {0} on node 1 with tag 0",
                                        leaver, sends ? "send" : "recv", sends ? "to" : "from")));
    }
  }
}

TEST_P(MessagesWorldsUpTo5, MayComeFromAnyRankOfAGroup) {
  const std::string& backend = GetParam().backend;
  if (backend == test::kAcrossNodes || backend == test::kMpiAcrossNodes)
    GTEST_SKIP() << "refused, see the test above";
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

using MessagesBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, MessagesBackends, test::backends_and_nodes(), test::CaseName());

TEST_P(MessagesBackends, GoOnAfterAWaitThatTimedOut) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    auto t = torch::full({3, 2}, static_cast<float>(rank));
    const auto column = t.select(1, 0);
    if (rank == 0) {
      Work work = recv_async(column, {.src = 1});
      for (int i = 0; i < 2; ++i) EXPECT_THROW(work.wait(20ms), Timeout);
      EXPECT_FALSE(work.is_completed());
      barrier();
      work.wait(1min);
      EXPECT_TRUE(work.is_completed());
      EXPECT_EQ(work.source_rank(), 1);
      EXPECT_TRUE(column.eq(1).all().item<bool>());
    } else {
      barrier();
      send(column, 0);
    }
    all_reduce(t);
  });
}

TEST_P(MessagesBackends, MayBeAwaitedAgain) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    const auto t = torch::full({3}, static_cast<float>(rank));
    Work work = rank == 0 ? recv_async(t, {.src = 1}) : send_async(t, 0);
    work.wait();
    work.wait();
    work.wait(20ms);
    barrier();
  });
}

// By the thread that has waited for it.
TEST(Messages, OfGlooThatAreDroppedLeaveNoThread) {
  expect_torch_ranks(2, "gloo", [](int rank, int) {
    const auto threads = [] {
      const std::filesystem::directory_iterator tasks("/proc/self/task");
      return std::distance(begin(tasks), end(tasks));
    };
    auto t = torch::zeros({3});
    all_reduce(t);
    if (rank == 0) {
      const auto before = threads();
      {
        Work work = recv_async(t, {.src = 1});
        EXPECT_THROW(work.wait(20ms), Timeout);
        EXPECT_EQ(threads(), before + 1);
      }
      EXPECT_TRUE(test::eventually([&] { return threads() == before; }));
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
    EXPECT_THROW(send(at::quantize_per_tensor(t, 0.1, 0, at::kQInt8), 1 - rank), UsageError);
    EXPECT_THAT(
        [&] {
          rank == 0 ? send(t, 1) : static_cast<void>(recv(torch::ones({4}), {.src = 0}));
          barrier();  // a small message is sent before it is received
        },
        ThrowsMessage<Mismatch>(HasSubstr("rank 0 sent 3 float32 to rank 1 with tag 0, which "
                                          "received 4 float32")));
  });
}

TEST(Messages, OfAnotherTypeOfTheSameSizeAreAMismatch) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const auto t = torch::ones({3}).to(rank == 0 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2);
    EXPECT_THAT(
        [&] {
          rank == 0 ? send(t, 1) : static_cast<void>(recv(t, {.src = 0}));
          barrier();
        },
        ThrowsMessage<Mismatch>(HasSubstr("rank 0 sent 3 float8_e4m3fn to rank 1 with tag 0, "
                                          "which received 3 float8_e5m2")));
  });
}

TEST(Messages, FromAnyRankOfAGroupOfOneAreRefused) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    EXPECT_THAT([] { static_cast<void>(recv(torch::ones({2}))); },
                ThrowsMessage<UsageError>(HasSubstr("the group has no other rank")));
    barrier();
  });
}

using MessagesFutures = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, MessagesFutures, ::testing::Values("paceline", test::kAcrossNodes),
                         test::CaseName());

// Nobody waits for the Work itself.
TEST_P(MessagesFutures, EndWithTheGroup) {
  const auto ends = test::run_torch_ranks(2, GetParam(), [](const test::RankContext& context) {
    const World world = init_process_group(context.init);
    std::vector<at::Tensor> tensors{torch::ones({3})};
    const auto work =
        ProcessGroup().c10d()->getBackend(at::kCPU)->recv(tensors, 1 - context.rank, 0);
    const auto future = work->getFuture();
    if (context.rank == 1) ::_exit(0);
    future->wait();
    return future->hasError() ? future->tryRetrieveErrorMessage() : "no error";
  });
  EXPECT_THAT(ends[0].report, HasSubstr("rank 1"));
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

}  // namespace
}  // namespace paceline
