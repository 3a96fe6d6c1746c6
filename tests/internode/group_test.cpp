#include "internode/group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "internode/nodes_of_threads.h"
#include "shm/collectives/group.h"
#include "support/elements.h"
#include "support/thoroughness.h"

namespace paceline::internode {
namespace {

using shm::Collectives;
using shm::DataType;
using shm::Input;
using shm::Output;
using shm::ReduceOp;
using test::EngineNetwork;
using test::global_rank_of;
using test::run_on_nodes;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;

// Even and uneven nodes, whose ranks follow each other or not.
const std::vector<std::vector<int>> kLayouts{
    {0, 1},
    {0, 0, 1, 1},
    {0, 0, 0, 1},
    {0, 1, 0, 1, 0},
    {0, 0, 1, 1, 2, 2},
    {0, 0, 0, 1, 1, 2},
    {0, 0, 0, 0, 1, 1, 1, 1},
    {0, 1, 2, 3, 3, 2, 1, 0},
};
const std::vector<std::size_t> kCounts{0, 1, 3, 17, 1000, test::kSanitized ? 10'000u : 40'000u};

// What a rank has before a call, of any type: bytes that are numbers of moderate size.
Bytes random_data(DataType type, std::size_t count, int rank, int salt = 0) {
  std::mt19937 random(static_cast<unsigned>(rank * 1000 + salt));
  std::uniform_real_distribution<double> values(-2, 2);
  Bytes data(count * element_size(type));
  for (std::size_t i = 0; i < count; ++i) test::put(type, data.data(), i, {values(random), 0.5});
  return data;
}

using Program = std::function<Bytes(Collectives&)>;

// Runs the program on ranks of one node, and then spread over nodes: every rank has to have the
// same bytes in the end.
void expect_as_on_one_node(const std::vector<int>& nodes, const Program& program) {
  std::vector<Bytes> expected(nodes.size());
  test::run_thread_ranks(static_cast<int>(nodes.size()), [&](std::shared_ptr<shm::Region> region) {
    shm::Group group(std::move(region));
    expected[static_cast<std::size_t>(group.rank())] = program(group);
  });
  run_on_nodes(nodes, [&](Group& group) {
    const Bytes got = program(group);
    EXPECT_TRUE(got == expected[static_cast<std::size_t>(group.rank())])
        << "rank " << group.rank() << " of " << ::testing::PrintToString(nodes);
  });
}

class AcrossNodes : public ::testing::TestWithParam<std::vector<int>> {
 protected:
  int size() const { return static_cast<int>(GetParam().size()); }
};

TEST_P(AcrossNodes, AllReduceAndReduceGiveTheBitsOfOneNode) {
  expect_as_on_one_node(GetParam(), [&](Collectives& group) {
    Bytes results;
    for (const DataType type : {DataType::float32, DataType::float16, DataType::bfloat16,
                                DataType::float64, DataType::int32, DataType::complex64}) {
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::max}) {
        if (!is_reducible(type, op)) continue;
        if (test::kSanitized && op != ReduceOp::avg) continue;  // the path is the same
        for (const std::size_t count : kCounts) {
          const Bytes mine = random_data(type, count, group.rank());
          Bytes result = mine;
          group.all_reduce(result.data(), result.data(), count, type, op);
          results.insert(results.end(), result.begin(), result.end());
          const int root = static_cast<int>(count) % group.size();
          Bytes at_root(group.rank() == root ? mine.size() : 0);
          group.reduce(mine.data(), at_root.data(), count, type, op, root);
          results.insert(results.end(), at_root.begin(), at_root.end());
        }
      }
    }
    return results;
  });
}

// NaNs of all kinds, and booleans that are neither 0 nor 1.
TEST_P(AcrossNodes, UnusualValuesGiveTheBitsOfOneNode) {
  expect_as_on_one_node(GetParam(), [&](Collectives& group) {
    Bytes results;
    for (const DataType type :
         {DataType::float32, DataType::float16, DataType::bfloat16, DataType::boolean}) {
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::product, ReduceOp::min}) {
        Bytes data = random_data(type, 1000, group.rank());
        std::fill_n(data.begin() + std::ptrdiff_t{8} * group.rank(), 40, std::byte{0xff});
        group.all_reduce(data.data(), data.data(), 1000, type, op);
        results.insert(results.end(), data.begin(), data.end());
      }
    }
    return results;
  });
}

// While one part crosses, the next is added up.
TEST(LargeTensorsAcrossNodes, GiveTheBitsOfOneNode) {
  using Layout = std::pair<std::vector<int>, DataType>;
  for (const auto& [nodes, type] :
       {Layout{{0, 0, 1, 1}, DataType::float32}, Layout{{0, 0, 0, 1, 1, 2}, DataType::float32},
        Layout{{0, 1}, DataType::bfloat16}}) {
    expect_as_on_one_node(nodes, [&, type = type](Collectives& group) {
      const std::size_t count = (test::kSanitized ? 4'400'004 : 10'000'004) / element_size(type);
      Bytes result = random_data(type, count, group.rank());
      group.all_reduce(result.data(), result.data(), count, type, ReduceOp::avg);
      Bytes at_root(group.rank() == 1 ? result.size() : 0);
      group.reduce(result.data(), at_root.data(), count, type, ReduceOp::sum, 1);
      result.insert(result.end(), at_root.begin(), at_root.end());
      return result;
    });
  }
}

// Sums of 16-bit floats have 32 bits. Nodes send elements if none of them adds up several ranks.
TEST(ReductionsAcrossNodes, SendSumsOnlyIfANodeAddsUp) {
  constexpr std::size_t kCount = 12'000;
  struct Case {
    std::vector<int> nodes;
    std::size_t bytes;  // for each element, from all nodes
  };
  // On two nodes without sums, each sends all its elements. Otherwise nodes send sums for the
  // others' slices, and then results.
  for (const auto& [nodes, bytes] :
       {Case{{0, 1}, 4}, Case{{0, 1, 2}, 8}, Case{{0, 0, 1, 1}, 6}, Case{{0, 0, 1}, 6}}) {
    EngineNetwork network;
    run_on_nodes(nodes, network, [&](Group& group) {
      Bytes data = random_data(DataType::float16, kCount, group.rank());
      group.all_reduce(data.data(), data.data(), kCount, DataType::float16, ReduceOp::sum);
    });
    EXPECT_EQ(network.carried(), kCount * bytes) << ::testing::PrintToString(nodes);
  }
}

TEST_P(AcrossNodes, ReduceScatterGivesTheBitsOfOneNode) {
  expect_as_on_one_node(GetParam(), [&](Collectives& group) {
    Bytes results;
    for (const DataType type : {DataType::float32, DataType::float16}) {
      for (const std::size_t count : kCounts) {
        for (const std::size_t more : {std::size_t{0}, std::size_t{5}}) {  // for later ranks
          std::vector<Bytes> mine;
          std::vector<Input> inputs;
          for (int to = 0; to < group.size(); ++to) {
            const std::size_t part = count + more * static_cast<std::size_t>(to);
            mine.push_back(random_data(type, part, group.rank(), to));
            inputs.push_back({mine.back().data(), part});
          }
          const std::size_t part = inputs[static_cast<std::size_t>(group.rank())].count;
          Bytes result(part * element_size(type));
          group.reduce_scatter(inputs, {result.data(), part}, type, ReduceOp::avg);
          results.insert(results.end(), result.begin(), result.end());
        }
      }
    }
    return results;
  });
}

TEST_P(AcrossNodes, BroadcastGivesTheRootsDataToAll) {
  run_on_nodes(GetParam(), [&](Group& group) {
    for (int root = 0; root < group.size(); ++root) {
      for (const std::size_t count : kCounts) {
        const Bytes expected = random_data(DataType::int32, count, root);
        Bytes data = group.rank() == root ? expected : Bytes(expected.size());
        group.broadcast(data.data(), count, DataType::int32, root);
        EXPECT_TRUE(data == expected) << count << " from " << root << " on " << group.rank();
      }
    }
  });
}

TEST_P(AcrossNodes, GatherAndScatterMovePartsToAndFromTheRoot) {
  run_on_nodes(GetParam(), [&](Group& group) {
    for (int root = 0; root < group.size(); ++root) {
      for (const std::size_t count : kCounts) {
        const Bytes mine = random_data(DataType::float32, count, group.rank());
        std::vector<Bytes> all;
        std::vector<Output> outputs;
        std::vector<Input> inputs;
        for (int rank = 0; group.rank() == root && rank < group.size(); ++rank) {
          all.emplace_back(mine.size());
          outputs.push_back({all.back().data(), count});
          inputs.push_back({all.back().data(), count});
        }
        group.gather({mine.data(), count}, outputs, DataType::float32, root);
        for (std::size_t rank = 0; rank < all.size(); ++rank) {
          EXPECT_TRUE(all[rank] == random_data(DataType::float32, count, static_cast<int>(rank)));
        }
        Bytes back(mine.size());
        group.scatter(inputs, {back.data(), count}, DataType::float32, root);
        EXPECT_TRUE(back == mine);
      }
    }
  });
}

TEST_P(AcrossNodes, AllGatherGivesAllPartsToAll) {
  run_on_nodes(GetParam(), [&](Group& group) {
    for (const std::size_t count : kCounts) {
      for (const std::size_t more : {std::size_t{0}, std::size_t{3}}) {
        const auto part = [&](int rank) { return count + more * static_cast<std::size_t>(rank); };
        std::vector<Bytes> all;
        std::vector<Output> outputs;
        for (int rank = 0; rank < group.size(); ++rank) {
          all.emplace_back(part(rank) * 2);
          outputs.push_back({all.back().data(), part(rank)});
        }
        const Bytes mine = random_data(DataType::int16, part(group.rank()), group.rank());
        group.all_gather({mine.data(), part(group.rank())}, outputs, DataType::int16);
        for (int rank = 0; rank < group.size(); ++rank) {
          EXPECT_TRUE(all[static_cast<std::size_t>(rank)] ==
                      random_data(DataType::int16, part(rank), rank));
        }
      }
    }
  });
}

TEST_P(AcrossNodes, AllToAllMovesEachPart) {
  run_on_nodes(GetParam(), [&](Group& group) {
    const auto part = [&](int from, int to) {
      return static_cast<std::size_t>((from * 7 + to * 13) % 5) * 1000;
    };
    std::vector<Bytes> mine;
    std::vector<Bytes> got;
    std::vector<Input> inputs;
    std::vector<Output> outputs;
    for (int peer = 0; peer < group.size(); ++peer) {
      const std::size_t given = part(group.rank(), peer);
      mine.push_back(random_data(DataType::float64, given, group.rank(), peer));
      inputs.push_back({mine.back().data(), given});
      const std::size_t expected = part(peer, group.rank());
      got.emplace_back(expected * 8);
      outputs.push_back({got.back().data(), expected});
    }
    group.all_to_all(inputs, outputs, DataType::float64);
    for (int peer = 0; peer < group.size(); ++peer) {
      EXPECT_TRUE(got[static_cast<std::size_t>(peer)] ==
                  random_data(DataType::float64, part(peer, group.rank()), peer, group.rank()));
    }
  });
}

TEST_P(AcrossNodes, BarrierWaitsForAll) {
  std::atomic<int> arrived = 0;
  run_on_nodes(GetParam(), [&](Group& group) {
    for (int round = 1; round <= 20; ++round) {
      ++arrived;
      group.barrier();
      EXPECT_GE(arrived, round * group.size());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, AcrossNodes, ::testing::ValuesIn(kLayouts));

}  // namespace
}  // namespace paceline::internode
