#include "distributed/rendezvous/memory_store.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <csignal>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.h>

#include "base/unique_fd.h"

namespace paceline::distributed {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class MemoryStoreTest : public ::testing::Test {
 protected:
  c10::intrusive_ptr<MemoryStore> open() const {
    auto store = c10::make_intrusive<MemoryStore>(path(), "the store");
    store->setTimeout(10s);
    return store;
  }
  std::string path() const { return fmt::format("/proc/self/fd/{}", file_.get()); }

  base::UniqueFd file_{::memfd_create("test", MFD_CLOEXEC)};
};

// Both stores of the file after each call of either.
TEST_F(MemoryStoreTest, GivesWhatAHashStoreGives) {
  const c10::intrusive_ptr<c10d::Store> expected = c10::make_intrusive<c10d::HashStore>();
  const std::vector stores{open(), open()};
  std::mt19937 random(1);
  const auto below = [&](unsigned limit) { return random() % limit; };
  const auto word = [&] {
    return std::string(below(3) == 0 ? 0 : below(5000), static_cast<char>('a' + below(3)));
  };
  for (int call = 0; call < 2000; ++call) {
    MemoryStore& store = *stores[below(2)];
    const std::string key = fmt::format("key {}", below(6));
    switch (below(4)) {
      case 0: {
        const std::string value = word();
        store.set(key, value);
        expected->set(key, value);
        break;
      }
      case 1: {
        const std::string before =
            below(2) == 0 || !expected->check({key}) ? "" : expected->get_to_str(key);
        const std::string value = "x" + word();
        EXPECT_EQ(store.compareSet(key, before, value), expected->compareSet(key, before, value));
        break;
      }
      case 2:
        EXPECT_EQ(store.deleteKey(key), expected->deleteKey(key));
        break;
      default:
        EXPECT_EQ(store.add("number", call), expected->add("number", call));
    }
    for (const auto& one : stores) {
      ASSERT_EQ(one->check({key}), expected->check({key}));
      if (one->check({key})) {
        ASSERT_EQ(one->get_to_str(key), expected->get_to_str(key));
      }
      ASSERT_EQ(one->getNumKeys(), expected->getNumKeys());
    }
  }
  EXPECT_EQ(open()->getNumKeys(), expected->getNumKeys());
}

TEST_F(MemoryStoreTest, WaitsForOtherThreads) {
  const auto store = open();
  std::thread other([&] { open()->set("late", "value"); });
  EXPECT_EQ(store->get_to_str("late"), "value");
  other.join();
  EXPECT_THROW(store->wait({"late", "never"}, 50ms), c10::DistStoreError);
}

// A process that is killed leaves any part of its record behind the end, and perhaps more of an
// earlier one.
TEST_F(MemoryStoreTest, IgnoresWhatAKilledProcessHasLeft) {
  const auto store = open();
  store->set("first", "1");
  const off_t end = ::lseek(file_.get(), 0, SEEK_END);
  const std::string left(300, '\xff');
  for (const std::size_t size : {1, 4, 7, 8, 9, 300}) {
    ASSERT_EQ(::pwrite(file_.get(), left.data(), size, end), static_cast<ssize_t>(size));
    EXPECT_EQ(open()->getNumKeys(), 1);
  }
  store->set("second", "2");
  EXPECT_EQ(open()->get_to_str("first"), "1");
  EXPECT_EQ(open()->get_to_str("second"), "2");
}

TEST_F(MemoryStoreTest, OutlivesProcessesThatAreKilled) {
  const auto store = open();
  std::mt19937 random(std::random_device{}());
  constexpr int kDeaths = 100;
  for (int death = 0; death < kDeaths; ++death) {
    const pid_t child = ::fork();
    if (child == 0) {
      const auto own = open();
      for (std::int64_t count = 1;; ++count) {
        own->add("count", 1);
        own->set(fmt::format("count of {}", death), std::to_string(count));
      }
    }
    store->wait({fmt::format("count of {}", death)});
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  std::int64_t told = 0;
  for (int death = 0; death < kDeaths; ++death) {
    told += std::stoll(open()->get_to_str(fmt::format("count of {}", death)));
  }
  const std::int64_t counted = store->add("count", 0);
  EXPECT_GE(counted, told);
  EXPECT_LE(counted, told + kDeaths);
}

TEST_F(MemoryStoreTest, RefusesWhatIsNone) {
  EXPECT_THAT([] { MemoryStore("/proc/self/fd/987654", "the store"); },
              ThrowsMessage<Error>(HasSubstr("cannot use the store for the rendezvous")));
  EXPECT_THAT([] { MemoryStore("/dev/null", "the store"); },
              ThrowsMessage<UsageError>(HasSubstr("the store holds something else")));
  ASSERT_EQ(::pwrite(file_.get(), "something", 9, 0), 9);
  EXPECT_THAT([&] { open(); },
              ThrowsMessage<UsageError>("the store holds something else than the ranks' store"));
}

TEST_F(MemoryStoreTest, RefusesOneThatIsDamaged) {
  open()->set("key", "value");
  const auto store = open();
  for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{20}, std::uint64_t{1} << 40}) {
    ASSERT_EQ(::pwrite(file_.get(), &size, sizeof(size), 8), ssize_t{sizeof(size)});
    EXPECT_THAT([&] { open(); }, ThrowsMessage<Error>("the store is damaged"));
    EXPECT_THAT([&] { store->check({"key"}); }, ThrowsMessage<Error>("the store is damaged"));
  }
}

}  // namespace
}  // namespace paceline::distributed
