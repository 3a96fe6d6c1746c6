#include "base/start_thread.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <csignal>
#include <utility>

#include <paceline/error.h>

namespace paceline::base {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(StartThread, BlocksSignalsThereOnly) {
  bool blocked = false;
  start_thread([&] {
    const sigset_t mask = signal_mask();
    blocked = sigismember(&mask, SIGTERM) == 1;
  }).join();
  EXPECT_TRUE(blocked);
  const sigset_t mask = signal_mask();
  EXPECT_EQ(sigismember(&mask, SIGTERM), 0);
}

// As a thread constructor does that the system refuses.
struct Refused {
  template <typename Body>
  explicit Refused(Body /*body*/) {
    throw std::system_error(EAGAIN, std::system_category());
  }
};

TEST(StartThread, NamesTheLimitIfTheSystemRefuses) {
  EXPECT_THAT(
      [] { start_thread<Refused>([] {}); },
      ThrowsMessage<Error>(HasSubstr("cannot start a thread: Resource temporarily "
                                     "unavailable (EAGAIN); raise the limit on processes")));
}

}  // namespace
}  // namespace paceline::base
