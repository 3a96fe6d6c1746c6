#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <paceline/collectives.h>

#include "support/thread_ranks.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using namespace std::chrono_literals;
using test::expect_torch_ranks;

using CollectivesWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, CollectivesWorlds, test::worlds(), test::CaseName());

TEST_P(CollectivesWorlds, ReduceAndGatherAndScatter) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
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

TEST_P(CollectivesWorlds, AcceptConjugatedAndNegatedViews) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    const auto values = torch::complex(torch::full({3}, 1.0 + rank), torch::full({3}, 2.0));
    const auto conjugated = values.clone().conj();
    broadcast(conjugated, {.src = size - 1});
    EXPECT_TRUE(
        conjugated.equal(torch::complex(torch::full({3}, 1.0 * size), torch::full({3}, -2.0))));
    const auto negated = torch::imag(values.clone().conj());
    all_reduce(negated);
    EXPECT_TRUE(negated.equal(torch::full({3}, -2.0 * size)));
  });
}

TEST_P(CollectivesWorlds, AcceptListsAndNonContiguousTensors) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
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

// Only the number of elements counts.
TEST_P(CollectivesWorlds, AcceptListsOfOtherShapes) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> inputs;
    for (int r = 0; r < size; ++r) {
      outputs.push_back(r % 2 == 0 ? torch::zeros({2, 3}) : torch::zeros({6, 1}));
      inputs.push_back(torch::full({3, r % 2 == 0 ? 2 : 1, r % 2 == 0 ? 1 : 2}, 1.0 * r));
    }
    const auto mine = torch::full({6}, 1.0 * rank);
    const auto expect_numbers = [&] {
      for (std::size_t r = 0; r < outputs.size(); ++r) {
        EXPECT_TRUE(outputs[r].eq(static_cast<double>(r)).all().item<bool>()) << outputs[r];
        outputs[r].zero_();
      }
    };
    all_gather(outputs, mine);
    expect_numbers();
    gather(mine, rank == 0 ? outputs : std::vector<at::Tensor>());
    if (rank == 0) expect_numbers();
    auto part = torch::zeros({1, 6});
    scatter(part, rank == 0 ? inputs : std::vector<at::Tensor>());
    EXPECT_TRUE(part.eq(rank).all().item<bool>()) << part;
    reduce_scatter(part, inputs);
    EXPECT_TRUE(part.eq(rank * size).all().item<bool>()) << part;
    all_to_all(outputs, inputs);
    for (const auto& output : outputs) EXPECT_TRUE(output.eq(rank).all().item<bool>()) << output;
  });
}

TEST_P(CollectivesWorlds, WithARootReachEveryRank) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    for (int root = 0; root < size; ++root) {
      auto t = torch::full({3, 4}, rank + 1.0);
      reduce(t, {.dst = root, .op = ReduceOp::PRODUCT});
      double product = 1;
      for (int r = 0; r < size; ++r) product *= r + 1;
      EXPECT_TRUE(rank != root || t.eq(product).all().item<bool>()) << t;

      std::vector<at::Tensor> list;
      for (int r = 0; r < size && rank == root; ++r) list.push_back(torch::full({2, 3}, 10.0 * r));
      auto column = torch::zeros({2, 6}).slice(1, 0, 6, 2);
      scatter(column, list, {.src = root});
      EXPECT_TRUE(column.eq(10.0 * rank).all().item<bool>()) << column;
      for (auto& one : list) one.zero_();
      gather(column + 1, list, {.dst = root});
      for (std::size_t r = 0; r < list.size(); ++r) {
        EXPECT_TRUE(list[r].eq(10.0 * static_cast<double>(r) + 1).all().item<bool>()) << list[r];
      }
      gather_async(column + 2, list, {.dst = root}).wait();
      EXPECT_TRUE(rank != root || list[0].eq(2).all().item<bool>());
    }
  });
}

TEST_P(CollectivesWorlds, AllToAllExchangesEverySplit) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    // Rank r gives r + to + 1 rows to rank `to`.
    std::vector<std::int64_t> give;
    std::vector<std::int64_t> get;
    for (int r = 0; r < size; ++r) give.push_back(rank + r + 1);
    get = give;  // symmetric
    const auto rows = std::accumulate(give.begin(), give.end(), std::int64_t{0});
    const auto input = torch::full({rows, 2}, static_cast<double>(rank));
    auto output = torch::empty({rows, 2});
    all_to_all_single(output, input, {.output_split_sizes = get, .input_split_sizes = give});
    std::int64_t at = 0;
    for (int r = 0; r < size; ++r) {
      EXPECT_TRUE(output.slice(0, at, at + rank + r + 1).eq(r).all().item<bool>());
      at += rank + r + 1;
    }
    const auto even = torch::arange(size) + 100 * rank;
    auto swapped = torch::empty_like(even);
    all_to_all_single_async(swapped, even).wait();
    EXPECT_TRUE(swapped.eq(100 * torch::arange(size) + rank).all().item<bool>());
  });
}

TEST(Collectives, ReduceMoreThanANodeReceivesAtOnce) {
  if (!is_gloo_available()) GTEST_SKIP() << "the backend gloo is not in this build";
  const auto ends = test::run_torch_ranks(4, "paceline", [](const test::RankContext& context) {
    const std::string rank = std::to_string(context.rank);
    ::setenv("RANK", rank.c_str(), 1);
    ::setenv("GROUP_RANK", rank.c_str(), 1);  // each rank on a node of its own
    ::setenv("WORLD_SIZE", "4", 1);
    ::setenv("LOCAL_RANK", "0", 1);
    ::setenv("LOCAL_WORLD_SIZE", "1", 1);
    const World world = init_process_group(context.init);
    EXPECT_EQ(topology().size(), 4U);
    auto t = torch::full({2 << 20}, context.rank + 1.0F);
    all_reduce(t);
    EXPECT_TRUE(t.eq(10).all().item<bool>());
    return std::string();
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
}

using CollectivesRanks = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, CollectivesRanks, test::own_worlds(), test::CaseName());

TEST_P(CollectivesRanks, AllToAllExchangesLists) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    for (int r = 0; r < n; ++r) {
      inputs.push_back(torch::full({rank + r, 3}, rank, at::kInt));
      outputs.push_back(torch::empty({rank + r, 3}, at::kInt));
    }
    all_to_all(outputs, inputs);
    for (int r = 0; r < n; ++r) {
      EXPECT_TRUE(outputs[static_cast<std::size_t>(r)].eq(r).all().item<bool>());
    }
    std::vector<at::Tensor> all;
    for (int r = 0; r < n; ++r) all.push_back(torch::empty({2 * r}));
    all_gather(all, torch::full({2 * rank}, static_cast<float>(rank)));
    for (int r = 0; r < n; ++r) {
      EXPECT_TRUE(all[static_cast<std::size_t>(r)].eq(r).all().item<bool>());
    }
  });
}

using CollectivesRanksUpTo3 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, CollectivesRanksUpTo3, test::own_worlds({2, 3}), test::CaseName());

TEST_P(CollectivesRanksUpTo3, EveryReductionEqualsGloos) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    const auto gloo = new_group({}, {.backend = "gloo"});
    for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte,
                            at::kInt, at::kLong}) {
      std::vector<ReduceOp> ops{ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX};
      if (!at::isFloatingType(type)) {
        ops.insert(ops.end(), {ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR});
      }
      for (const ReduceOp& op : ops) {
        // Integers that are exact in all types, whatever the order.
        const bool compares = op == ReduceOp::MIN || op == ReduceOp::MAX;
        const int values = compares ? 256 : 4;
        const auto ours = (torch::arange(1000) * 7 + 3 * rank).remainder(values).to(type);
        const auto theirs = ours.clone();
        all_reduce(ours, {.op = op});
        all_reduce(theirs, {.op = op, .group = gloo});
        EXPECT_TRUE(ours.equal(theirs)) << type << ' ' << static_cast<int>(op.op_);
      }
    }
    auto premultiplied = torch::full({5}, 2.0);
    all_reduce(premultiplied, {.op = c10d::makePreMulSum(0.5 * (rank + 1))});
    EXPECT_TRUE(premultiplied.eq(n * (n + 1) / 2.0).all().item<bool>()) << premultiplied;
    const std::int64_t odd = (std::int64_t{1} << 40) + 1;  // no float32
    auto integers = torch::tensor({odd, std::int64_t{29}}, at::kLong);
    all_reduce(integers, {.op = c10d::makePreMulSum(3.0)});
    EXPECT_TRUE(integers.equal(torch::tensor({3 * n * odd, std::int64_t{87} * n}, at::kLong)));
    integers = torch::tensor({odd, std::int64_t{29}}, at::kLong);
    all_reduce(integers, {.op = c10d::makePreMulSum(torch::tensor(0.1, at::kDouble))});
    EXPECT_TRUE(integers.equal(torch::tensor({n * (odd / 10 + 1), std::int64_t{3} * n}, at::kLong)))
        << integers;
    auto complex = torch::full({3}, c10::complex<double>(rank, 1), at::kComplexDouble);
    all_reduce(complex, {.op = ReduceOp::PRODUCT});
    c10::complex<double> product = 1;
    for (int r = 0; r < n; ++r) product *= c10::complex<double>(r, 1);
    EXPECT_EQ(complex[0].item<c10::complex<double>>(), product);
    auto flags = torch::tensor({rank == 0, true, false});
    all_reduce(flags);
    EXPECT_TRUE(flags.equal(torch::tensor({true, true, false})));
  });
}

using CollectivesWorldsUpTo3 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, CollectivesWorldsUpTo3, test::worlds({1, 2, 3}), test::CaseName());

TEST_P(CollectivesWorldsUpTo3, SparseTensorsAreAddedUp) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    const auto indices = torch::tensor({{0, rank + 1, rank + 1}}, at::kLong);
    const auto values = torch::ones({3, 2});
    const auto tensor = torch::sparse_coo_tensor(indices, values, {n + 2, 2});
    all_reduce(tensor);
    auto expected = torch::zeros({n + 2, 2});
    expected[0].fill_(n);
    for (int r = 0; r < n; ++r) expected[r + 1].fill_(2);
    EXPECT_TRUE(tensor.to_dense().equal(expected)) << tensor;
  });
}

TEST_P(CollectivesWorlds, BroadcastAndGatherBytes) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    const auto all = all_gather_bytes(std::string(static_cast<std::size_t>(rank), 'x'));
    ASSERT_EQ(all.size(), static_cast<std::size_t>(size));
    for (std::size_t r = 0; r < all.size(); ++r) EXPECT_EQ(all[r], std::string(r, 'x'));
    EXPECT_EQ(broadcast_bytes(rank == 0 ? std::string("a\0b", 3) : "ignored"),
              std::string("a\0b", 3));
    EXPECT_EQ(broadcast_bytes(""), "");
  });
}

TEST_P(CollectivesWorlds, RunInOrderWithAsynchronousOnes) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
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
    monitored_barrier();
    monitored_barrier({.timeout = std::chrono::milliseconds::max()});
    barrier();
  });
}

// Of two that wait, the second would write what was received over what the tensor holds by then.
static_assert(!std::is_copy_constructible_v<Work> && !std::is_copy_assignable_v<Work>);
static_assert(std::is_nothrow_move_constructible_v<Work>);

using WorkWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, WorkWorlds, test::worlds(), test::CaseName());

TEST_P(WorkWorlds, IsCompleteAfterAMove) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    const auto table = torch::full({4, 3}, rank + 1.0);
    const auto column = table.select(1, 1);
    Work first = all_reduce_async(column, {.op = ReduceOp::MAX});
    Work second = std::move(first);
    EXPECT_TRUE(first.is_completed());
    first.wait();
    second.wait();
    EXPECT_TRUE(column.eq(size).all().item<bool>());
    second.wait();
  });
}

std::size_t available_memory() {
  std::ifstream file("/proc/meminfo");
  if (std::size_t limit = 0; std::ifstream("/sys/fs/cgroup/memory.max") >> limit) return limit;
  for (std::string name, unit; file >> name;) {
    std::size_t kibibytes = 0;
    file >> kibibytes;
    std::getline(file, unit);
    if (name == "MemAvailable:") return kibibytes << 10;
  }
  return 0;
}

TEST(Collectives, AcceptMoreThan4294967296Elements) {
  constexpr std::int64_t kCount = (std::int64_t{1} << 32) + 5;
  if (available_memory() < std::size_t{12} << 30) GTEST_SKIP() << "takes 12 GiB";
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const auto places =
        torch::tensor({std::int64_t{0}, (kCount - 5) / 2 - 1, (kCount - 5) / 2,
                       (kCount - 5) / 2 + 1, kCount - 6, kCount - 5, kCount - 4, kCount - 1});
    auto tensor = torch::zeros({kCount}, at::kByte);
    const auto put = [&](const at::Tensor& values) { tensor.index_put_({places}, values); };
    const auto numbers = torch::arange(1, 9).to(at::kByte);
    put(numbers * (rank + 1));
    all_reduce(tensor);
    EXPECT_TRUE(tensor.index({places}).equal(numbers * 3));
    put(numbers * (rank + 5));
    broadcast(tensor, {.src = 1});
    EXPECT_TRUE(tensor.index({places}).equal(numbers * 6));
    put(numbers * (rank + 7));
    if (rank == 0) {
      send(tensor, 1);
    } else {
      recv(tensor, {.src = 0});
      EXPECT_TRUE(tensor.index({places}).equal(numbers * 7));
    }
  });
}

}  // namespace
}  // namespace paceline
