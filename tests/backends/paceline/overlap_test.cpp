#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <paceline/collectives.h>

#include <algorithm>
#include <random>
#include <set>

#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using test::expect_torch_ranks;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// The backend of the world: strides reach it only if it is called directly.
c10::intrusive_ptr<c10d::Backend> backend_of_world() {
  return ProcessGroup().c10d()->getBackend(at::kCPU);
}

TEST(Overlap, RefusesAnOutputWithTwoElementsInOnePlace) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    std::vector<at::Tensor> tensors{torch::ones({1}).expand({5})};
    EXPECT_THAT([&] { backend->broadcast(tensors); },
                ThrowsMessage<UsageError>(HasSubstr("whose elements share memory")));
    barrier();
  });
}

using OverlapWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, OverlapWorlds, test::worlds(), test::CaseName());

TEST_P(OverlapWorlds, RefusesAnExpandedTensorBeforeAnyRankIsInvolved) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    const auto one = torch::full({1}, rank + 1.0);
    EXPECT_THAT([&] { all_reduce(one.expand({5})); },
                ThrowsMessage<UsageError>(HasSubstr("whose elements share memory")));
    if (rank == 0) {
      EXPECT_THROW(broadcast(one.expand({5})), UsageError);
    }
    all_reduce(one, {.op = ReduceOp::MAX});
    EXPECT_EQ(one.item<double>(), size);
  });
}

TEST(Overlap, RefusesOutputsThatShareMemory) {
  expect_torch_ranks(3, "paceline", [](int, int) {
    const auto t = torch::zeros({6});
    EXPECT_THAT(
        [&] {
          all_gather({t, t, t}, torch::ones({6}));
        },
        ThrowsMessage<UsageError>(HasSubstr("shares memory with another of its tensors")));
    EXPECT_THROW(all_to_all_single(t, t), UsageError);
    barrier();
  });
}

TEST_P(OverlapWorlds, AcceptsThisRanksInputAsOutput) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    // Not contiguous, so that all of it goes through copies.
    std::vector<at::Tensor> inputs;
    for (int r = 0; r < size; ++r) {
      inputs.push_back(torch::full({4, 2}, rank + 1.0).select(1, 0));
    }
    const at::Tensor mine = inputs[static_cast<std::size_t>(rank)];
    reduce_scatter(mine, inputs);
    EXPECT_TRUE(mine.eq(size * (size + 1) / 2.0).all().item<bool>()) << mine;
  });
}

TEST(Overlap, AcceptsColumnsOfALargeMatrixInLittleMemory) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    // 4 GiB of address space, of which 16 pages are used.
    const at::Tensor matrix = torch::empty({16, std::int64_t{1} << 26});
    std::vector<std::vector<at::Tensor>> outputs{{matrix.select(1, 1), matrix.select(1, 2)}};
    std::vector<at::Tensor> inputs{torch::full({16}, rank + 1.0)};
    const auto most_memory = [] {
      rusage usage{};
      ::getrusage(RUSAGE_SELF, &usage);
      return usage.ru_maxrss;
    };
    const auto before = most_memory();
    backend_of_world()->allgather(outputs, inputs, {.asyncOp = false});
    EXPECT_LT(most_memory() - before, 256 << 10) << "KiB";
    for (int column = 1; column <= 2; ++column) {
      EXPECT_TRUE(matrix.select(1, column).eq(column).all().item<bool>());
    }
    outputs[0][1] = matrix.select(1, 1).slice(0, 0, 16);
    EXPECT_THAT([&] { backend_of_world()->allgather(outputs, inputs, {.asyncOp = false}); },
                ThrowsMessage<UsageError>(HasSubstr("shares memory with another of its tensors")));
  });
}

// Three dimensions in any order, which do not overlap themselves.
at::Tensor random_view(const at::Tensor& memory, std::mt19937& random) {
  const auto up_to = [&](std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(0, most)(random);
  };
  std::vector<std::pair<std::int64_t, std::int64_t>> axes;  // size, stride
  std::int64_t extent = 1;
  for (int i = 0; i < 3; ++i) {
    const std::int64_t size = 1 + up_to(3);
    const std::int64_t stride = extent + up_to(3);
    axes.emplace_back(size, stride);
    extent += (size - 1) * stride;
  }
  std::shuffle(axes.begin(), axes.end(), random);
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  for (const auto& [size, stride] : axes) {
    sizes.push_back(size);
    strides.push_back(stride);
  }
  return memory.as_strided(sizes, strides, up_to(memory.numel() - extent));
}

std::set<std::int64_t> elements_of(const at::Tensor& view, const at::Tensor& memory) {
  const at::Tensor numbers = torch::arange(memory.numel());
  const at::Tensor own =
      numbers.as_strided(view.sizes(), view.strides(), view.storage_offset()).contiguous();
  return {own.data_ptr<std::int64_t>(), own.data_ptr<std::int64_t>() + own.numel()};
}

TEST(Overlap, RefusesExactlyTheViewsThatShareAnElement) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    std::mt19937 random(7);
    int shared = 0;
    constexpr int kPairs = 3000;
    for (int i = 0; i < kPairs; ++i) {
      const at::Tensor memory = torch::zeros({400});
      std::vector<at::Tensor> pair{random_view(memory, random), random_view(memory, random)};
      const auto a = elements_of(pair[0], memory);
      const auto b = elements_of(pair[1], memory);
      const bool overlap =
          std::any_of(a.begin(), a.end(), [&](std::int64_t one) { return b.contains(one); });
      shared += overlap ? 1 : 0;
      bool refused = false;
      try {
        backend_of_world()->allreduce_coalesced(pair);
      } catch (const UsageError&) {
        refused = true;
      }
      ASSERT_EQ(refused, overlap) << pair[0].sizes() << pair[0].strides() << " at "
                                  << pair[0].storage_offset() << ", " << pair[1].sizes()
                                  << pair[1].strides() << " at " << pair[1].storage_offset();
    }
    EXPECT_GT(shared, kPairs / 10);
    EXPECT_LT(shared, kPairs * 9 / 10);
  });
}

TEST(Overlap, ReduceScatterTensorTakesAStridedTensorAsInputAndOutputInAWorldOfOne) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    at::Tensor x = torch::arange(12.0).view({4, 3}).t();
    const at::Tensor expected = x.clone();
    backend_of_world()->reduce_scatter_single(x, x, {.asyncOp = false});
    EXPECT_TRUE(x.equal(expected)) << x;
    std::vector<at::Tensor> both{x};
    backend_of_world()->reduce_scatter_single_coalesced(both, both, {.asyncOp = false});
    EXPECT_TRUE(x.equal(expected)) << x;
  });
}

}  // namespace
}  // namespace paceline
