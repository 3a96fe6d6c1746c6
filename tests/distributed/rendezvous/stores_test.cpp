// Stores that are wrong, silent or stale.

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <barrier>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <paceline/collectives.h>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "distributed/rendezvous/file_store.h"
#include "distributed/rendezvous/rendezvous_fixture.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::failure_alone;
using test::failure_to_join;
using test::kLate;
using test::kTimeout;
using test::Port;
using test::Rendezvous;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

InitOptions rank_1_of_2(const std::string& method) {
  return {.init_method = method, .timeout = kTimeout, .world_size = 2, .rank = 1};
}

TEST_F(Rendezvous, RejectsAFileOfAnotherFormat) {
  std::mt19937 random(1);
  std::string noise(3000, '\0');
  for (char& byte : noise) byte = static_cast<char>(random());
  const std::string count("\x09\0\0\0refcount/\x01\0\0\0001", 18);
  for (const std::string& content :
       {noise, std::string("x"), count + noise, count.substr(0, 17), count.substr(0, 13)}) {
    std::ofstream(path(), std::ios::binary) << content;
    EXPECT_THAT(failure_alone(rank_1_of_2(method())),
                StartsWith("UsageError: " + method() + " is not a c10d::FileStore"))
        << content.size();
  }
}

TEST_F(Rendezvous, RejectsAPathThatCannotBeAFile) {
  EXPECT_THAT(failure_alone(rank_1_of_2(method() + "/no/such")),
              AllOf(HasSubstr(method() + "/no/such"), HasSubstr("(ENOENT)")));
  EXPECT_THAT(failure_alone(rank_1_of_2("file:///tmp")), HasSubstr("(EISDIR)"));
  ASSERT_EQ(::mkfifo(path().c_str(), 0600), 0);
  EXPECT_THAT(failure_alone(rank_1_of_2(method())), HasSubstr("is not a c10d::FileStore"));
}

TEST_F(Rendezvous, WaitsForALockedFileUntilTheTimeout) {
  std::ofstream(path()).flush();
  const base::UniqueFd held(::open(path().c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(::flock(held.get(), LOCK_EX), 0);
  EXPECT_THAT(failure_alone(rank_1_of_2(method())),
              AllOf(HasSubstr(method() + " stayed locked for the timeout of 1 s"),
                    HasSubstr("this is rank 1 of 2")));
}

TEST_F(Rendezvous, RejectsTheFileOfAKilledJob) {
  for (const auto& backend : test::backends()) {
    const auto options = [&](int rank) {
      return InitOptions{
          .backend = backend, .init_method = method(), .world_size = 2, .rank = rank};
    };
    test::run_process_ranks(2, [&](int rank, shm::BootstrapSockets) -> std::string {
      const World world = init_process_group(options(rank));
      barrier();
      std::raise(SIGKILL);
      return "";
    });
    const auto ends = test::run_process_ranks(
        2, [&](int rank, shm::BootstrapSockets) { return failure_to_join(options(rank)); });
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_THAT(ends[static_cast<std::size_t>(rank)].report,
                  AllOf(StartsWith(fmt::format("UsageError: {} has been joined by a rank {} before",
                                               method(), rank)),
                        HasSubstr("rm " + path())));
    }
    ::unlink(path().c_str());
  }
}

TEST_F(Rendezvous, SilentListenerTimesOutAndBlamesRankZero) {
  const Port port;
  port.listen();
  const auto text = StartsWith("PeerError(0): the rendezvous at 127.0.0.1:" + port.number() +
                               ", which rank 0 serves, did not answer "
                               "within the timeout of 1 s; this is rank 1 of 2");
  EXPECT_THAT(failure_alone(rank_1_of_2(port.method())), text);
  std::map<std::string, std::string> environment{{"RANK", "1"},
                                                 {"WORLD_SIZE", "2"},
                                                 {"MASTER_ADDR", "127.0.0.1"},
                                                 {"MASTER_PORT", port.number()}};
  EXPECT_THAT(failure_alone({.timeout = kTimeout}, environment), text);
  environment["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_THAT(failure_alone({.timeout = kTimeout}, environment),
              AllOf(StartsWith("PeerError(): "), HasSubstr("which the launcher serves")));
}

// As programs do that set them in code.
TEST_F(Rendezvous, ReadsVariablesThatAreSetLate) {
  const auto ends = test::run_process_ranks(1, [&](int, shm::BootstrapSockets) {
    EXPECT_EQ(get_rank(), 0);
    test::set_variables({{"RANK", "1"}, {"WORLD_SIZE", "2"}});
    return failure_to_join({.timeout = kTimeout});
  });
  EXPECT_THAT(ends[0].report, AllOf(StartsWith("UsageError: "), HasSubstr("MASTER_ADDR")));
}

TEST_F(Rendezvous, MissingServerTimesOutAndBlamesRankZero) {
  EXPECT_THAT(failure_alone(rank_1_of_2(Port().method())),
              AllOf(StartsWith("PeerError(0): the rendezvous at 127.0.0.1:"),
                    HasSubstr("which rank 0 serves, did not answer within the timeout of 1 s")));
}

TEST_F(Rendezvous, SaysThatTheHostCannotBeResolved) {
  EXPECT_THAT(
      failure_alone(rank_1_of_2("tcp://no-such-host.invalid:29500")),
      AllOf(StartsWith("PeerError(0): the rendezvous at no-such-host.invalid:29500, which rank 0 "
                       "serves, did not answer within the timeout of 1 s (cannot resolve "
                       "no-such-host.invalid: "),
            HasSubstr("; this is rank 1 of 2")));
}

// Behaves as if its server were stopped.
class SilentStore : public c10d::HashStore {
 public:
  void set(const std::string&, const std::vector<std::uint8_t>&) override {
    while (true) ::pause();
  }
};

TEST_F(Rendezvous, SilentUserStoreTimesOut) {
  for (const auto& backend : test::backends()) {
    EXPECT_THAT(failure_alone({.backend = backend,
                               .timeout = kTimeout,
                               .world_size = 2,
                               .rank = 1,
                               .store = c10::make_intrusive<SilentStore>()}),
                StartsWith("PeerError(): the store did not answer within the timeout of 1 s; this "
                           "is rank 1 of 2"));
  }
}

TEST_F(Rendezvous, LeavesTheTimeoutOfAUserStore) {
  for (const auto& backend : test::backends()) {
    const auto ends = test::run_process_ranks(2, [&](int rank, shm::BootstrapSockets) {
      const auto store = c10::make_intrusive<c10d::FileStore>(path() + backend, 2);
      store->setTimeout(std::chrono::milliseconds(1500));
      const auto text = failure_to_join({.backend = backend,
                                         .timeout = 2 * kLate,
                                         .world_size = 2,
                                         .rank = rank,
                                         .store = store});
      return fmt::format("{} {}", text, store->getTimeout().count());
    });
    for (const auto& end : ends) EXPECT_EQ(end.report, "joined 1500");
  }
}

// Another program has set what rank 1 should set.
class StrangeStore : public c10d::HashStore {
 public:
  explicit StrangeStore(const std::string& record) : record_(record.begin(), record.end()) {}

  std::vector<std::uint8_t> get(const std::string& key) override {
    return key.ends_with("rank1") ? record_ : HashStore::get(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    std::vector<std::string> others = keys;
    std::erase_if(others, [](const auto& key) { return key.ends_with("rank1"); });
    return HashStore::check(others);
  }

 private:
  std::vector<std::uint8_t> record_;
};

TEST_F(Rendezvous, StrangeRecordsInTheStoreAreErrors) {
  for (const char* const record : {"", "2", "2x y", "0 y", "-7 y", "99999999999 y"}) {
    EXPECT_EQ(failure_alone({.timeout = 10 * kLate,
                             .world_size = 2,
                             .rank = 0,
                             .store = c10::make_intrusive<StrangeStore>(record)}),
              fmt::format("Error: the store has \"{}\", which means nothing here: do all ranks run "
                          "the same version of Paceline, and no other program uses the store?",
                          record));
  }
}

// By its own counts, FileStore may think that the other one ends later.
TEST_F(Rendezvous, LeavesNoFileIfTwoStoresEndAtOnce) {
  const auto open = [&](int rank) {
    distributed::Plan plan;
    plan.rank = rank;
    plan.size = 2;
    plan.path = path();
    return distributed::open_file_store(plan, method(), base::Deadline::after(kTimeout));
  };
  for (int round = 0; round < 300; ++round) {
    auto first = open(0);
    auto second = open(1);
    std::barrier both(2);
    std::thread other([&] {
      both.arrive_and_wait();
      first.reset();
    });
    both.arrive_and_wait();
    second.reset();
    other.join();
    ASSERT_FALSE(std::filesystem::exists(path())) << "round " << round;
  }
}

TEST_F(Rendezvous, NamesAMissingInheritedStore) {
  EXPECT_THAT(failure_alone({}, {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"PACELINE_STORE_FD", "999"}}),
              AllOf(StartsWith("Error: cannot use /proc/self/fd/999 (PACELINE_STORE_FD"),
                    HasSubstr("(ENOENT)")));
}

}  // namespace
}  // namespace paceline
