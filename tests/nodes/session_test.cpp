// Launchers as threads, without processes: what they say to each other.
#include "nodes/node_session.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include <paceline/version.h>

#include "net/listener.h"

namespace paceline::nodes {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr int kExit3 = 3 << 8;

class Session : public ::testing::Test {
 protected:
  // For the node that gives the number; `numbered`: by --node-rank.
  SessionOptions options(int node, int nodes, bool numbered = true) {
    SessionOptions result;
    result.host = "127.0.0.1";
    result.port = port_.port();
    result.key = net::make_key("a secret of the test");
    result.rules = {.min_nodes = nodes, .max_nodes = nodes, .numbered = numbered, .job = "job"};
    result.join = {.version = kVersion,
                   .job = "job",
                   .host = fmt::format("host{}", node),
                   .processes = node + 1};
    if (numbered) result.join.node = node;
    result.coordinates = node == 0;
    return result;
  }

  NodeSession make(const SessionOptions& options) {
    return {options, nullptr, [this](const std::string& text) {
              const std::lock_guard lock(mutex_);
              printed_ += text;
            }};
  }

  // Runs a launcher on a thread for each; what `body` returns or throws, by node.
  std::vector<std::string> run(const std::vector<SessionOptions>& all,
                               const std::function<std::string(NodeSession&, int)>& body) {
    std::vector<std::string> results(all.size());
    std::vector<std::thread> threads;
    for (std::size_t node = 0; node < all.size(); ++node) {
      threads.emplace_back([&, node] {
        try {
          NodeSession session = make(all[node]);
          results[node] = body(session, static_cast<int>(node));
        } catch (const std::exception& error) {
          results[node] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return results;
  }

  std::string printed() {
    const std::lock_guard lock(mutex_);
    return printed_;
  }

  net::PortReservation port_{base::resolve("127.0.0.1", 0).front()};

 private:
  std::mutex mutex_;
  std::string printed_;
};

// Does what run_job does while processes run: waits for a while, and returns what the others ask
// for.
std::vector<int> serve(NodeSession& session) {
  std::vector<pollfd> fds;
  session.add_to(fds);
  ::poll(fds.data(), fds.size(), 20);
  return session.receive();
}

std::vector<int> await_requests(NodeSession& session) {
  std::vector<int> requests;
  while (requests.empty()) requests = serve(session);
  return requests;
}

Result ended(int processes, int status = 0, bool stopped = false) {
  launch::RankResult rank;
  rank.status = status;
  rank.ended = 1s;
  rank.stopped = stopped;
  return {std::vector(static_cast<std::size_t>(processes), rank), ""};
}

std::string describe(const Start& start) {
  return fmt::format("{}/{} ranks from {} of {} restart {} {} {}", start.node, start.nodes,
                     start.first_rank, start.world_size, start.restart, start.job,
                     start.master_addr);
}

TEST_F(Session, NumbersNodesAndRanks) {
  std::atomic<int> port = 0;
  const auto ends =
      run({options(0, 3), options(1, 3), options(2, 3)}, [&](NodeSession& session, int node) {
        const auto start = session.await_start();
        port = start->master_port;
        EXPECT_EQ(session.await_verdict(ended(node + 1)).exit_code, 0);
        return describe(*start);
      });
  EXPECT_THAT(ends, ElementsAre("0/3 ranks from 0 of 6 restart 0 job 127.0.0.1",
                                "1/3 ranks from 1 of 6 restart 0 job 127.0.0.1",
                                "2/3 ranks from 3 of 6 restart 0 job 127.0.0.1"));
  EXPECT_GT(port, 0);
}

TEST_F(Session, StopsAllNodesAfterAFailure) {
  const auto ends = run({options(0, 2), options(1, 2)}, [&](NodeSession& session, int node) {
    session.await_start();
    if (node == 1) session.report_failure();
    if (node == 0) {
      EXPECT_THAT(await_requests(session), ElementsAre(0));
    }
    const Verdict verdict =
        session.await_verdict(node == 1 ? ended(2, kExit3) : ended(1, SIGTERM, true));
    return fmt::format("{} {} {}", verdict.restarts, verdict.exit_code, verdict.report);
  });
  EXPECT_THAT(ends,
              Each("false 3 paceline: rank 1 on node 1 (host1) failed first: exited with code 3\n"
                   "  rank 2: exited with code 3\n"
                   "  rank 0: stopped by SIGTERM\n"));
}

TEST_F(Session, StartsAgainAtAnotherPort) {
  auto first = options(0, 2);
  first.rules.max_restarts = 1;
  const auto ends = run({first, options(1, 2)}, [&](NodeSession& session, int node) {
    const auto start = session.await_start();
    if (node == 1) session.report_failure();
    if (node == 0) await_requests(session);
    const Verdict verdict = session.await_verdict(ended(node + 1, node == 1 ? kExit3 : 0));
    EXPECT_TRUE(verdict.restarts);
    EXPECT_THAT(verdict.report, HasSubstr("starts all processes again, restart 1 of 1"));
    const auto again = session.await_start();
    EXPECT_NE(again->master_port, start->master_port);
    EXPECT_EQ(session.await_verdict(ended(node + 1)).exit_code, 0);
    return describe(*again);
  });
  EXPECT_THAT(ends[1], StartsWith("1/2 ranks from 1 of 3 restart 1"));
}

TEST_F(Session, PassesOnSignals) {
  const auto ends = run({options(0, 2), options(1, 2)}, [&](NodeSession& session, int node) {
    session.await_start();
    if (node == 1) session.report_signal(SIGINT);
    if (node == 0) {
      EXPECT_THAT(await_requests(session), ElementsAre(SIGINT));
    }
    const Verdict verdict = session.await_verdict(ended(node + 1, SIGINT, true));
    return fmt::format("{} {}", verdict.exit_code, verdict.report);
  });
  EXPECT_THAT(ends, Each("130 paceline: stopped by SIGINT\n"));
}

// Where nodes come and go, a signal takes out the one that gets it, unless node 0 gets it too.
TEST_F(Session, ASignalTakesANodeOutOfAJobThatGoesOnWithoutIt) {
  for (const bool all_get_it : {false, true}) {
    SCOPED_TRACE(all_get_it);
    std::vector<SessionOptions> all{options(0, 2, false), options(1, 2, false)};
    all[0].rules.min_nodes = 1;
    all[0].rules.last_call = 5s;
    all[0].rules.max_restarts = 1;
    const auto ends = run(all, [&](NodeSession& session, int node) {
      session.await_start();
      if (node == 1) {
        session.report_signal(SIGTERM);
        const Verdict verdict = session.await_verdict(ended(2, SIGTERM, true));
        return fmt::format("{} {} {}", verdict.restarts, verdict.exit_code, verdict.report);
      }
      EXPECT_THAT(await_requests(session), ElementsAre(0));
      if (all_get_it) session.report_signal(SIGTERM);
      const Verdict verdict = session.await_verdict(ended(1, SIGTERM, true));
      return fmt::format("{} {} {}", verdict.restarts, verdict.exit_code, verdict.report);
    });
    EXPECT_EQ(ends[1], "false 143 paceline: stopped by SIGTERM\n");
    EXPECT_EQ(ends[0],
              all_get_it ? "false 143 paceline: stopped by SIGTERM\n"
                         : "true 0 paceline: node 1 (host1), ranks 1 to 2: left: SIGTERM ended its "
                           "launcher\n  rank 0: stopped by SIGTERM\n"
                           "paceline: starts all processes again, restart 1 of 1\n");
  }
}

TEST_F(Session, OtherSignalsAreForAllNodes) {
  run({options(0, 2, false), options(1, 2, false)}, [&](NodeSession& session, int node) {
    session.await_start();
    if (node == 1) session.report_signal(SIGUSR1);
    EXPECT_THAT(await_requests(session), ElementsAre(SIGUSR1));
    EXPECT_EQ(session.await_verdict(ended(node + 1)).exit_code, 128 + SIGUSR1);
    return std::string();
  });
}

TEST_F(Session, NamesANodeThatIsLost) {
  const auto ends = run({options(0, 2), options(1, 2)}, [&](NodeSession& session, int node) {
    session.await_start();
    if (node == 1) return std::string("gone");
    EXPECT_THAT(await_requests(session), ElementsAre(0));
    const Verdict verdict = session.await_verdict(ended(1, SIGTERM, true));
    return fmt::format("{} {}", verdict.exit_code, verdict.report);
  });
  EXPECT_EQ(ends[0],
            "1 paceline: node 1 (host1), ranks 1 to 2: was lost: it closed the connection, so its "
            "launcher has ended\n  rank 0: stopped by SIGTERM\n");
}

TEST_F(Session, GoesOnWithTheNodesThatAreLeft) {
  std::vector<SessionOptions> all{options(0, 3, false), options(1, 3, false), options(2, 3, false)};
  all[0].rules.min_nodes = 2;
  all[0].rules.max_restarts = 1;
  all[0].rules.last_call = 50ms;
  std::atomic<int> left = 0;
  const auto ends = run(all, [&](NodeSession& session, int node) {
    auto start = session.await_start();
    // A slow node may come when the others have started without it.
    while (start->nodes < 3) {
      await_requests(session);
      session.await_verdict(ended(node + 1, SIGTERM, true));
      start = session.await_start();
    }
    EXPECT_EQ(start->restart, 0);
    if (node == 1) return std::string("gone");
    await_requests(session);
    EXPECT_TRUE(session.await_verdict(ended(node + 1, SIGTERM, true)).restarts);
    start = session.await_start();
    EXPECT_EQ(start->restart, 1);
    EXPECT_EQ(start->world_size, 1 + 3);
    session.await_verdict(ended(node + 1));
    ++left;
    return describe(*start);
  });
  EXPECT_EQ(left, 2) << ends[0] << ends[2];
}

// A node that comes when the job has room has it start again, which is no restart after a failure.
TEST_F(Session, TakesInANodeThatComesLate) {
  auto first = options(0, 2, false);
  first.rules.min_nodes = 1;
  first.rules.last_call = 1ms;
  std::atomic<bool> started = false;
  std::thread late([&] {
    started.wait(false);
    NodeSession session = make(options(1, 2, false));
    EXPECT_EQ(describe(*session.await_start()), "1/2 ranks from 1 of 3 restart 0 job 127.0.0.1");
    EXPECT_EQ(session.await_verdict(ended(2)).exit_code, 0);
  });
  NodeSession session = make(first);
  EXPECT_EQ(session.await_start()->nodes, 1);
  started = true;
  started.notify_one();
  EXPECT_THAT(await_requests(session), ElementsAre(0));
  const Verdict verdict = session.await_verdict(ended(1, SIGTERM, true));
  EXPECT_TRUE(verdict.restarts);
  EXPECT_THAT(verdict.report, HasSubstr("as a node has come"));
  EXPECT_EQ(session.await_start()->nodes, 2);
  EXPECT_EQ(session.await_verdict(ended(1)).exit_code, 0);
  late.join();
}

// What ends because the others stop is no failure, and uses no restart.
TEST_F(Session, StartsAgainWithALateNodeWhateverTheOthersEndWith) {
  auto first = options(0, 2, false);
  first.rules.min_nodes = 1;
  first.rules.last_call = 1ms;
  std::atomic<bool> started = false;
  std::thread late([&] {
    started.wait(false);
    NodeSession session = make(options(1, 2, false));
    EXPECT_EQ(session.await_start()->nodes, 2);
    EXPECT_EQ(session.await_verdict(ended(2)).exit_code, 0);
  });
  NodeSession session = make(first);
  session.await_start();
  started = true;
  started.notify_one();
  await_requests(session);
  session.report_failure();
  EXPECT_TRUE(session.await_verdict(ended(1, kExit3)).restarts);
  EXPECT_EQ(session.await_start()->nodes, 2);
  EXPECT_EQ(session.await_verdict(ended(1)).exit_code, 0);
  late.join();
}

// One that is too many waits, and takes the place of a node that is lost.
TEST_F(Session, KeepsSpareNodes) {
  std::vector<SessionOptions> all{options(0, 2, false), options(1, 2, false), options(2, 2, false)};
  all[0].rules.max_restarts = 1;
  std::atomic<int> starts = 0;
  const auto ends = run(all, [&](NodeSession& session, int node) {
    auto start = session.await_start();
    ++starts;
    if (node != 0 && start->restart == 0) return std::string("gone");
    if (start->restart == 0) {
      await_requests(session);
      session.await_verdict(ended(node + 1, SIGTERM, true));
      start = session.await_start();
    }
    session.await_verdict(ended(node + 1));
    return describe(*start);
  });
  EXPECT_EQ(starts, 3);
  EXPECT_THAT(ends[0], HasSubstr("restart 1"));
}

// Nodes that have been accepted wait as long as it takes, whatever limit an answer has.
TEST_F(Session, WaitsLongerThanForAnAnswer) {
  std::vector<SessionOptions> all{options(0, 3), options(1, 3), options(2, 3)};
  for (auto& one : all) one.answer_limit = 50ms;
  std::thread late([&] {
    std::this_thread::sleep_for(300ms);  // the time that has to pass
    NodeSession session = make(all[2]);
    EXPECT_EQ(describe(*session.await_start()), "2/3 ranks from 3 of 6 restart 0 job 127.0.0.1");
    session.await_verdict(ended(3));
  });
  const auto ends = run({all[0], all[1]}, [&](NodeSession& session, int node) {
    const auto start = session.await_start();
    session.await_verdict(ended(node + 1));
    return describe(*start);
  });
  late.join();
  EXPECT_THAT(ends, ElementsAre("0/3 ranks from 0 of 6 restart 0 job 127.0.0.1",
                                "1/3 ranks from 1 of 6 restart 0 job 127.0.0.1"));
}

// Each node's clock begins when it starts. The rank that failed first is the one of which node 0
// heard first.
TEST_F(Session, ComparesFailuresOfNodesByOneClock) {
  const auto ends = run({options(0, 2), options(1, 2)}, [&](NodeSession& session, int node) {
    session.await_start();
    if (node == 0) session.report_failure();
    if (node == 1) {
      await_requests(session);
      session.report_failure();
    }
    Result result = ended(node + 1, (5 + node) << 8);
    for (auto& rank : result.ranks) rank.ended = node == 0 ? 5s : 1s;
    return session.await_verdict(result).report;
  });
  EXPECT_THAT(ends, Each(HasSubstr("rank 0 on node 0 (host0) failed first: exited with code 5")));
}

TEST_F(Session, WaitsForAHostThatHasNoAddressYet) {
  auto second = options(1, 2);
  second.host = "no-such-host.invalid";
  second.rules.join_timeout = 300ms;
  NodeSession session = make(second);
  try {
    session.await_start();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("cannot resolve no-such-host.invalid"));
  }
}

// Something that accepts connections and closes them: a proxy whose server does not run.
TEST_F(Session, DoesNotConnectAgainAndAgainWithoutPause) {
  net::Listener proxy(base::resolve("127.0.0.1", port_.port()).front());
  std::atomic<bool> done = false;
  int connections = 0;
  std::thread serve_none([&] {
    while (!done) {
      pollfd ready{proxy.fd(), POLLIN, 0};
      if (::poll(&ready, 1, 10) > 0 && proxy.accept()) ++connections;
    }
  });
  auto second = options(1, 2);
  second.rules.join_timeout = 300ms;
  NodeSession session = make(second);
  EXPECT_THROW(session.await_start(), Error);
  done = true;
  serve_none.join();
  EXPECT_LE(connections, 2);
}

TEST_F(Session, ReportsANodeThatCannotStart) {
  auto first = options(0, 2);
  first.rules.max_restarts = 5;
  const auto ends = run({first, options(1, 2)}, [&](NodeSession& session, int node) {
    session.await_start();
    const Verdict verdict =
        session.await_verdict(node == 1 ? Result{{}, "no such program"} : ended(1, SIGTERM, true));
    return fmt::format("{} {} {}", verdict.restarts, verdict.exit_code, verdict.report);
  });
  EXPECT_THAT(ends, Each(AllOf(StartsWith("false 1 "),
                               HasSubstr("node 1 (host1), ranks 1 to 2: no such program\n"))));
}

TEST_F(Session, RefusesNodesThatDoNotFit) {
  std::vector<SessionOptions> all(5, options(1, 2));
  all[0] = options(0, 2);
  all[1].key = net::make_key("the secret of another job");
  all[2].join.job = "other";
  all[3].join.version = "0.0.1";
  all[4].join.node = 2;
  std::atomic<int> refused = 0;
  std::atomic<bool> all_refused = false;
  const auto ends = run(all, [&](NodeSession& session, int node) {
    if (node != 0) {
      try {
        session.await_start();
      } catch (const Error& error) {
        if (++refused == 4) all_refused = true;
        return std::string(error.what());
      }
      return std::string("accepted");
    }
    while (!all_refused) serve(session);
    return std::string("undisturbed");
  });
  EXPECT_EQ(ends[0], "undisturbed");
  EXPECT_THAT(ends[1], HasSubstr("its secret is another one"));
  EXPECT_THAT(ends[2], HasSubstr("the job 'job' meets there, and not 'other'"));
  EXPECT_THAT(ends[3], HasSubstr("install the same version on all nodes"));
  EXPECT_THAT(ends[4], HasSubstr("--node-rank 2, but the job has 2 nodes"));
}

TEST_F(Session, RefusesASecondNodeOfTheSameNumber) {
  std::atomic<int> refused = 0;
  const auto ends =
      run({options(0, 2), options(1, 2), options(1, 2)}, [&](NodeSession& session, int node) {
        try {
          session.await_start();
          while (refused == 0) serve(session);  // the job must not be over before
          session.await_verdict(ended(node == 0 ? 1 : 2));
          return std::string("accepted");
        } catch (const Error& error) {
          ++refused;
          return std::string(error.what());
        }
      });
  EXPECT_EQ(refused, 1);
  EXPECT_EQ(ends[0], "accepted");
  EXPECT_THAT(ends[1] + ends[2],
              AllOf(HasSubstr("accepted"), HasSubstr("node 1 is taken by host1: give each node its "
                                                     "own --node-rank")));
}

TEST_F(Session, IsNotDisturbedByStrangers) {
  std::vector<base::UniqueFd> strangers;
  NodeSession first = make(options(0, 2));
  for (int i = 0; i < 100; ++i) {
    base::UniqueFd& socket =
        strangers.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const base::Address address = base::resolve("127.0.0.1", port_.port()).front();
    ASSERT_EQ(::connect(socket.get(), address.data(), address.size()), 0);
    const std::string text = i % 2 == 0 ? "GET / HTTP/1.0\r\n\r\n" : "";
    ASSERT_EQ(::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
    first.receive();
  }
  std::thread second([&] {
    NodeSession session = make(options(1, 2));
    session.await_start();
    session.await_verdict(ended(2));
  });
  EXPECT_EQ(first.await_start()->nodes, 2);
  EXPECT_EQ(first.await_verdict(ended(1)).exit_code, 0);
  second.join();
  for (const base::UniqueFd& socket : strangers) {
    std::array<char, 64> bytes{};
    EXPECT_LE(::recv(socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT), 0);
  }
}

TEST_F(Session, GivesUpOnAWorldThatNeverFills) {
  std::vector<SessionOptions> all{options(0, 3), options(1, 3)};
  all[0].rules.join_timeout = 300ms;
  const auto ends = run(all, [&](NodeSession& session, int) {
    EXPECT_FALSE(session.await_start());
    return fmt::format("{} {}", session.verdict().exit_code, session.verdict().report);
  });
  EXPECT_THAT(ends,
              Each("1 paceline: only 2 of 3 nodes have come (host0, host1), not node 2 within "
                   "0.3 s\n"));
}

TEST_F(Session, GivesUpOnACoordinatorThatNeverComes) {
  auto second = options(1, 2);
  second.rules.join_timeout = 300ms;
  NodeSession session = make(second);
  try {
    session.await_start();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("no launcher answered at 127.0.0.1"),
                                    HasSubstr("within 0.3 s"), HasSubstr("ECONNREFUSED")));
  }
}

TEST_F(Session, NamesACoordinatorThatIsLost) {
  const auto ends = run({options(0, 2), options(1, 2)}, [&](NodeSession& session, int node) {
    session.await_start();
    if (node == 0) return std::string("gone");
    EXPECT_THAT(await_requests(session), ElementsAre(0));
    session.await_verdict(ended(2, SIGTERM, true));
    return std::string("a verdict");
  });
  EXPECT_THAT(ends[1], AllOf(StartsWith("lost the launcher of node 0 at 127.0.0.1:"),
                             HasSubstr("it closed the connection")));
}

TEST_F(Session, NamesATakenPort) {
  const net::Listener other(base::resolve("127.0.0.1", port_.port()).front());
  try {
    make(options(0, 2));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("127.0.0.1:"), HasSubstr("another job using the port")));
  }
}

// Of launchers without numbers on the endpoint's machine, the first is the coordinator.
TEST_F(Session, FindsTheCoordinatorByItsAddress) {
  std::vector<SessionOptions> all(3, options(0, 3, false));
  for (auto& one : all) one.coordinates.reset();
  std::mutex mutex;
  std::vector<int> nodes;
  run(all, [&](NodeSession& session, int) {
    const int node = session.await_start()->node;
    session.await_verdict(ended(1));
    const std::lock_guard lock(mutex);
    nodes.push_back(node);
    return std::string();
  });
  EXPECT_THAT(nodes, testing::UnorderedElementsAre(0, 1, 2));
  EXPECT_THAT(printed(), HasSubstr("waits for 3 nodes at 127.0.0.1:"));
}

TEST_F(Session, RefusesAHostThatCannotBeResolved) {
  auto first = options(0, 2);
  first.host = "no-such-host.invalid";
  EXPECT_THROW(make(first), UsageError);
}

}  // namespace
}  // namespace paceline::nodes
