#include "distributed/reported_wait.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>
#include <stdexcept>
#include <thread>

#include "support/log_lines.h"

namespace paceline::distributed {
namespace {

using namespace std::chrono_literals;
using ::testing::IsEmpty;

class TestWork : public c10d::Work {
 public:
  TestWork() : c10d::Work(0, c10d::OpType::ALLREDUCE) {}
  using c10d::Work::finish;
};

// `store` may be null.
ProcessGroup group_of_two(const c10::intrusive_ptr<c10d::Store>& store) {
  return ProcessGroup(c10::make_intrusive<c10d::ProcessGroup>(store, 0, 2));
}

// Ends `work` well after its wait was due for a report.
std::jthread end_late(TestWork& work, const std::exception_ptr& error = nullptr) {
  return std::jthread([&work, error] {
    std::this_thread::sleep_for(300ms);  // the input of these tests
    work.finish(error);
  });
}

TEST(ReportedWait, OfAGroupWithoutAStoreEnds) {
  const test::LogLines log(50ms);
  TestWork work;
  const auto ending = end_late(work);
  wait_and_report(work, group_of_two(nullptr));
  EXPECT_TRUE(work.isCompleted());
  EXPECT_THAT(log.all(), IsEmpty());
}

TEST(ReportedWait, ThrowsTheErrorOfTheWork) {
  const test::LogLines log(1min);
  TestWork work;
  const auto ending = end_late(work, std::make_exception_ptr(std::runtime_error("of the work")));
  const auto group = group_of_two(c10::make_intrusive<c10d::HashStore>());
  EXPECT_THAT([&] { wait_and_report(work, group); },
              ::testing::ThrowsMessage<std::runtime_error>("of the work"));
  EXPECT_THAT(log.all(), IsEmpty());
}

}  // namespace
}  // namespace paceline::distributed
