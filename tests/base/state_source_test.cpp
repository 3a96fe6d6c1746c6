#include "base/state_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <thread>

namespace paceline::base {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(StateSource, IsDescribedByKindWhileItLives) {
  auto first = std::make_unique<StateSource>("a", [] { return "1"; });
  const StateSource other("b", [] { return "2"; });
  const StateSource broken("a", []() -> std::string { throw std::runtime_error("broken"); });
  const StateSource last("a", [] { return "3"; });
  EXPECT_THAT(StateSource::describe_all("a"), ElementsAre("1", "3"));
  EXPECT_THAT(StateSource::describe_all("b"), ElementsAre("2"));
  first.reset();
  EXPECT_THAT(StateSource::describe_all("a"), ElementsAre("3"));
  EXPECT_THAT(StateSource::describe_all("c"), IsEmpty());
}

// TSan would see a description that uses an object after its end.
TEST(StateSource, IsNotDescribedAfterItsEnd) {
  std::atomic<bool> stop{false};
  std::thread asker([&] {
    while (!stop) StateSource::describe_all("object");
  });
  for (int i = 0; i < 2000; ++i) {
    const auto object = std::make_unique<std::string>("an object");
    const StateSource source("object", [&] { return *object; });
  }
  stop = true;
  asker.join();
}

// The child drops its copy of an object, and asks for what it has itself.
TEST(StateSource, OfAForkedChildAreItsOwn) {
  auto inherited = std::make_unique<StateSource>("a", [] { return "parent's"; });
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    inherited.reset();
    const StateSource own("a", [] { return "child's"; });
    ::_exit(StateSource::describe_all("a") == std::vector<std::string>{"child's"} ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_THAT(StateSource::describe_all("a"), ElementsAre("parent's"));
}

}  // namespace
}  // namespace paceline::base
