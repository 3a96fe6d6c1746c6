#include "base/log.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <latch>
#include <thread>

namespace paceline::base {
namespace {

int exit_status_of(pid_t child) {
  int status = -1;
  return ::waitpid(child, &status, 0) == child ? status : -1;
}

TEST(Log, AForkedChildHasTheCallback) {
  int calls = 0;
  set_log_callback([&](LogLevel, std::string_view) { ++calls; });
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    log_message(LogLevel::info, "in the child");
    ::_exit(calls == 1 ? 0 : 1);
  }
  EXPECT_EQ(exit_status_of(child), 0);
  set_log_callback({});
}

TEST(Log, AForkedChildDoesNotWaitForACallOfItsParent) {
  std::latch begun(1);
  std::latch forked(1);
  set_log_callback([&](LogLevel, std::string_view) {
    begun.count_down();
    forked.wait();
  });
  std::thread logging([] { log_message(LogLevel::info, "slowly"); });
  begun.wait();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(30);
    int calls = 0;
    set_log_callback([&](LogLevel, std::string_view) { ++calls; });
    log_message(LogLevel::info, "in the child");
    ::_exit(calls == 1 ? 0 : 1);
  }
  forked.count_down();
  logging.join();
  EXPECT_EQ(exit_status_of(child), 0);
  set_log_callback({});
}

}  // namespace
}  // namespace paceline::base
