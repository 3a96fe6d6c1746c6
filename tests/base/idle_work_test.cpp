#include "base/idle_work.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

namespace paceline::base {
namespace {

using namespace std::chrono_literals;

// Each test on a thread of its own, whose idle work ends with it.
template <typename Body>
void on_thread(Body body) {
  std::async(std::launch::async, body).get();
}

TEST(IdleWork, IsDoneByItsThreadWhileThatWaits) {
  on_thread([] {
    std::mutex mutex;
    std::condition_variable condition;
    std::thread::id worked_on;
    const std::function<void()> work = [&] {
      const std::lock_guard own(mutex);  // which the wait does not hold meanwhile
      worked_on = std::this_thread::get_id();
    };
    set_idle_work(&work);
    std::unique_lock lock(mutex);
    wait(condition, lock, [&] { return worked_on != std::thread::id(); });
    EXPECT_EQ(worked_on, std::this_thread::get_id());
  });
}

TEST(IdleWork, EndsAtTheDeadline) {
  on_thread([] {
    std::mutex mutex;
    std::condition_variable condition;
    std::unique_lock lock(mutex);
    const auto never = [] { return false; };
    EXPECT_FALSE(wait_until(condition, lock, Deadline::after(1ms), never));
    int worked = 0;
    const std::function<void()> work = [&] { ++worked; };
    set_idle_work(&work);
    EXPECT_FALSE(wait_until(condition, lock, Deadline::after(1ms), never));
    EXPECT_GT(worked, 0);
    EXPECT_TRUE(lock.owns_lock());
    EXPECT_TRUE(wait_until(condition, lock, Deadline::after(0ms), [] { return true; }));
  });
}

TEST(IdleWork, IsNotDoneWithinItself) {
  on_thread([] {
    int depth = 0;
    int deepest = 0;
    const std::function<void()> work = [&] {
      deepest = std::max(deepest, ++depth);
      do_idle_work();
      --depth;
    };
    set_idle_work(&work);
    do_idle_work();
    EXPECT_EQ(deepest, 1);
  });
}

TEST(IdleWork, BelongsToOneThread) {
  on_thread([] {
    bool worked = false;
    const std::function<void()> work = [&] { worked = true; };
    set_idle_work(&work);
    on_thread([] {
      EXPECT_FALSE(has_idle_work());
      do_idle_work();
    });
    EXPECT_TRUE(has_idle_work());
    EXPECT_FALSE(worked);
  });
}

}  // namespace
}  // namespace paceline::base
