// Ranks that are lost, late or impatient while a group is formed.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <barrier>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.h>

#include "base/pipe.h"
#include "shm/membership/bootstrap.h"
#include "shm/membership/bootstrap_packets.h"
#include "shm/membership/endpoint.h"
#include "shm/membership/member.h"
#include "shm/membership/socket.h"
#include "shm/memory/mapping.h"
#include "support/bootstrap_socket_pair.h"

namespace paceline::shm {
namespace {

using namespace std::chrono_literals;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::StartsWith;

constexpr GroupMemory kMemory{4096, 4096};

// What a rank throws that tries to join: its ranks and text.
struct Blame {
  std::vector<int> ranks;
  std::string text;
};
Blame blame_of(const std::function<void()>& join) {
  try {
    join();
  } catch (const PeerError& error) {
    return {error.ranks(), error.what()};
  }
  return {{}, "joined"};
}

// Threads that show each other their endpoints.
class Meeting {
 public:
  explicit Meeting(std::size_t size) : cards_(size), all_(static_cast<std::ptrdiff_t>(size)) {}

  class Seat : public Exchange {
   public:
    Seat(Meeting& meeting, int rank, std::function<void()> after)
        : meeting_(meeting), rank_(rank), after_(std::move(after)) {}
    int rank() const override { return rank_; }
    int size() const override { return static_cast<int>(meeting_.cards_.size()); }
    std::vector<std::string> all_gather(const std::string& blob,
                                        const base::Deadline& /*deadline*/) override {
      meeting_.cards_[static_cast<std::size_t>(rank_)] = blob;
      meeting_.all_.arrive_and_wait();
      after_();
      return meeting_.cards_;
    }

   private:
    Meeting& meeting_;
    int rank_;
    std::function<void()> after_;
  };

 private:
  std::vector<std::string> cards_;
  std::barrier<> all_;
};

TEST(Bootstrap, RanksThatHaveNotConnectedReceiveTheVerdict) {
  Meeting meeting(3);
  std::atomic<bool> told{false};
  std::array<Blame, 3> blames;
  const auto join_as = [&](int rank, const GroupMemory& memory, std::function<void()> after) {
    Meeting::Seat seat(meeting, rank, std::move(after));
    blames[static_cast<std::size_t>(rank)] = blame_of([&] {
      join(seat, memory, base::Deadline::after(1min), GlobalRanks({3, 70, 1023}));
    });
  };
  std::thread host([&] { join_as(0, kMemory, [] {}); });
  std::thread other([&] {
    join_as(1, {8192, 8192}, [] {});
    told = true;
  });
  // It connects when all has been said, were it not for those that are on the way.
  std::thread late([&] {
    join_as(2, kMemory, [&] {
      const auto soon = base::Deadline::after(20ms);
      while (!told && !soon.expired()) std::this_thread::yield();
    });
  });
  for (std::thread* const thread : {&host, &other, &late}) thread->join();
  for (const Blame& blame : blames) {
    EXPECT_THAT(blame.ranks, ElementsAre(70)) << blame.text;
    EXPECT_THAT(blame.text, StartsWith("rank 3 forms a group of 3 ranks with 4096 bytes"));
  }
}

// No process is left then whose end could be watched.
class EndpointOfADeadProcess : public Exchange {
 public:
  explicit EndpointOfADeadProcess(pid_t pid) : pid_(pid) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  std::vector<std::string> all_gather(const std::string& blob,
                                      const base::Deadline& /*deadline*/) override {
    return {blob, std::to_string(pid_) + blob.substr(blob.find('\n'))};
  }

 private:
  pid_t pid_;
};

pid_t child_that_ended() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  return child;
}

TEST(Bootstrap, ReportsARankThatEndedAndWasReapedAsLost) {
  EndpointOfADeadProcess exchange(child_that_ended());
  const auto begin = std::chrono::steady_clock::now();
  const Blame blame = blame_of([&] { join(exchange, kMemory, base::Deadline::after(1min), {}); });
  EXPECT_THAT(blame.ranks, ElementsAre(1));
  EXPECT_EQ(blame.text, "rank 1 was lost while the group was being formed");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s);
}

// Joins as rank 1 of 2, to which rank 0, of process `rank_0`, has already sent its welcome.
Membership join_after(const Welcome& welcome, pid_t rank_0) {
  test::BootstrapSocketPair link = test::make_bootstrap_sockets();
  const base::Pipe files = base::make_pipe();
  const std::array<int, 3> fds{files.read_end.get(), files.read_end.get(), files.read_end.get()};
  EXPECT_TRUE(send_packet(link.first.get(), encode(welcome), fds, base::Deadline::after(1min)));
  return join_as_member(std::move(link.second), rank_0,
                        {.rank = 1, .size = 2, .agreed_bytes = kMemory.agreed},
                        base::Deadline::after(1min), {});
}

TEST(Bootstrap, ARankThatAnsweredBeforeItEndedIsNotLost) {
  const pid_t ended = child_that_ended();
  const Blame blame = blame_of([&] { join_after({{ended, ::getpid()}, pid_namespace()}, ended); });
  EXPECT_EQ(blame.text, "joined");
}

TEST(Bootstrap, ProcessIdsCountInTheirNamespaceOnly) {
  const std::vector<pid_t> pids{1, ::getpid()};
  EXPECT_EQ(join_after({pids, pid_namespace()}, 0).peers[0].pid, 1);
  EXPECT_EQ(join_after({pids, "pid:[1]"}, 0).peers[0].pid, 0);
}

TEST(Bootstrap, DoesNotReportARankThatStoppedWaitingAsLost) {
  BootstrapSockets to_others;
  BootstrapSockets to_rank_0;
  for (int rank = 1; rank < 3; ++rank) {
    test::BootstrapSocketPair link = test::make_bootstrap_sockets();
    to_others.push_back(std::move(link.first));
    to_rank_0.push_back(std::move(link.second));
  }
  std::thread impatient([&] {
    BootstrapSockets link;
    link.push_back(std::move(to_rank_0[0]));
    const Blame blame =
        blame_of([&] { join(std::move(link), 1, 3, kMemory, base::Deadline::after(1ms), {}); });
    EXPECT_THAT(blame.ranks, ElementsAre(0)) << blame.text;
  });
  const Blame blame =
      blame_of([&] { join(std::move(to_others), 0, 3, kMemory, base::Deadline::after(1min), {}); });
  impatient.join();
  EXPECT_THAT(blame.ranks, ElementsAre(2));
  EXPECT_EQ(blame.text, "rank 2 did not join the group before rank 1 timed out");
}

// Joins in threads, each rank with a group's number, and returns what they throw.
std::vector<std::string> join_by_endpoints(const std::vector<std::uint64_t>& groups) {
  std::vector<ListeningEndpoint> listening(groups.size());
  std::vector<Endpoint> endpoints;
  for (const auto& one : listening) endpoints.push_back(one.endpoint);
  std::vector<std::string> texts(groups.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < groups.size(); ++rank) {
    threads.emplace_back([&, rank] {
      texts[rank] = blame_of([&] {
                      join(endpoints, static_cast<int>(rank), std::move(listening[rank].listener),
                           groups[rank], kMemory, base::Deadline::after(1min), {});
                    }).text;
    });
  }
  for (auto& thread : threads) thread.join();
  return texts;
}

TEST(Bootstrap, RanksJoinByTheirEndpoints) {
  for (const std::size_t size : {1U, 2U, 5U}) {
    EXPECT_THAT(join_by_endpoints(std::vector<std::uint64_t>(size, 7)), Each("joined"));
  }
}

TEST(Bootstrap, ARankOfAnotherGroupIsAMismatchForAll) {
  const auto other = "process " + std::to_string(::getpid()) + " and rank 0 form different groups";
  EXPECT_THAT(join_by_endpoints({7, 7, 8}), Each(StartsWith(other)));
  EXPECT_THAT(join_by_endpoints({8, 7, 7}), Each(StartsWith(other)));
}

TEST(Bootstrap, WhatIsLeftOfAnotherAttemptIsDropped) {
  std::vector<ListeningEndpoint> listening(2);
  const std::vector<Endpoint> endpoints{listening[0].endpoint, listening[1].endpoint};
  const auto join_as = [&](int rank, std::uint64_t group, std::chrono::milliseconds timeout) {
    base::UniqueFd listener;
    if (rank == 0) listener = std::move(listening[0].listener);
    return blame_of([&] {
             join(endpoints, rank, std::move(listener), group, kMemory,
                  base::Deadline::after(timeout), {});
           })
        .text;
  };
  EXPECT_THAT(join_as(1, 7, 1ms), StartsWith("rank 0 did not form the group within the timeout"));
  std::string other;
  std::thread thread([&] { other = join_as(1, 8, 1min); });
  EXPECT_EQ(join_as(0, 8, 1min), "joined");
  thread.join();
  EXPECT_EQ(other, "joined");
}

// The machine's memory, from which the default follows, may change while ranks start.
TEST(Bootstrap, TheMemoryMayBeLargerThanWhatRanksAgreeOn) {
  test::BootstrapSocketPair link = test::make_bootstrap_sockets();
  const auto size_of_memory = [](int rank, base::UniqueFd& socket, std::size_t total) {
    BootstrapSockets sockets;
    sockets.push_back(std::move(socket));
    const Membership membership =
        join(std::move(sockets), rank, 2, {total, 4096}, base::Deadline::after(1min), {});
    return Mapping(base::UniqueFd(::dup(membership.memory.get()))).size();
  };
  std::size_t member_has = 0;
  std::thread member([&] { member_has = size_of_memory(1, link.second, 12288); });
  EXPECT_EQ(size_of_memory(0, link.first, 16384), 16384u);
  member.join();
  EXPECT_EQ(member_has, 16384u);
}

TEST(Bootstrap, ARankThatCannotJoinIsReportedWithItsReason) {
  ListeningEndpoint listening;
  const std::vector<Endpoint> endpoints{listening.endpoint, ListeningEndpoint().endpoint};
  const base::UniqueFd socket = connect_abstract(endpoints[0].socket);
  const Hello hello{.rank = 1, .size = 2, .agreed_bytes = kMemory.agreed, .group = 7};
  ASSERT_TRUE(
      send_packet(socket.get(), encode(hello, "no descriptors"), {}, base::Deadline::after(1min)));
  const Blame blame = blame_of([&] {
    join(endpoints, 0, std::move(listening.listener), 7, kMemory, base::Deadline::after(1min), {});
  });
  EXPECT_THAT(blame.ranks, ElementsAre(1));
  EXPECT_EQ(blame.text, "rank 1 was lost while the group was being formed: no descriptors");
}

TEST(Bootstrap, RejectsMalformedRecords) {
  const Endpoint own = Endpoint::own(true);
  EXPECT_EQ(Endpoint::decode(own.encode()).pid, ::getpid());
  const std::string rest = "\npids\nmachine\nsocket";
  for (const char* const pid : {"", "0", "-1", "12x", "4294967297"}) {
    EXPECT_THROW(Endpoint::decode(pid + rest), Error) << pid;
  }
  EXPECT_THROW(Endpoint::decode("1\npids"), Error);
}

TEST(Bootstrap, AnEndpointWithoutAListenerIsALostRank) {
  const std::vector<Endpoint> endpoints{ListeningEndpoint().endpoint, ListeningEndpoint().endpoint};
  const Blame blame =
      blame_of([&] { join(endpoints, 1, {}, 7, kMemory, base::Deadline::after(1min), {}); });
  EXPECT_THAT(blame.ranks, ElementsAre(0));
  EXPECT_THAT(blame.text, StartsWith("rank 0 was lost"));
}

}  // namespace
}  // namespace paceline::shm
