// The thread that aborts calls on accelerators, which needs none.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <future>
#include <memory>
#include <string>

#include <paceline/distributed.h>

#include "distributed/backend.h"
#include "distributed/devices/failure_watch.h"
#include "support/process_ranks.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using distributed::ExtendedBackend;
using distributed::FailureWatch;

c10::intrusive_ptr<ExtendedBackend> backend_of_world() {
  return c10::dynamic_intrusive_pointer_cast<ExtendedBackend>(
      ProcessGroup().c10d()->getBackend(c10::DeviceType::CPU));
}

TEST(FailureWatch, AbortsOnceARankIsLost) {
  const auto ends = test::run_torch_ranks(3, "paceline", [](const test::RankContext& context) {
    const World world = init_process_group(context.init);
    std::promise<void> aborted;
    const FailureWatch watch(backend_of_world(), "world", [&] { aborted.set_value(); });
    if (context.rank == 1) ::raise(SIGKILL);
    const auto status = aborted.get_future().wait_for(std::chrono::minutes(1));
    return std::string(status == std::future_status::ready ? "aborted" : "waited");
  });
  EXPECT_TRUE(ends[1].killed());
  EXPECT_EQ(ends[0].report, "aborted");
  EXPECT_EQ(ends[2].report, "aborted");
}

TEST(FailureWatch, AForkedChildLeavesItsThreadAlone) {
  const auto ends = test::run_torch_ranks(2, "paceline", [](const test::RankContext& context) {
    const World world = init_process_group(context.init);
    auto watch = std::make_unique<FailureWatch>(backend_of_world(), "world", [] {});
    return test::run_process_ranks(1,
                                   [&](int, const shm::BootstrapSockets&) {
                                     watch.reset();
                                     return std::string("ended");
                                   })[0]
        .report;
  });
  for (const auto& end : ends) EXPECT_EQ(end.report, "ended");
}

}  // namespace
}  // namespace paceline
