// What happens if a rank is lost just before one of its stores into shared memory: the same program
// runs again and again, and each time one rank is killed or stopped at the next of its points.

#include <gtest/gtest.h>

#include <csignal>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <paceline/error.h>

#include "shm/buckets/bucket_reducer.h"
#include "shm/collectives/group.h"
#include "shm/collectives/monitored_barrier.h"
#include "shm/p2p/mailbox.h"
#include "shm/sync/fault_point.h"
#include "support/cases.h"
#include "support/process_ranks.h"
#include "support/shared.h"
#include "support/stopped.h"
#include "support/thoroughness.h"

namespace paceline::shm {
namespace {

using test::thoroughness;

int points_passed = 0;
int planted_point = -1;
std::function<void()> planted_fault;

// What the processes of one run share.
struct FaultState {
  test::Stopped victim;
  std::atomic<bool> point_reached{false};
  std::atomic<int> survivors_done{0};
};

using Floats = std::vector<float>;

// Short where deadlines are to pass. Messages time out first: a rank that has its message already
// waits for the ranks whose messages are missing.
constexpr std::chrono::milliseconds kShort{500};
std::chrono::milliseconds timeout = kShort;
std::chrono::milliseconds message_timeout() {
  return timeout * 2 / 5;
}

void reduce(Group& group, std::size_t count, bool shared) {
  Floats ordinary(count, 1.0f);
  float* data = ordinary.data();
  if (shared) {
    data = static_cast<float*>(group.region()->allocate_or_throw(count * sizeof(float)));
    std::fill_n(data, count, 1.0f);
  }
  group.all_reduce(data, data, count, DataType::float32, ReduceOp::sum);
  EXPECT_EQ(data[count - 1], static_cast<float>(group.size()));
  if (shared) group.region()->memory().free(data);
}

void exchange_messages(Mailbox& mailbox, int rank, int size, std::size_t count) {
  std::atomic<int> open{0};
  std::exception_ptr error;
  const auto done = [&](const std::exception_ptr& failure, int) {
    if (failure) error = failure;
    --open;
  };
  std::vector<Floats> sent(static_cast<std::size_t>(size), Floats(count, 2.0f));
  std::vector<Floats> received(sent.size(), Floats(count));
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const auto at = static_cast<std::size_t>(peer);
    open += 2;
    mailbox.send({sent[at].data(), count, DataType::float32, peer, 0, message_timeout()}, done);
    mailbox.receive({received[at].data(), count, DataType::float32, peer, 0, message_timeout()},
                    done);
  }
  mailbox.pump([&] { return open == 0; });
  if (error) std::rethrow_exception(error);
}

void train(Group& group) {
  constexpr BucketReducer::Bucket kLayers[] = {{10, DataType::float32, ReduceOp::avg},
                                               {3000, DataType::float32, ReduceOp::avg}};
  BucketReducer reducer(group, kLayers, [](std::size_t) { return "a layer"; });
  for (std::uint32_t step = 1; step <= 2; ++step) {
    reducer.begin_step({.forwards = step});
    for (const std::size_t bucket : {1u, 0u}) {
      reducer.publish(bucket);
      reducer.try_progress();
    }
    reducer.finish();
  }
}

// Calls every operation, in an order in which no rank waits for one that waits for another.
void run_program(int rank, int size, BootstrapSockets sockets,
                 const std::function<void(Region&)>& prepare) {
  const auto region = Region::create(std::move(sockets), rank, size,
                                     {.name = "test",
                                      .timeout = timeout,
                                      .staging_bytes = std::size_t{128} << 10,
                                      .arena_bytes = std::size_t{8} << 20,
                                      .single_copy_bytes = std::size_t{64} << 10});
  prepare(*region);
  Group group(region);
  Mailbox mailbox(region);
  group.barrier();
  reduce(group, 100, false);
  reduce(group, 30'000, false);
  reduce(group, 30'000, true);
  Floats data(40'000, 1.0f);
  group.broadcast(data.data(), data.size(), DataType::float32, size - 1);
  const std::size_t part = 10'000;
  Floats others(part * static_cast<std::size_t>(size));
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  for (std::size_t r = 0; r < static_cast<std::size_t>(size); ++r) {
    inputs.push_back({data.data(), part});
    outputs.push_back({&others[r * part], part});
  }
  group.all_to_all(inputs, outputs, DataType::float32);
  Floats whole(data.size());  // of more than single_copy_bytes
  const std::vector<Input> to_each(static_cast<std::size_t>(size), {data.data(), data.size()});
  group.scatter(to_each, {whole.data(), whole.size()}, DataType::float32, size - 1);
  EXPECT_TRUE(whole == data);
  train(group);
  exchange_messages(mailbox, rank, size, 10);
  exchange_messages(mailbox, rank, size, 400'000);  // more than are under way at once
  MonitoredBarrier(region).pass(timeout, true);
  group.barrier();
}

struct RunResult {
  std::vector<std::string> reports;  // by rank: "done", or the ranks blamed
  std::vector<std::string> texts;    // the same, with the error
  bool point_reached = false;
};

std::string blame(const char* what, const PeerError& error) {
  std::string text = what;
  for (const int rank : error.ranks()) text += " " + std::to_string(rank);
  return text + '\n' + error.what();
}

// Runs the program; `victim` calls `fault` at its point number `point`, the last survivor `after`.
RunResult run_with_fault(
    int size, int victim, int point, const std::function<void(FaultState&)>& fault,
    const std::function<void(FaultState&)>& after = [](FaultState&) {}) {
  const test::Shared<FaultState> state;
  const auto ends = test::run_process_ranks(size, [&](int rank, BootstrapSockets sockets) {
    if (rank == victim) {
      planted_point = point;
      planted_fault = [&] {
        state->point_reached = true;
        fault(*state);
      };
    }
    std::string report = "done";
    try {
      run_program(rank, size, std::move(sockets), [](Region&) {});
    } catch (const PeerLost& error) {
      report = blame("lost", error);
    } catch (const Timeout& error) {
      report = blame("late", error);
    } catch (const Mismatch& error) {
      report = blame("mismatch", error);
    }
    if (rank != victim && ++state->survivors_done == size - 1) after(*state);
    return report;
  });
  RunResult result;
  for (const auto& end : ends) {
    result.reports.push_back(end.report.substr(0, end.report.find('\n')));
    result.texts.push_back(end.report);
  }
  result.point_reached = state->point_reached;
  return result;
}

using ProtocolRanksUpTo3 = test::SizeTest;
INSTANTIATE_TEST_SUITE_P(, ProtocolRanksUpTo3, ::testing::Values(2, 3), test::CaseName());

TEST_P(ProtocolRanksUpTo3, SurvivesARankKilledAtEveryFaultPoint) {
  const int size = GetParam();
  timeout = std::chrono::minutes(2);  // a busy machine is no cause
  for (const int victim : {0, size - 1}) {
    int point = 0;
    for (bool reached = true; reached; ++point) {
      const RunResult result =
          run_with_fault(size, victim, point, [](FaultState&) { ::raise(SIGKILL); });
      reached = result.point_reached;
      for (int rank = 0; rank < size; ++rank) {
        const std::string& report = result.reports[static_cast<std::size_t>(rank)];
        if (rank == victim && reached) continue;
        // No rank waits for the victim's last stores.
        EXPECT_TRUE(report == "done" || report == "lost " + std::to_string(victim))
            << "rank " << rank << " of " << size << " at point " << point << ": "
            << result.texts[static_cast<std::size_t>(rank)];
        EXPECT_TRUE(reached || report == "done");
      }
    }
    EXPECT_GT(point, 60) << "the program has fewer points than it should";
  }
}

// Over all runs with a stopped rank.
struct Totals {
  std::atomic<int> late{0};
  std::atomic<bool> past_last_point{false};
};

void check_stopped(int size, int point, Totals& totals) {
  const int victim = size - 1;
  const RunResult result = run_with_fault(
      size, victim, point, [](FaultState& state) { state.victim.stop(); },
      [](FaultState& state) { state.victim.wake(); });
  if (!result.point_reached) totals.past_last_point = true;
  const std::string blamed = "late " + std::to_string(victim);
  for (int rank = 0; rank < size; ++rank) {
    const std::string& report = result.reports[static_cast<std::size_t>(rank)];
    const bool known = report == "done" || report == blamed;
    // The victim gets the group's failure, or an error that the others have left.
    EXPECT_TRUE(known || rank == victim)
        << "rank " << rank << " of " << size << " at point " << point << ": "
        << result.texts[static_cast<std::size_t>(rank)];
    totals.late += report == blamed ? 1 : 0;
  }
}

// Healthy ranks of a busy machine have to meet the deadlines, so these are long, and waited for
// side by side.
TEST_P(ProtocolRanksUpTo3, SurvivesARankStoppedUntilAfterTheTimeout) {
  const int size = GetParam();
  timeout = std::chrono::seconds(10);
  const int stride = std::max(1, 12 / thoroughness());
  constexpr int kAtOnce = 12;
  const test::Shared<Totals> totals;
  for (int first = 0; !totals->past_last_point; first += kAtOnce * stride) {
    test::run_side_by_side(kAtOnce, [&](std::size_t i) {
      check_stopped(size, first + static_cast<int>(i) * stride, *totals);
    });
  }
  EXPECT_GT(totals->late, 5);
}

// Overwrites, at random, all shared memory by which ranks communicate, staging buffers included.
void write_garbage(Region& region, std::mt19937& random) {
  auto* const begin = reinterpret_cast<std::byte*>(&region.memory().slot(0, 0));
  auto* const end = reinterpret_cast<std::byte*>(&region.memory().send_ring(region.size() - 1, 0) +
                                                 region.size());
  const auto words = static_cast<std::size_t>(end - begin) / sizeof(std::uint32_t);
  // Now and then a plausible number, which gets further than noise does.
  for (int i = 0; i < 3000; ++i) {
    auto& word = reinterpret_cast<Word*>(begin)[random() % words];
    word.store(random() % 2 == 0 ? random() : random() % 50, std::memory_order_relaxed);
  }
}

TEST(Protocol, DamagedMemoryIsAnErrorNotACrash) {
  timeout = kShort;
  constexpr int kSize = 3;
  for (int seed = 0; seed < 15 * thoroughness(); ++seed) {
    const auto ends =
        test::run_process_ranks(kSize, [&](int rank, BootstrapSockets sockets) -> std::string {
          std::mt19937 random(static_cast<unsigned>(seed));
          try {
            run_program(rank, kSize, std::move(sockets), [&](Region& region) {
              if (rank != 1) return;
              planted_point = points_passed + static_cast<int>(random() % 60);
              planted_fault = [&] { write_garbage(region, random); };
            });
          } catch (const Error& error) {
            return "an error";
          }
          return "done";
        });
    for (const auto& end : ends) {
      // A number that is wrong fails an expectation of the program; a crash ends with a signal.
      EXPECT_TRUE(WIFEXITED(end.status)) << "seed " << seed << ": signal " << WTERMSIG(end.status);
    }
  }
}

}  // namespace

void fault_point() {
  if (points_passed++ == planted_point && planted_fault) planted_fault();
}

}  // namespace paceline::shm
