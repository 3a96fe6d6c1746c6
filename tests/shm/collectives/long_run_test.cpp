#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "shm/collectives/group.h"
#include "shm/p2p/mailbox.h"
#include "support/process_ranks.h"
#include "support/thoroughness.h"
#include "support/thread_ranks.h"

namespace paceline::shm {
namespace {

using test::small_region;
using test::thoroughness;

// What this process holds of the system.
struct Holdings {
  long kibibytes = 0;
  long descriptors = 0;
};
// From the page tables: the kernel's counters, as in statm, are off by up to 64 pages a thread. The
// pages of programs are left out, since they come in as code runs for the first time.
Holdings holdings() {
  Holdings now;
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string word; rollup >> word;) {
    long kibibytes = 0;
    if (word == "Anonymous:" || word == "Pss_Shmem:") rollup >> kibibytes;
    now.kibibytes += kibibytes;
  }
  now.descriptors = std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  return now;
}

TEST(Collectives, LongRunHoldsNoMoreThanAShortOne) {
  const int calls = test::kSanitized ? 4000 : 200'000 * thoroughness();
  const auto ends = test::run_process_ranks(2, [&](int rank, BootstrapSockets sockets) {
    const auto region = Region::create(std::move(sockets), rank, 2, small_region());
    Group group(region);
    Mailbox mailbox(region);
    std::vector<float> data(5000, 1.0f);
    Holdings early;
    // A busy machine takes a hundred times as long for one; rank 0's first element says that it is
    // enough.
    const auto enough = base::Deadline::after(std::chrono::seconds(15));
    int call = 0;
    for (; call < calls && data[0] == 1; ++call) {
      const std::size_t count = call % 10 == 0 ? data.size() : 10;
      if (rank == 0 && call > 400 && enough.expired()) data[0] = 2;
      group.all_reduce(data.data(), data.data(), count, DataType::float32, ReduceOp::max);
      void* const shared = region->memory().allocate(count);
      region->memory().free(shared);
      int open = 1;
      const Mailbox::Message message{data.data(), count, DataType::float32,
                                     1 - rank,    0,     std::chrono::minutes(1)};
      const auto done = [&](const std::exception_ptr& error, int) {
        EXPECT_FALSE(error);
        --open;
      };
      call % 2 == rank ? mailbox.send(message, done) : mailbox.receive(message, done);
      mailbox.pump([&] { return open == 0; });
      if (call == 100) early = holdings();
    }
    const Holdings late = holdings();
    EXPECT_EQ(late.descriptors, early.descriptors);
    // Sanitizers hold memory of their own, and what was freed for a while.
    if (!test::kSanitized) {
      EXPECT_GT(early.kibibytes, 0);
      EXPECT_LE(late.kibibytes, early.kibibytes + 256);
    }
    group.barrier();
    return std::to_string(call);
  });
  for (const auto& end : ends) ASSERT_TRUE(end.exited_cleanly()) << end.report;
  // From then on, 100 bytes lost in every tenth call exceed the allowance above.
  if (!test::kSanitized && std::stoi(ends[0].report) < 30'000) {
    GTEST_SKIP() << "only " << ends[0].report << " calls in 15 s: too few to see a leak";
  }
}

}  // namespace
}  // namespace paceline::shm
