#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <functional>
#include <string>
#include <vector>

#include <paceline/all_reduce_algorithms.h>
#include <paceline/error.h>

#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using test::expect_torch_ranks;
using test::RankContext;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using Algorithm = std::function<Traffic(const at::Tensor&, const AllReduceOptions&)>;

// All of them in a group of `size` ranks, with every number of servers.
std::vector<Algorithm> algorithms(int size) {
  std::vector<Algorithm> all{ring_all_reduce, naive_all_reduce};
  for (int servers = 1; servers <= size; ++servers) {
    all.emplace_back([servers](const at::Tensor& tensor, const AllReduceOptions& options) {
      return parameter_server_all_reduce(tensor, servers, options);
    });
  }
  return all;
}

// Small whole numbers, other ones on each rank: their sums are exact in every type and order.
at::Tensor values_of(int rank, std::int64_t count, at::ScalarType type = at::kFloat) {
  return (torch::arange(count) * 7 + 3 * rank).remainder(5).to(type);
}

at::Tensor sum_by_a_loop(const std::vector<int>& ranks, std::int64_t count) {
  auto sum = torch::zeros({count}, at::kDouble);
  auto* const sums = sum.data_ptr<double>();
  for (const int rank : ranks) {
    for (std::int64_t i = 0; i < count; ++i) {
      sums[i] += static_cast<double>((i * 7 + 3 * rank) % 5);
    }
  }
  return sum;
}

std::vector<int> first_ranks(int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
  return ranks;
}

using AllReduceAlgorithmsWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, AllReduceAlgorithmsWorlds, test::worlds({1, 2, 3, 4, 5, 8}),
                         test::CaseName());

TEST_P(AllReduceAlgorithmsWorlds, AddUpTensorsOfEverySize) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    for (const std::int64_t count : {0, 1, size - 1, size + 1, 1000, 300'007}) {
      const auto expected = sum_by_a_loop(first_ranks(size), count);
      for (const Algorithm& algorithm : algorithms(size)) {
        const auto tensor = values_of(rank, count);
        algorithm(tensor, {});
        EXPECT_TRUE(tensor.to(at::kDouble).equal(expected)) << count << " of " << size;
      }
    }
  });
}

TEST_P(AllReduceAlgorithmsWorlds, GiveTheSameBitsOnEveryRank) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    for (const auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
      torch::manual_seed(rank);
      const auto mine = torch::randn({1001}).to(type);
      const auto near = torch::zeros({1001}, at::kDouble).add_(mine);
      all_reduce(near);
      for (const Algorithm& algorithm : algorithms(size)) {
        const auto tensor = mine.clone();
        algorithm(tensor, {});
        const auto of_rank_0 = tensor.clone();
        broadcast(of_rank_0);
        EXPECT_TRUE(tensor.equal(of_rank_0)) << type;
        // A rounding for each addition.
        const double tolerance = type == at::kFloat ? 1e-5 : type == at::kHalf ? 0.02 : 0.15;
        EXPECT_TRUE(tensor.to(at::kDouble).allclose(near, tolerance, tolerance)) << type;
      }
    }
  });
}

TEST_P(AllReduceAlgorithmsWorlds, LeaveTheGapsOfATensorAsTheyAre) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    const auto expected = sum_by_a_loop(first_ranks(size), 35).view({7, 5});
    for (const Algorithm& algorithm : algorithms(size)) {
      const auto wide = torch::full({7, 10}, -1.0);
      const auto columns = wide.slice(1, 0, 10, 2);
      columns.copy_(values_of(rank, 35).view({7, 5}));
      algorithm(columns, {});
      EXPECT_TRUE(columns.to(at::kDouble).equal(expected)) << wide;
      EXPECT_TRUE(wide.slice(1, 1, 10, 2).eq(-1).all().item<bool>()) << wide;

      const auto transposed = values_of(rank, 35).view({7, 5}).t().requires_grad_();
      algorithm(transposed, {});
      EXPECT_TRUE(transposed.detach().to(at::kDouble).equal(expected.t())) << transposed;
    }
  });
}

TEST_P(AllReduceAlgorithmsWorlds, WorkInSubgroups) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    std::vector<int> odd;
    for (int r = 1; r < size; r += 2) odd.push_back(r);
    if (odd.empty()) odd.push_back(0);
    const auto group = new_group(odd);
    const int members = static_cast<int>(odd.size());
    const auto expected =
        group.is_member() ? sum_by_a_loop(odd, 101) : values_of(rank, 101, at::kDouble);
    for (const Algorithm& algorithm : algorithms(members)) {
      const auto tensor = values_of(rank, 101);
      const Traffic traffic = algorithm(tensor, {.group = group});
      EXPECT_TRUE(tensor.to(at::kDouble).equal(expected)) << tensor;
      EXPECT_EQ(traffic.bytes_sent > 0, group.is_member() && members > 1);
    }
    barrier();
  });
}

// The bytes and messages of rank `rank`, one way: what it sends, it receives.
struct OneWay {
  std::int64_t bytes;
  std::int64_t messages;
};

void expect_traffic(const Traffic& traffic, const OneWay& expected, const std::string& what) {
  EXPECT_EQ(traffic.bytes_sent, expected.bytes) << what;
  EXPECT_EQ(traffic.bytes_received, expected.bytes) << what;
  EXPECT_EQ(traffic.messages_sent, expected.messages) << what;
  EXPECT_EQ(traffic.messages_received, expected.messages) << what;
}

std::int64_t in_total(std::int64_t value) {
  const auto total = torch::tensor({value}, at::kLong);
  all_reduce(total);
  return total.item<std::int64_t>();
}

// The elements of part `index` where `count` elements are cut into `parts`.
std::int64_t part_of(std::int64_t count, std::int64_t parts, std::int64_t index) {
  return count / parts + (index < count % parts ? 1 : 0);
}

TEST_P(AllReduceAlgorithmsWorlds, RingsSendEachChunkOnceAStep) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    for (const std::int64_t count : {0, 1, size - 1, size, size + 1, 1003}) {
      const Traffic traffic = ring_all_reduce(torch::ones({count}, at::kDouble));
      // Every chunk but one is sent by a rank in each half.
      const auto chunk = [&](int i) { return part_of(count, size, (i + size) % size); };
      OneWay sent{};
      OneWay received{};
      for (const int half : {1, 2}) {
        for (int i = 0; i < size; ++i) {
          const auto add = [&](OneWay& to, int omitted) {
            if (i == (omitted + size) % size) return;
            to.bytes += 8 * chunk(i);
            to.messages += chunk(i) > 0 ? 1 : 0;
          };
          add(sent, rank + half);
          add(received, rank + half - 1);
        }
      }
      EXPECT_EQ(traffic.bytes_sent, sent.bytes) << count;
      EXPECT_EQ(traffic.messages_sent, sent.messages) << count;
      EXPECT_EQ(traffic.bytes_received, received.bytes) << count;
      EXPECT_EQ(traffic.messages_received, received.messages) << count;
      EXPECT_EQ(in_total(traffic.bytes_sent), 2 * (size - 1) * count * 8);
      EXPECT_EQ(in_total(traffic.bytes_received), 2 * (size - 1) * count * 8);
    }
  });
}

TEST_P(AllReduceAlgorithmsWorlds, NaiveOnesLeadThroughRank0) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    const std::int64_t others = size - 1;
    const Traffic traffic = naive_all_reduce(torch::ones({1003}));
    expect_traffic(traffic, rank == 0 ? OneWay{others * 4012, others} : OneWay{4012, 1}, "naive");
    EXPECT_EQ(in_total(traffic.bytes_sent), 2 * others * 4012);
  });
}

TEST_P(AllReduceAlgorithmsWorlds, ParameterServersReceiveAShardOfEachRank) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    for (const std::int64_t count : {size - 1, 1003}) {
      for (int servers = 1; servers <= size; ++servers) {
        OneWay expected{};
        for (int server = 0; server < servers; ++server) {
          const std::int64_t shard = part_of(count, servers, server);
          if (shard == 0) continue;
          const std::int64_t messages = server == rank ? size - 1 : 1;
          expected.bytes += messages * shard * 4;
          expected.messages += messages;
        }
        const Traffic traffic = parameter_server_all_reduce(torch::ones({count}), servers);
        expect_traffic(traffic, expected, fmt::format("{} servers", servers));
        EXPECT_EQ(in_total(traffic.bytes_sent), 2 * (size - 1) * count * 4);
      }
    }
  });
}

using AllReduceAlgorithmsRanks = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, AllReduceAlgorithmsRanks, test::own_worlds({2, 3}), test::CaseName());

TEST_P(AllReduceAlgorithmsRanks, ReduceAsAllReduceDoes) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    for (const auto type :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kShort,
          at::kInt, at::kLong, at::kBool, at::kComplexFloat, at::kComplexDouble}) {
      for (const ReduceOp& op :
           {ReduceOp(ReduceOp::SUM), ReduceOp(ReduceOp::AVG), ReduceOp(ReduceOp::PRODUCT),
            ReduceOp(ReduceOp::MIN), ReduceOp(ReduceOp::MAX), ReduceOp(ReduceOp::BAND),
            ReduceOp(ReduceOp::BOR), ReduceOp(ReduceOp::BXOR),
            ReduceOp(c10d::makePreMulSum(rank + 1.0))}) {
        const auto expected = values_of(rank, 50, type);
        bool refused = false;
        try {
          all_reduce(expected, {.op = op});
        } catch (const UsageError&) {
          refused = true;
        }
        for (const Algorithm& algorithm : algorithms(size)) {
          const auto tensor = values_of(rank, 50, type);
          const std::string what =
              fmt::format("{} {}", c10::toString(type), static_cast<int>(op.op_));
          if (refused) {
            EXPECT_THROW(algorithm(tensor, {.op = op}), UsageError) << what;
          } else {
            algorithm(tensor, {.op = op});
            EXPECT_TRUE(tensor.equal(expected)) << what;
          }
        }
      }
    }
  });
}

TEST(AllReduceAlgorithms, ResolveConjugates) {
  expect_torch_ranks(2, "paceline", [](int rank, int size) {
    for (const Algorithm& algorithm : algorithms(size)) {
      const auto plain = torch::full({9}, c10::complex<double>(rank, 1), at::kComplexDouble);
      const auto tensor = plain.conj();
      algorithm(tensor, {});
      EXPECT_TRUE(plain.eq(c10::complex<double>(1, 2)).all().item<bool>()) << plain;
    }
  });
}

using AllReduceAlgorithmsBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, AllReduceAlgorithmsBackends, test::backends_and_nodes());

TEST_P(AllReduceAlgorithmsBackends, NameRanksWhoseCallsDiffer) {
  expect_torch_ranks(3, GetParam(), [](int rank, int) {
    const auto mismatch = [&](const std::string& text, const auto& call) {
      try {
        call();
        ADD_FAILURE() << "no error instead of: " << text;
      } catch (const Mismatch& error) {
        EXPECT_STREQ(error.what(), text.c_str());
        EXPECT_THAT(error.ranks(), ::testing::ElementsAre(1));
      }
    };
    mismatch(
        "ranks 0 and 2 called ring_all_reduce of 100 float32, rank 1 ring_all_reduce of 90 float32",
        [&] { ring_all_reduce(torch::ones({rank == 1 ? 90 : 100})); });
    mismatch(
        "ranks 0 and 2 called naive_all_reduce of 7 int32 with MAX, rank 1 naive_all_reduce of 7 "
        "int32 with MIN",
        [&] {
          naive_all_reduce(torch::ones({7}, at::kInt),
                           {.op = rank == 1 ? ReduceOp::MIN : ReduceOp::MAX});
        });
    mismatch(
        "ranks 0 and 2 called parameter_server_all_reduce of 7 float32 over 2 servers, rank 1 "
        "parameter_server_all_reduce of 7 float32 over 1 server",
        [&] { parameter_server_all_reduce(torch::ones({7}), rank == 1 ? 1 : 2); });
    const auto tensor = torch::ones({5});
    ring_all_reduce(tensor);  // nobody was put out of step
    EXPECT_TRUE(tensor.eq(3).all().item<bool>());
  });
}

TEST(AllReduceAlgorithms, RejectInvalidArguments) {
  expect_torch_ranks(2, "paceline", [](int, int size) {
    const auto t = torch::ones({3});
    EXPECT_THAT([&] { parameter_server_all_reduce(t, 0); },
                ThrowsMessage<UsageError>(HasSubstr("servers is 0; it must be from 1 to")));
    EXPECT_THAT([&] { parameter_server_all_reduce(t, 3); },
                ThrowsMessage<UsageError>(HasSubstr("to the size of the group, 2")));
    for (const Algorithm& algorithm : algorithms(size)) {
      EXPECT_THROW(algorithm(at::Tensor(), {}), UsageError);
      EXPECT_THAT([&] { algorithm(t.to_sparse(), {}); },
                  ThrowsMessage<UsageError>(HasSubstr("it takes dense tensors on the CPU")));
      EXPECT_THROW(algorithm(torch::ones({1}).expand({4}), {}), UsageError);
    }
    barrier();
  });
}

// killed_ranks_test.cpp kills ranks at any moment on the backend paceline.
TEST_P(AllReduceAlgorithmsBackends, EndIfARankIsKilled) {
  for (const Algorithm& algorithm : algorithms(3)) {
    const auto ends = test::run_torch_ranks(3, GetParam(), [&](const RankContext& context) {
      const World world = init_process_group(context.init);
      const auto tensor = torch::ones({1 << 20});
      try {
        algorithm(tensor, {});
        if (context.rank == 1) ::raise(SIGKILL);
        algorithm(tensor, {});
      } catch (const Error& error) {
        return std::string(error.what());
      }
      return std::string("no error");
    });
    for (const std::size_t rank : {0, 2}) {
      EXPECT_TRUE(ends[rank].exited_cleanly());
      EXPECT_NE(ends[rank].report, "no error");
      if (GetParam() == "gloo") continue;  // its errors name no ranks
      EXPECT_THAT(ends[rank].report, ::testing::ContainsRegex("rank 1 (on node 0 )?was lost"));
    }
  }
}

}  // namespace
}  // namespace paceline
