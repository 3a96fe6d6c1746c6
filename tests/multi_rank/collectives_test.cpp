#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <paceline/collectives.h>

#include "support/thread_ranks.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::backends;
using test::expect_torch_ranks;
using test::kWorldSizes;
using test::RankContext;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Runs `body` at every world size on every backend.
void on_all(const std::function<void(int rank, int size)>& body) {
  for (const auto& backend : backends()) {
    for (const int size : kWorldSizes) expect_torch_ranks(size, backend, body);
  }
}

TEST(Collectives, ReduceAndMove) {
  on_all([](int rank, int size) {
    const double sum = size * (size + 1) / 2.0;
    for (const auto type : {at::kFloat, at::kDouble, at::kLong, at::kBFloat16}) {
      auto t = torch::full({3, 5}, rank + 1, type);
      all_reduce(t);
      EXPECT_TRUE(t.to(at::kDouble).eq(sum).all().item<bool>()) << t;
      all_reduce(t.fill_(rank), {.op = ReduceOp::MAX});
      EXPECT_TRUE(t.eq(size - 1).all().item<bool>());
      broadcast(t.fill_(rank), {.src = size - 1});
      EXPECT_TRUE(t.eq(size - 1).all().item<bool>());
      auto gathered = torch::empty({size, 4}, type);
      all_gather_into_tensor(gathered, torch::full({4}, rank, type));
      EXPECT_TRUE(gathered.select(1, 2).eq(torch::arange(size).to(type)).all().item<bool>());
      auto scattered = torch::empty({2}, type);
      reduce_scatter_tensor(scattered, torch::arange(2 * size).to(type));
      EXPECT_TRUE(scattered.to(at::kDouble)
                      .eq(torch::tensor({2.0 * rank * size, (2.0 * rank + 1) * size}))
                      .all()
                      .item<bool>());
    }
  });
}

TEST(Collectives, ListsAndTensorsThatAreNotContiguous) {
  on_all([](int rank, int size) {
    auto wide = torch::zeros({4, 6});
    auto column = wide.select(1, 2);
    column.fill_(rank + 1);
    all_reduce(column);
    EXPECT_TRUE(column.eq(size * (size + 1) / 2.0).all().item<bool>());
    EXPECT_EQ(wide.select(1, 1).abs().sum().item<float>(), 0);

    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> inputs;
    for (int r = 0; r < size; ++r) {
      outputs.push_back(torch::empty({7}));
      inputs.push_back(torch::full({7}, static_cast<float>(r)));
    }
    all_gather(outputs, torch::full({7}, static_cast<float>(rank)));
    for (int r = 0; r < size; ++r)
      EXPECT_TRUE(outputs[static_cast<std::size_t>(r)].eq(r).all().item<bool>());
    auto mine = torch::empty({7});
    reduce_scatter(mine, inputs);
    EXPECT_TRUE(mine.eq(rank * size).all().item<bool>());
  });
}

TEST(Collectives, Bytes) {
  on_all([](int rank, int size) {
    const auto all = all_gather_bytes(std::string(static_cast<std::size_t>(rank), 'x'));
    ASSERT_EQ(all.size(), static_cast<std::size_t>(size));
    for (std::size_t r = 0; r < all.size(); ++r) EXPECT_EQ(all[r], std::string(r, 'x'));
    EXPECT_EQ(broadcast_bytes(rank == 0 ? std::string("a\0b", 3) : "ignored"),
              std::string("a\0b", 3));
    EXPECT_EQ(broadcast_bytes(""), "");
  });
}

TEST(Collectives, AsynchronousOnesRunInOrderWithTheOthers) {
  on_all([](int rank, int size) {
    auto t = torch::full({1000}, rank + 1.0);
    std::vector<Work> works;
    for (int i = 0; i < 5; ++i) works.push_back(all_reduce_async(t, {.op = ReduceOp::MAX}));
    auto other = torch::full({10}, 1.0);
    all_reduce(other);
    EXPECT_EQ(other[0].item<double>(), size);
    for (auto& work : works) work.wait(60s);
    EXPECT_TRUE(works[0].is_completed());
    EXPECT_TRUE(t.eq(size).all().item<bool>());
    { const Work dropped = barrier_async(); }
    barrier();
  });
}

TEST(Collectives, Groups) {
  for (const auto& backend : backends()) {
    for (const int size : {2, 3, 5}) {
      expect_torch_ranks(size, backend, [](int rank, int n) {
        const auto last_two = new_group({n - 1, n - 2});
        const auto everyone = new_group();
        EXPECT_EQ(get_rank(last_two), rank < n - 2 ? -1 : rank - (n - 2));
        EXPECT_EQ(get_world_size(last_two), rank < n - 2 ? -1 : 2);
        auto t = torch::full({3}, 1.0);
        all_reduce(t, {.group = last_two});
        EXPECT_EQ(t[0].item<double>(), rank < n - 2 ? 1 : 2);
        all_reduce(t.fill_(1), {.group = everyone});
        EXPECT_EQ(t[0].item<double>(), n);
        t.fill_(rank);
        broadcast(t, {.src = n - 1, .group = last_two});
        EXPECT_EQ(t[0].item<double>(), rank < n - 2 ? rank : n - 1);
        if (last_two.is_member()) {
          EXPECT_THROW(broadcast(t, {.src = n, .group = last_two}), UsageError);
        }
      });
    }
  }
}

TEST(World, OfOneNeedsNoEnvironment) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    destroy_process_group();
    EXPECT_FALSE(is_initialized());
    const World world = init_process_group();
    auto t = torch::ones({2});
    all_reduce(t);
    EXPECT_EQ(t.sum().item<float>(), 2);
    EXPECT_EQ(get_world_size(), 1);
    EXPECT_EQ(get_backend(), "paceline");
    EXPECT_THROW(static_cast<void>(init_process_group()), UsageError);
  });
}

TEST(World, CanBeMadeAgainAndOverTcpAndFile) {
  const std::string path = ::testing::TempDir() + "store." + std::to_string(::getpid());
  for (const auto& backend : backends()) {
    expect_torch_ranks(3, backend, [&](int rank, int size) {
      // Rank 0 finds a free port and tells the others through the first world.
      const auto port = torch::zeros({1}, at::kLong);
      if (rank == 0)
        port.fill_(c10::make_intrusive<c10d::TCPStore>(
                       "127.0.0.1",
                       c10d::TCPStoreOptions{.port = 0, .isServer = true, .waitWorkers = false})
                       ->getPort());
      broadcast(port);
      barrier();
      destroy_process_group();
      const std::string tcp = "tcp://127.0.0.1:" + std::to_string(port.item<std::int64_t>());
      for (const std::string& method : {tcp, "file://" + path}) {
        const World world = init_process_group(
            {.backend = backend, .init_method = method, .world_size = size, .rank = rank});
        auto t = torch::ones({2});
        all_reduce(t);
        EXPECT_EQ(t[0].item<float>(), 3);
        barrier();
      }
    });
    ::unlink(path.c_str());
  }
}

TEST(Collectives, TypesAndOperationsThatCannotWorkAreRefused) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    EXPECT_THROW(all_reduce(torch::ones({2}, at::kChar)), UsageError);
    EXPECT_THROW(all_reduce(torch::ones({2}, at::kLong), {.op = ReduceOp::AVG}), UsageError);
    EXPECT_THROW(all_reduce(torch::ones({2}), {.op = ReduceOp::BOR}), UsageError);
    EXPECT_THROW(all_reduce(at::Tensor()), Error);
    EXPECT_THROW(all_gather({torch::ones({2})}, torch::ones({2})), UsageError);
    EXPECT_THROW(all_gather_into_tensor(torch::ones({3}), torch::ones({2})), UsageError);
    auto t = torch::ones({2});
    all_reduce(t);  // nobody was put out of step
    EXPECT_EQ(t[0].item<float>(), 2);
  });
}

TEST(Collectives, TensorsOfDifferentTypesAreNotMoved) {
  const auto ends = test::run_torch_ranks(2, "paceline", [](const RankContext& context) {
    const World world = init_process_group(context.init);
    broadcast(torch::zeros({8}, context.rank == 0 ? at::kHalf : at::kShort));
    return std::string("no error");
  });
  for (const auto& end : ends) {
    EXPECT_THAT(end.report, HasSubstr("rank 0 called broadcast of 8 float16 from rank 0, rank 1 "
                                      "broadcast of 8 int16 from rank 0"));
  }
}

TEST(Collectives, AGroupThatWasLeftRefusesCalls) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    const ProcessGroup group = new_group();
    const auto t = torch::ones({1});
    all_reduce_async(t, {.group = group}).wait();
    const auto backend = group.c10d()->getBackend(at::kCPU);
    destroy_process_group();
    std::vector<at::Tensor> tensors{t};
    for (const bool async : {false, true}) {
      EXPECT_THAT([&] { backend->allreduce(tensors, {.asyncOp = async}); },
                  ThrowsMessage<UsageError>(HasSubstr("which this rank has left")));
    }
  });
}

TEST(Collectives, MemoryThatCannotBeIsRefused) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    for (const long size : {-1L, 1L << 61}) {
      EXPECT_THROW(backend->allocateTensor(size, at::kDouble), UsageError) << size;
    }
    EXPECT_THROW(backend->allocateTensor(1L << 50, at::kDouble), Error);
  });
}

TEST(Collectives, AMismatchSaysTheSameOnEveryRank) {
  const auto ends = test::run_torch_ranks(2, "paceline", [](const RankContext& context) {
    const World world = init_process_group(context.init);
    all_reduce(torch::ones({10 + 2 * context.rank}));
    return std::string("no error");
  });
  for (const auto& end : ends) {
    EXPECT_EQ(
        end.report,
        "threw: rank 0 called all_reduce of 10 float32, rank 1 all_reduce of 12 float32; call "
        "1 of group world");
  }
}

}  // namespace
}  // namespace paceline
