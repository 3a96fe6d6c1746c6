#include "internode/bucket_level.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <regex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "internode/nodes_of_threads.h"
#include "shm/buckets/bucket_reducer.h"
#include "support/elements.h"
#include "support/eventually.h"
#include "support/log_lines.h"

namespace paceline::internode {
namespace {

using shm::BucketReducer;
using shm::DataType;
using shm::ReduceOp;
using test::EngineNetwork;
using test::run_on_nodes;
using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;

const std::vector<shm::Bucket> kBuckets{
    {1000, DataType::float32, ReduceOp::avg},   {5, DataType::float32, ReduceOp::avg},
    {40'000, DataType::float64, ReduceOp::sum}, {500, DataType::uint8, ReduceOp::max},
    {20'000, DataType::float16, ReduceOp::avg}, {130, DataType::bfloat16, ReduceOp::avg}};

std::string name_of(std::size_t bucket) {
  return "layer" + std::to_string(bucket);
}

void fill(const BucketReducer& reducer, std::size_t bucket, int rank, std::size_t step) {
  std::mt19937 random(static_cast<unsigned>((rank * 100 + static_cast<int>(step)) * 10) +
                      static_cast<unsigned>(bucket));
  std::uniform_real_distribution<double> values(-3, 3);
  const auto& [count, type, op] = kBuckets[bucket];
  for (std::size_t i = 0; i < count; ++i) {
    const double value =
        op == ReduceOp::max ? std::abs(std::round(values(random))) : values(random);
    test::put(type, reducer.data(bucket).get(), i, value);
  }
}

std::shared_ptr<BucketLevel> make_level(Group& group, EngineNetwork& network) {
  const std::shared_ptr<Group> lasting(std::shared_ptr<void>(), &group);  // not owned
  return std::make_shared<BucketLevel>(lasting, network.engine(group.rank()));
}

// One step, with buckets published in any order. Returns what this rank has afterwards.
Bytes run_step(BucketReducer& reducer, int rank, std::size_t step, double weight) {
  std::mt19937 random(static_cast<unsigned>(rank + 31 * static_cast<int>(step)));
  std::vector<std::size_t> order(kBuckets.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::shuffle(order, random);
  reducer.begin_step({.forwards = static_cast<std::uint32_t>(step)}, {&weight, 1});
  for (const std::size_t bucket : order) {
    fill(reducer, bucket, rank, step);
    reducer.publish(bucket);
    if (random() % 2 == 0) reducer.try_progress();
  }
  reducer.finish();
  Bytes results;
  for (std::size_t bucket = 0; bucket < kBuckets.size(); ++bucket) {
    const auto& [count, type, op] = kBuckets[bucket];
    const std::byte* const data = reducer.data(bucket).get();
    results.insert(results.end(), data, data + count * element_size(type));
  }
  return results;
}

double weight_of(int rank, std::size_t step) {
  return step % 2 == 0 ? 1 : 1 + rank % 3;
}

// What each rank has after each step, if all are on one node: by rank, then by step.
std::vector<std::vector<Bytes>> on_one_node(int ranks, std::size_t steps) {
  std::vector<std::vector<Bytes>> results(static_cast<std::size_t>(ranks));
  test::run_thread_ranks(ranks, [&](std::shared_ptr<shm::Region> region) {
    shm::Group group(std::move(region));
    const int rank = group.rank();
    BucketReducer reducer(group, kBuckets, name_of);
    for (std::size_t step = 0; step < steps; ++step) {
      results[static_cast<std::size_t>(rank)].push_back(
          run_step(reducer, rank, step, weight_of(rank, step)));
    }
  });
  return results;
}

class BucketLevels : public ::testing::TestWithParam<std::vector<int>> {};

TEST_P(BucketLevels, GiveTheBitsOfOneNode) {
  constexpr std::size_t kSteps = 6;
  const auto& nodes = GetParam();
  const auto expected = on_one_node(static_cast<int>(nodes.size()), kSteps);
  EngineNetwork buckets;
  run_on_nodes(nodes, [&](Group& group) {
    const int rank = group.rank();
    BucketReducer reducer(group.local(), kBuckets, name_of,
                          {.between_nodes = make_level(group, buckets)});
    for (std::size_t step = 0; step < kSteps; ++step) {
      EXPECT_TRUE(run_step(reducer, rank, step, weight_of(rank, step)) ==
                  expected[static_cast<std::size_t>(rank)][step])
          << "rank " << rank << " in step " << step;
    }
  });
}

constexpr std::size_t kAbortedStep = 99;  // its values are no other step's

// Publishes all buckets, or the first `published` and then aborts. Returns whom this rank learns to
// be at fault.
std::vector<int> run_aborted_step(BucketReducer& reducer, int rank,
                                  std::optional<std::size_t> published) {
  std::vector<int> at_fault;
  try {
    reducer.begin_step({.forwards = 1});
    for (std::size_t bucket = 0; bucket < published.value_or(kBuckets.size()); ++bucket) {
      fill(reducer, bucket, rank, kAbortedStep);
      reducer.publish(bucket);
      reducer.try_progress();
    }
    if (!published) {
      reducer.finish();
      ADD_FAILURE() << "rank " << rank << " finished a step that another aborted";
    }
  } catch (const Mismatch& mismatch) {
    at_fault = mismatch.ranks();
  }
  reducer.abort_step();
  return at_fault;
}

// A rank throws in the middle of two steps in a row: the others learn who did, and nothing of these
// steps is left in the next one, whose messages are as large.
TEST_P(BucketLevels, GoOnAfterAbortedSteps) {
  const auto& nodes = GetParam();
  const int size = static_cast<int>(nodes.size());
  const auto expected = on_one_node(size, nodes.size());
  EngineNetwork buckets;
  run_on_nodes(nodes, [&](Group& group) {
    const int rank = group.rank();
    BucketReducer reducer(group.local(), kBuckets, name_of,
                          {.between_nodes = make_level(group, buckets)});
    for (int aborting = 0; aborting < size; ++aborting) {
      for (const std::size_t published : {3, 5}) {
        if (rank == aborting) {
          run_aborted_step(reducer, rank, published);
        } else {
          EXPECT_EQ(run_aborted_step(reducer, rank, {}),
                    std::vector{test::global_rank_of(aborting)});
        }
      }
      const auto step = static_cast<std::size_t>(aborting);
      EXPECT_TRUE(run_step(reducer, rank, step, weight_of(rank, step)) ==
                  expected[static_cast<std::size_t>(rank)][step])
          << "rank " << rank << " after rank " << aborting;
    }
  });
}

// Whatever a rank had started of a step when another aborted it. The network ends the process if
// two ends of a message differ.
TEST_P(BucketLevels, CompleteWhatAbortedStepsHaveLeft) {
  const auto& nodes = GetParam();
  const int size = static_cast<int>(nodes.size());
  EngineNetwork buckets;
  const auto deadline = base::Deadline::after(test::kTestTimeout);
  std::atomic<bool> over = false;
  run_on_nodes(nodes, [&](Group& group) {
    const int rank = group.rank();
    BucketReducer reducer(group.local(), kBuckets, name_of,
                          {.between_nodes = make_level(group, buckets)});
    for (int step = 0; step < 2 * size; ++step) {
      const bool aborts = rank == step % size;
      run_aborted_step(reducer, rank,
                       aborts ? std::optional(static_cast<std::size_t>(step % 6)) : std::nullopt);
      if (step % 3 == 0) run_step(reducer, rank, 0, 1);
    }
    while (!over) {
      run_step(reducer, rank, 1, 1);
      group.barrier();
      if (rank == 0) over = buckets.under_way() == 0 || deadline.expired();
      group.barrier();
    }
  });
  EXPECT_EQ(buckets.under_way(), 0);
}

TEST(BucketLevelErrors, ATimeoutNamesTheRankThatIsLateOnAnotherNode) {
  const std::vector<int> nodes{0, 0, 1, 1};
  for (int late = 0; late < 4; ++late) {
    EngineNetwork network;
    EngineNetwork buckets;
    std::latch published(3);
    std::latch others(3);
    const auto errors = run_on_nodes(
        nodes, network,
        [&](Group& group) {
          BucketReducer reducer(group.local(), kBuckets, name_of,
                                {.between_nodes = make_level(group, buckets)});
          reducer.begin_step({.forwards = 1});
          for (std::size_t bucket = 0; bucket < kBuckets.size(); ++bucket) {
            if (group.rank() == late && bucket == 3) return others.wait();
            fill(reducer, bucket, group.rank(), 1);
            reducer.publish(bucket);
            reducer.try_progress();
          }
          published.arrive_and_wait();  // on a busy machine, another rank could be as late
          try {
            reducer.finish();
          } catch (const PeerError& error) {
            EXPECT_NE(dynamic_cast<const Timeout*>(&error), nullptr) << error.what();
            EXPECT_EQ(error.ranks(), std::vector{test::global_rank_of(late)}) << error.what();
            others.count_down();
            throw;
          }
        },
        std::chrono::seconds(1));
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(errors[static_cast<std::size_t>(rank)] == nullptr, rank == late);
    }
  }
}

TEST(BucketLevelErrors, TheLogNamesTheRankThatIsLateOnAnotherNode) {
  constexpr int kLate = 2;
  const test::LogLines log(std::chrono::milliseconds(1500));
  const std::string waiting = fmt::format("^ranks? ({}|{}) .*waited .* for",
                                          test::global_rank_of(0), test::global_rank_of(1));
  const auto reports = [&] {
    std::vector<std::string> lines = log.all();
    std::erase_if(lines, [&](const std::string& line) {
      return !std::regex_search(line, std::regex(waiting));
    });
    return lines;
  };
  EngineNetwork network;
  EngineNetwork buckets;
  run_on_nodes(
      {0, 0, 1, 1}, network,
      [&](Group& group) {
        BucketReducer reducer(group.local(), kBuckets, name_of,
                              {.between_nodes = make_level(group, buckets)});
        reducer.begin_step({.forwards = 1});
        for (std::size_t bucket = 0; bucket < kBuckets.size(); ++bucket) {
          if (group.rank() == kLate && bucket == 3) {
            EXPECT_TRUE(test::eventually([&] { return !reports().empty(); }));
          }
          fill(reducer, bucket, group.rank(), 1);
          reducer.publish(bucket);
          reducer.try_progress();
        }
        reducer.finish();
      },
      std::chrono::seconds(60));
  // Whether the other node has said which of its ranks is late, or not yet.
  const std::string named = fmt::format("{} ranks? {}", waiting, test::global_rank_of(kLate));
  EXPECT_THAT(reports(), ::testing::Each(::testing::ContainsRegex(named)));
}

// The engine notices it first, and the leaders cannot say why.
TEST(BucketLevelErrors, AFailedTransferNamesItsOtherEnd) {
  EngineNetwork network;
  EngineNetwork buckets;
  const auto errors = run_on_nodes({0, 1}, network, [&](Group& group) {
    BucketReducer reducer(group.local(), kBuckets, name_of,
                          {.between_nodes = make_level(group, buckets)});
    run_step(reducer, group.rank(), 1, 1);
    if (group.rank() == 0) buckets.fail(0);
    try {
      run_step(reducer, group.rank(), 1, 1);
    } catch (const PeerLost& lost) {
      EXPECT_EQ(lost.ranks(), std::vector{test::global_rank_of(1)}) << lost.what();
      EXPECT_THAT(lost.what(), HasSubstr("the wire broke"));
      throw;
    }
  });
  for (const auto& error : errors) EXPECT_NE(error, nullptr);
}

TEST(BucketLevelErrors, AFailedConnectionFailsAllNodes) {
  EngineNetwork network;
  EngineNetwork buckets;
  buckets.fail(3);
  const auto errors =
      run_on_nodes({0, 0, 1, 1}, network, [&](Group& group) { make_level(group, buckets); });
  for (const auto& error : errors) {
    const auto lost = test::thrown<PeerLost>(error);
    EXPECT_EQ(lost.ranks(), std::vector{test::global_rank_of(1)}) << lost.what();
    EXPECT_THAT(lost.what(), HasSubstr("the wire broke"));
  }
}

TEST(BucketLevelErrors, ARankThatIsLostEndsTheWaitToConnect) {
  EngineNetwork network;
  EngineNetwork buckets;
  EngineNetwork elsewhere;  // nobody else is there
  const auto errors = run_on_nodes({0, 1}, network, [&](Group& group) {
    if (group.rank() == 0) {
      make_level(group, buckets);
      return;
    }
    const std::jthread failing([&] {
      while (elsewhere.started() == 0) std::this_thread::yield();
      group.region()->abort("its disk is full");
    });
    make_level(group, elsewhere);
  });
  for (const auto& error : errors) {
    EXPECT_THAT(test::thrown<PeerLost>(error).what(), HasSubstr("its disk is full"));
  }
}

TEST(BucketLevelErrors, ConnectingHasTheTimeoutOfTheGroup) {
  EngineNetwork network;
  EngineNetwork buckets;
  EngineNetwork elsewhere;
  const auto errors = run_on_nodes(
      {0, 1}, network,
      [&](Group& group) { make_level(group, group.rank() == 0 ? buckets : elsewhere); },
      std::chrono::milliseconds(200));
  for (const auto& error : errors) EXPECT_FALSE(test::thrown<Timeout>(error).ranks().empty());
}

// A node whose ranks throw in every step does not wait for the others, which learn it step by step.
TEST(BucketLevelsOfTwo, LearnOfStepsAbortedLongAgo) {
  constexpr int kSteps = 40;
  const auto expected = on_one_node(2, 1);
  EngineNetwork buckets;
  std::promise<void> ahead;
  run_on_nodes({0, 1}, [&](Group& group) {
    const int rank = group.rank();
    BucketReducer reducer(group.local(), kBuckets, name_of,
                          {.between_nodes = make_level(group, buckets)});
    if (rank == 1) ahead.get_future().wait();
    for (int step = 0; step < kSteps; ++step) {
      run_aborted_step(reducer, rank, rank == 0 ? std::optional<std::size_t>(3) : std::nullopt);
    }
    if (rank == 0) ahead.set_value();
    EXPECT_TRUE(run_step(reducer, rank, 0, weight_of(rank, 0)) ==
                expected[static_cast<std::size_t>(rank)][0]);
  });
}

// What rank 0 throws if it runs a step, and the others do something else.
template <typename Error>
void expect_in_a_step(const std::vector<int>& nodes,
                      const std::function<void(Group&, BucketReducer&)>& others,
                      const std::vector<int>& at_fault, const std::string& text) {
  EngineNetwork network;
  EngineNetwork buckets;
  const auto errors = run_on_nodes(nodes, network, [&](Group& group) {
    BucketReducer reducer(group.local(), kBuckets, name_of,
                          {.between_nodes = make_level(group, buckets)});
    run_step(reducer, group.rank(), 1, 1);
    if (group.rank() != 0) return others(group, reducer);
    run_step(reducer, group.rank(), 2, 1);
  });
  const auto error = test::thrown<Error>(errors[0]);
  EXPECT_EQ(error.ranks(), at_fault) << error.what();
  EXPECT_THAT(error.what(), HasSubstr(text));
}

TEST(BucketLevelErrors, ARankThatHasLeftIsLost) {
  expect_in_a_step<PeerLost>(
      {0, 1}, [](Group&, BucketReducer&) {}, {101},
      "rank 101 on node 1 has left the group: see the output of a rank that failed; if");
}

TEST(BucketLevelErrors, ACallElsewhereIsAMismatch) {
  expect_in_a_step<Mismatch>(
      {0, 1, 1}, [](Group& group, BucketReducer&) { EXPECT_ANY_THROW(group.barrier()); }, {100},
      "wait for all ranks in barrier, call");
}

TEST(BucketLevelErrors, ACallOfARankOfTheSameNodeIsAMismatch) {
  expect_in_a_step<Mismatch>(
      {0, 0, 1},
      [](Group& group, BucketReducer& reducer) {
        if (group.rank() == 2) {
          EXPECT_ANY_THROW(run_step(reducer, 2, 2, 1));
          return;
        }
        std::vector<float> values(3);
        EXPECT_ANY_THROW(group.broadcast(values.data(), 3, DataType::float32, 2));
      },
      {100, 101},
      "rank 101 waits for rank 100 in broadcast of 3 float32 from rank 102, call 4, while");
}

// Its exception's text comes after the step was aborted.
TEST(BucketLevelErrors, ARankThatThrowsIsLostForItsReason) {
  EngineNetwork network;
  EngineNetwork buckets;
  const auto errors = run_on_nodes({0, 1}, network, [&](Group& group) {
    {
      BucketReducer reducer(group.local(), kBuckets, name_of,
                            {.between_nodes = make_level(group, buckets)});
      if (group.rank() == 1) return static_cast<void>(run_step(reducer, 1, 1, 1));
      reducer.begin_step({.forwards = 1});
      fill(reducer, 0, 0, 1);
      reducer.publish(0);
      reducer.try_progress();
    }
    group.region()->abort("no space on the disk");
  });
  EXPECT_THAT(test::thrown<PeerLost>(errors[1]).what(), HasSubstr("no space on the disk"));
}

INSTANTIATE_TEST_SUITE_P(Layouts, BucketLevels,
                         ::testing::Values(std::vector{0, 1}, std::vector{0, 0, 1, 1},
                                           std::vector{0, 0, 0, 1}, std::vector{0, 1, 0, 1, 0},
                                           std::vector{0, 0, 0, 1, 1, 2},
                                           std::vector{0, 0, 1, 1, 2, 2}));

}  // namespace
}  // namespace paceline::internode
