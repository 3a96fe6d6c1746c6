// What the ranks of all nodes throw if a call fails.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <latch>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "internode/connect_leaders.h"
#include "internode/nodes_of_threads.h"

namespace paceline::internode {
namespace {

using namespace std::chrono_literals;
using shm::DataType;
using shm::ReduceOp;
using test::EngineNetwork;
using test::run_on_nodes;
using test::thrown;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

const std::vector<int> kNodes{0, 0, 1, 1, 2};

void all_reduce_once(Group& group, std::size_t count) {
  std::vector<float> data(count, 1);
  group.all_reduce(data.data(), data.data(), count, DataType::float32, ReduceOp::sum);
}

TEST(ErrorsAcrossNodes, DifferentCallsAreAMismatchBeforeAnythingIsMoved) {
  EngineNetwork network;
  const auto errors = run_on_nodes(kNodes, network, [](Group& group) {
    group.barrier();
    all_reduce_once(group, group.rank() == 3 ? 11 : 10);
  });
  for (const auto& error : errors) {
    const auto mismatch = thrown<Mismatch>(error);
    EXPECT_THAT(mismatch.what(),
                AllOf(HasSubstr(", rank 103 all_reduce of 11 float32"),
                      HasSubstr("called all_reduce of 10 float32"), HasSubstr("call 2")));
    EXPECT_THAT(mismatch.ranks(), ElementsAre(103));
    EXPECT_EQ(mismatch.operation(), "all_reduce");
    EXPECT_EQ(mismatch.sequence(), 2);
  }
  EXPECT_EQ(network.carried(), 0);
}

TEST(ErrorsAcrossNodes, PartsThatDoNotFitAreAMismatch) {
  EngineNetwork network;
  const auto errors = run_on_nodes(kNodes, network, [](Group& group) {
    std::vector<char> memory(1000);
    std::vector<shm::Input> inputs(5, {memory.data(), 2});
    std::vector<shm::Output> outputs(5, {memory.data(), 2});
    if (group.rank() == 1) inputs[4].count = 3;
    group.all_to_all(inputs, outputs, DataType::int8);
  });
  for (const auto& error : errors) {
    const auto mismatch = thrown<Mismatch>(error);
    EXPECT_THAT(mismatch.what(),
                HasSubstr("rank 101 gives 3 elements to rank 104, which expects 2"));
    EXPECT_THAT(mismatch.ranks(), ElementsAre(101, 104));
  }
}

TEST(ErrorsAcrossNodes, ATimeoutNamesTheRankThatIsLateOnAnotherNode) {
  for (const int late : {0, 1, 3, 4}) {
    EngineNetwork network;
    std::latch others(4);
    const auto errors = run_on_nodes(
        kNodes, network,
        [&](Group& group) {
          group.barrier();
          if (group.rank() == late) return others.wait();
          try {
            group.barrier();
          } catch (...) {
            others.count_down();
            throw;
          }
        },
        1s);
    for (std::size_t rank = 0; rank < errors.size(); ++rank) {
      if (static_cast<int>(rank) == late) continue;
      const auto timeout = thrown<Timeout>(errors[rank]);
      EXPECT_THAT(timeout.ranks(), ElementsAre(100 + late)) << timeout.what();
      EXPECT_THAT(timeout.what(),
                  AllOf(HasSubstr(std::to_string(100 + late)), HasSubstr("did not arrive"),
                        HasSubstr("barrier, call 2 of group test")));
    }
  }
}

// What ranks of a node show each other is the call, not the parts of it within the node.
TEST(ErrorsAcrossNodes, ATimeoutSaysWhatTheLateRankCalledLast) {
  for (const int calls : {0, 4}) {
    EngineNetwork network;
    std::latch failed(1);
    const auto errors = run_on_nodes(
        {0, 0, 1}, network,
        [&](Group& group) {
          const auto release = [&] {
            if (group.rank() == 0) failed.count_down();
          };
          try {
            for (int i = 0; i < calls; ++i) all_reduce_once(group, 10);
            if (group.rank() == 1) return failed.wait();
            group.barrier();
          } catch (...) {
            release();
            throw;
          }
          release();
        },
        2s);
    EXPECT_THAT(thrown<Timeout>(errors[0]).what(),
                HasSubstr(calls == 0 ? "rank 101: it has made no call yet"
                                     : "rank 101: its last was call 4, all_reduce of 10 float32"));
  }
}

// The calls agree; then ranks wait for it in transfers, and on their nodes for ranks that do.
TEST(ErrorsAcrossNodes, ATimeoutNamesTheRankThatHangsInACall) {
  const std::vector<int> nodes{0, 0, 1, 1, 2, 2};
  for (const int hung : {0, 1, 2, 5}) {
    EngineNetwork network;
    std::latch others(5);
    const std::jthread release([&] {
      others.wait();
      network.release();
    });
    const auto errors = run_on_nodes(
        nodes, network,
        [&](Group& group) {
          all_reduce_once(group, 100'000);
          if (group.rank() == hung) {
            network.hang(hung);
            return all_reduce_once(group, 100'000);
          }
          try {
            all_reduce_once(group, 100'000);
          } catch (...) {
            others.count_down();
            throw;
          }
          others.count_down();
        },
        1s);
    for (std::size_t rank = 0; rank < errors.size(); ++rank) {
      const auto timeout = thrown<Timeout>(errors[rank]);
      EXPECT_THAT(timeout.ranks(), ElementsAre(100 + hung)) << timeout.what();
      EXPECT_THAT(timeout.what(), HasSubstr("all_reduce of 100000 float32, call 2 of group test"));
    }
  }
}

TEST(ErrorsAcrossNodes, ARankThatHasLeftIsMissing) {
  EngineNetwork network;
  const auto errors = run_on_nodes(kNodes, network, [](Group& group) {
    group.barrier();
    if (group.rank() != 4) all_reduce_once(group, 10);
  });
  for (std::size_t rank = 0; rank < 4; ++rank) {
    const auto lost = thrown<PeerLost>(errors[rank]);
    EXPECT_THAT(lost.what(), AllOf(HasSubstr("rank 104 on node 2 has left the group"),
                                   HasSubstr("all_reduce of 10 float32, call 2")));
    EXPECT_THAT(lost.ranks(), ElementsAre(104));
  }
}

TEST(ErrorsAcrossNodes, AnAbortIsTheFailureOfAllNodes) {
  for (const int aborting : {0, 1, 3}) {
    EngineNetwork network;
    const auto errors = run_on_nodes(kNodes, network, [&](Group& group) {
      group.barrier();
      if (group.rank() == aborting) {
        group.region()->abort("out of cheese");
        throw PeerLost("mine", {}, "", 0);
      }
      all_reduce_once(group, 10);
    });
    for (std::size_t rank = 0; rank < errors.size(); ++rank) {
      if (static_cast<int>(rank) == aborting) continue;
      const auto lost = thrown<PeerLost>(errors[rank]);
      EXPECT_THAT(lost.what(), HasSubstr("out of cheese"));
      EXPECT_THAT(lost.ranks(), ElementsAre(100 + aborting));
    }
  }
}

TEST(ErrorsAcrossNodes, ARankThatCannotBeginAnExchangeIsToBlameItself) {
  EngineNetwork network;
  network.limit(4, 0);
  const auto errors =
      run_on_nodes(kNodes, network, [&](Group& group) { all_reduce_once(group, 10); });
  for (const auto& error : errors) {
    const auto lost = thrown<PeerLost>(error);
    EXPECT_THAT(lost.ranks(), ElementsAre(104));
    EXPECT_THAT(lost.what(), AllOf(HasSubstr("rank 104 on node 2 cannot begin the exchange with"),
                                   HasSubstr("no thread is left")));
  }
}

// An engine's error says little, and comes before the leaders know the cause.
TEST(ErrorsAcrossNodes, TheCauseOfAnEnginesErrorIsNamed) {
  EngineNetwork network;
  const auto errors = run_on_nodes(kNodes, network, [&](Group& group) {
    group.barrier();
    if (group.rank() != 4) {
      network.fail(group.rank());
      return all_reduce_once(group, 10);
    }
    // Rank 4 is in the call, since the others exchange nothing before; it fails after they have.
    const std::jthread fault([&] {
      network.await_failure();
      group.region()->abort("a fault of rank 4");
    });
    all_reduce_once(group, 10);
  });
  for (const auto& error : errors) {
    EXPECT_THAT(thrown<PeerLost>(error).what(), HasSubstr("a fault of rank 4"));
  }
}

TEST(ErrorsAcrossNodes, LaterCallsThrowTheSame) {
  EngineNetwork network;
  run_on_nodes(kNodes, network, [](Group& group) {
    std::string texts[2];
    for (std::string& text : texts) {
      try {
        all_reduce_once(group, static_cast<std::size_t>(group.rank()));
      } catch (const Mismatch& error) {
        text = error.what();
      }
    }
    EXPECT_THAT(texts[0], Not(::testing::IsEmpty()));
    EXPECT_EQ(texts[0].substr(0, 100), texts[1].substr(0, 100));
  });
}

// A leader waits for other leaders for kFormationGrace more than the timeout. A rank of its node
// that gave up during this time would blame it instead of the late one. The pause is that time.
TEST(ErrorsAcrossNodes, RanksWaitForALeaderThatWaitsForOthers) {
  constexpr auto kTimeout = 100ms;
  const std::vector<int> nodes{0, 0};
  EngineNetwork network;
  const auto regions = test::make_thread_regions(2, test::small_region(kTimeout));
  auto connections = test::connect_nodes(1);
  const auto form = [&](int rank) {
    const auto& region = regions[static_cast<std::size_t>(rank)];
    const Group group(region, NodeMap(nodes, rank), shm::GlobalRanks({100, 101}, nodes),
                      rank == 0 ? std::move(connections[0]) : NodeLinks::Connections(),
                      network.engine(rank));
    region->depart();
  };
  auto leader = std::async(std::launch::async, [&] {
    std::this_thread::sleep_for(kTimeout + kFormationGrace + 500ms);
    form(0);
  });
  EXPECT_NO_THROW(form(1));
  EXPECT_NO_THROW(leader.get());
}

TEST(ErrorsAcrossNodes, TooManyPartsAreRefused) {
  // Every other rank of 160 is on the same node: no two of a node are one part of the tree.
  std::vector<int> nodes;
  for (int rank = 0; rank < 80; ++rank) nodes.push_back(rank % 2);
  EngineNetwork network;
  for (const auto& error : run_on_nodes(nodes, network, [](Group&) {})) {
    try {
      if (error) std::rethrow_exception(error);
      ADD_FAILURE() << "it was not refused";
    } catch (const UsageError& refusal) {
      EXPECT_THAT(refusal.what(), HasSubstr("its sums have 80 parts, and at most 64 are possible"));
    }
  }
}

}  // namespace
}  // namespace paceline::internode
