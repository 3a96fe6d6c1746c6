#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "support/torch_ranks.h"

namespace paceline {
namespace {

std::ptrdiff_t threads_of_rank() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

// Ranks that have not met start no transfer, and no thread.
void meet(int rank) {
  const auto tensor = torch::zeros({1});
  rank == 0 ? static_cast<void>(recv(tensor, {.src = 1})) : send(tensor, 0);
}

// More than there are threads for, in an order in which the threads that wait for the first ones
// have to turn to the last.
TEST(ManyMessages, AcrossNodesShareTheirThreads) {
  if (!is_gloo_available()) GTEST_SKIP() << "built without Gloo";
  test::expect_torch_ranks(2, test::kAcrossNodes, [](int rank, int) {
    constexpr int kMessages = 200;
    constexpr std::ptrdiff_t kMostThreads = 150;
    meet(rank);
    const auto before = threads_of_rank();
    std::vector<torch::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < kMessages; ++i) {
      tensors.push_back(torch::full({3}, rank == 0 ? 0 : i));
      if (rank == 0) works.push_back(recv_async(tensors.back(), {.src = 1, .tag = i}));
    }
    EXPECT_LE(threads_of_rank(), before + kMostThreads);
    barrier();
    for (int i = kMessages - 1; rank == 1 && i >= 0; i -= 20) send(tensors[i], 0, {.tag = i});
    for (int i = kMessages - 1; i >= 0; i -= 20) {
      if (rank == 0) works[i].wait();
    }
    barrier();
    for (int i = kMessages - 1; i >= 0; --i) {
      if (rank == 1 && i % 20 != 19) works.push_back(send_async(tensors[i], 0, {.tag = i}));
    }
    EXPECT_LE(threads_of_rank(), before + kMostThreads);
    for (Work& work : works) work.wait();
    for (int i = 0; i < kMessages; ++i) EXPECT_TRUE(tensors[i].eq(i).all().item<bool>()) << i;
    barrier();
  });
}

// With more of them than threads, none may keep a thread from the others.
TEST(ManyMessages, AcrossNodesFailWithTheirRank) {
  if (!is_gloo_available()) GTEST_SKIP() << "built without Gloo";
  for (const bool sends : {true, false}) {
    const auto run = [&](const test::RankContext& context) {
      const World world = init_process_group(context.init);
      meet(context.rank);
      const auto tensor = torch::zeros({3});
      std::vector<Work> works;
      for (int i = 0; context.rank == 0 && i < 200; ++i) {
        works.push_back(sends ? send_async(tensor, 1, {.tag = i})
                              : recv_async(tensor.clone(), {.src = 1, .tag = i}));
      }
      barrier();
      if (context.rank == 1) ::raise(SIGKILL);
      for (Work& work : works) EXPECT_THROW(work.wait(), PeerLost);
      return std::string();
    };
    const auto ends = test::run_torch_ranks(2, test::kAcrossNodes, run);
    EXPECT_TRUE(ends[0].exited_cleanly()) << ends[0].report;
  }
}

}  // namespace
}  // namespace paceline
