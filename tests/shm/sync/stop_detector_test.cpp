// Ranks that are stopped until after their deadline, with all others: no rank is late then.

#include <gtest/gtest.h>

#include <csignal>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "shm/collectives/group.h"
#include "shm/collectives/monitored_barrier.h"
#include "shm/p2p/mailbox.h"
#include "shm/p2p/requests.h"
#include "support/eventually.h"
#include "support/process_ranks.h"
#include "support/thread_ranks.h"

namespace paceline::shm {
namespace {

constexpr std::chrono::seconds kWaitLimit{5};

// Rank 0 waits with kWaitLimit for what rank 1 does only once rank 0 has been stopped for longer
// and has had time to fail. `sleepers` counts its threads that wait. Neither may throw.
void expect_success(const std::function<Word&(Region& region)>& sleepers,
                    const std::function<void(const std::shared_ptr<Region>& region)>& meet) {
  test::expect_process_ranks(2, [&](int rank, BootstrapSockets sockets) {
    const auto region = Region::create(std::move(sockets), rank, 2, test::small_region(kWaitLimit));
    if (rank == 1) {
      const pid_t other = region->peers().membership()->peers[0].pid;
      const auto deadline = base::Deadline::after(kWaitLimit + std::chrono::seconds(1));
      EXPECT_TRUE(test::eventually([&] { return sleepers(*region) != 0; }));
      ::kill(other, SIGSTOP);
      // The input of this test: rank 0's deadline must pass while it is stopped. Were the sleep too
      // short, nothing would fail.
      std::this_thread::sleep_for(deadline.remaining());
      ::kill(other, SIGCONT);
      const auto soon = base::Deadline::after(std::chrono::milliseconds(300));
      while (!region->failed() && !soon.expired()) std::this_thread::yield();
    }
    meet(region);
  });
}

TEST(StopDetector, CollectivesWaitForRanksThatWereStoppedToo) {
  expect_success([](Region& region) -> Word& { return region.memory().rank_block(1).sleepers; },
                 [](const auto& region) { Group(region).barrier(); });
}

TEST(StopDetector, MonitoredBarriersWaitForRanksThatWereStoppedToo) {
  expect_success(
      [](Region& region) -> Word& { return region.memory().rank_block(0).doorbell.listeners; },
      [](const auto& region) { MonitoredBarrier(region).pass(kWaitLimit, false); });
}

TEST(StopDetector, MessagesWaitForRanksThatWereStoppedToo) {
  expect_success(
      [](Region& region) -> Word& { return region.memory().rank_block(0).doorbell.listeners; },
      [](const auto& region) {
        Mailbox mailbox(region);
        test::Requests requests(mailbox);
        std::vector<int> data(3, region->rank());
        region->rank() == 0 ? requests.receive(data, 1, 0, kWaitLimit) : requests.send(data, 0);
        requests.wait();
        EXPECT_EQ(data, std::vector<int>(3, 1));
        Group(region).barrier();
      });
}

}  // namespace
}  // namespace paceline::shm
