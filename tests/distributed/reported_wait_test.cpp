#include "distributed/reported_wait.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "support/log_lines.h"

namespace paceline::distributed {
namespace {

using namespace std::chrono_literals;
using ::testing::Each;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;

class TestWork : public c10d::Work {
 public:
  TestWork() : c10d::Work(0, c10d::OpType::ALLREDUCE) {}
  using c10d::Work::finish;
  std::uint64_t getSequencenumber() const override { return 7; }
};

// As c10d::FutureWrappingWork.
class WorkWithoutTimeout : public TestWork {
 public:
  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout != kNoTimeout) throw std::runtime_error("not implemented");
    return TestWork::wait(timeout);
  }
};

class TestBackend : public c10d::Backend {
 public:
  TestBackend() : c10d::Backend(0, 2) {}
  const std::string getBackendName() const override { return "test"; }
};

// `store` may be null.
ProcessGroup group_of_two(const c10::intrusive_ptr<c10d::Store>& store) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, 0, 2);
  group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<TestBackend>());
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  group->setGroupName("test");
  return ProcessGroup(std::move(group));
}

// Ends `work` well after its wait was due for a report.
std::jthread end_late(TestWork& work) {
  return std::jthread([&work] {
    std::this_thread::sleep_for(300ms);  // the input of these tests
    work.finish();
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

TEST(ReportedWait, ThrowsTheErrorOfTheWorkAndCountsNoMore) {
  const test::LogLines log(50ms);
  TestWork work;
  const std::jthread ending([&] {
    log.wait_for_line();
    work.finish(std::make_exception_ptr(std::runtime_error("of the work")));
  });
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto group = group_of_two(store);
  EXPECT_THAT([&] { wait_and_report(work, group); },
              ::testing::ThrowsMessage<std::runtime_error>("of the work"));
  EXPECT_THAT(log.all(),
              Each(MatchesRegex("rank 0 has waited .* s for rank 1 at ALLREDUCE, call 7 of "
                                "group test")));
  EXPECT_THAT(log.all(), ::testing::Not(IsEmpty()));
  EXPECT_EQ(store->add("waits 0", 0), 0);
}

TEST(ReportedWait, WaitsForWorksThatCannotTimeOut) {
  WorkWithoutTimeout work;
  const auto ending = end_late(work);
  wait_and_report(work, group_of_two(c10::make_intrusive<c10d::HashStore>()));
  EXPECT_TRUE(work.isCompleted());
}

}  // namespace
}  // namespace paceline::distributed
