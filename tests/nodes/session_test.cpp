// A job on several nodes that runs: failures, signals, lost and late nodes.
#include <gmock/gmock.h>

#include <atomic>
#include <functional>

#include "nodes/session_fixture.h"

namespace paceline::nodes {
namespace {

using base::Deadline;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int kExit3 = 3 << 8;

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
    if (node == 1) session.report_failure({});
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

TEST_F(Session, PassesOnWhichRanksAreBlamed) {
  run({options(0, 2), options(1, 2)}, [&](NodeSession& session, int node) {
    session.await_start();
    if (node == 0) session.report_failure({2, launch::kUnknownRank});
    if (node == 1) {
      std::vector<launch::NodeRequest> requests;
      while (requests.empty()) requests = serve(session);
      EXPECT_THAT(requests.at(0).blamed_ranks, ElementsAre(2, launch::kUnknownRank));
    }
    session.await_verdict(ended(node + 1));
    return "";
  });
}

TEST_F(Session, StartsAgainAtAnotherPort) {
  auto first = options(0, 2);
  first.rules.max_restarts = 1;
  const auto ends = run({first, options(1, 2)}, [&](NodeSession& session, int node) {
    const auto start = session.await_start();
    if (node == 1) session.report_failure({});
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
    std::vector<SessionOptions> all{elastic(0, 1, 2), elastic(1, 1, 2)};
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

TEST_F(Session, NamesALauncherWhoseMessageCannotBeRead) {
  const auto ends = run({options(0, 2), options(1, 2)}, [&](NodeSession& session, int node) {
    session.await_start();
    if (node == 1) session.report_failure({-5});  // no rank's number
    if (node == 0) await_requests(session);
    return session.await_verdict(ended(node + 1, SIGTERM, true)).report;
  });
  EXPECT_THAT(ends[0], StartsWith("paceline: node 1 (host1), ranks 1 to 2: was lost: its launcher "
                                  "sent a message that node 0 cannot read\n"));
  EXPECT_THAT(ends[1], HasSubstr("does not accept this node: its launcher sent a message"));
}

// Such as one that is suspended: its connection stays.
class SilentLauncher : public Session {
 protected:
  // The verdict of node 0, where `end` is to end the job and the processes end with `result`. Node
  // 1's launcher does nothing until then.
  Verdict verdict_without_it(const std::function<void(NodeSession&)>& end, const Result& result) {
    auto first = options(0, 2);
    first.rules.answer_limit = 300ms;
    std::atomic<bool> over = false;
    Verdict verdict;
    const auto ends = run({first, options(1, 2)}, [&](NodeSession& session, int node) {
      session.await_start();
      if (node == 1) {
        over.wait(false);
        return session.await_verdict(ended(2, SIGTERM, true)).report;
      }
      end(session);
      verdict = session.await_verdict(result);
      over = true;
      over.notify_one();
      return std::string();
    });
    learned_ = ends[1];
    return verdict;
  }
  std::string learned_;  // by its node, when it goes on
};

TEST_F(SilentLauncher, IsNamed) {
  const Verdict verdict = verdict_without_it(
      [](NodeSession& session) { session.report_failure({}); }, ended(1, kExit3));
  EXPECT_EQ(verdict.exit_code, 3);
  EXPECT_EQ(verdict.report,
            "paceline: rank 0 on node 0 (host0) failed first: exited with code 3\n"
            "  ranks 1, 2: lost with node 1 (host1)\n");
  EXPECT_THAT(learned_, HasSubstr("does not accept this node: its launcher has not answered for "
                                  "0.3 s; is it suspended?"));
}

TEST_F(SilentLauncher, IsNamedAfterASignal) {
  const Verdict verdict = verdict_without_it(
      [](NodeSession& session) { session.report_signal(SIGUSR1); }, ended(1, SIGUSR1, true));
  EXPECT_THAT(verdict.report,
              HasSubstr("its launcher has not answered for 0.3 s; is it suspended?"));
}

TEST_F(Session, WaitsForALauncherThatAnswersWhileItsProcessesEnd) {
  auto first = options(0, 2);
  first.rules.answer_limit = 2s;  // a busy machine may take some of it for an answer
  const auto ends = run({first, options(1, 2)}, [&](NodeSession& session, int node) {
    session.await_start();
    if (node == 0) session.report_failure({});
    const auto end = Deadline::after(5s);  // the time that has to pass
    while (node == 1 && !end.expired()) serve(session);
    return session.await_verdict(node == 0 ? ended(1, kExit3) : ended(2, SIGTERM, true)).report;
  });
  EXPECT_THAT(ends, Each(HasSubstr("ranks 1, 2: stopped by SIGTERM\n")));
}

TEST_F(Session, GoesOnWithTheNodesThatAreLeft) {
  std::vector<SessionOptions> all{elastic(0, 2, 3), elastic(1, 2, 3), elastic(2, 2, 3)};
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
// Programs that save what they have when they are asked to stop may exit with 0.
TEST_F(Session, TakesInANodeThatComesLate) {
  for (const int status : {SIGTERM, 0}) {
    SCOPED_TRACE(status);
    auto first = elastic(0, 1, 2);
    first.rules.last_call = 1ms;
    std::atomic<bool> started = false;
    std::thread late([&] {
      started.wait(false);
      NodeSession session = make(elastic(1, 1, 2));
      const auto start = session.await_start();
      if (!start) return;
      EXPECT_EQ(describe(*start), "1/2 ranks from 1 of 3 restart 0 job 127.0.0.1");
      EXPECT_EQ(session.await_verdict(ended(2)).exit_code, 0);
    });
    NodeSession session = make(first);
    EXPECT_EQ(session.await_start()->nodes, 1);
    started = true;
    started.notify_one();
    EXPECT_THAT(await_requests(session), ElementsAre(0));
    const Verdict verdict = session.await_verdict(ended(1, status, true));
    EXPECT_TRUE(verdict.restarts);
    EXPECT_THAT(verdict.report, HasSubstr("as a node has come"));
    if (verdict.restarts) {
      EXPECT_EQ(session.await_start()->nodes, 2);
      EXPECT_EQ(session.await_verdict(ended(1)).exit_code, 0);
    }
    late.join();
  }
}

// What ends because the others stop is no failure, and uses no restart.
TEST_F(Session, StartsAgainWithALateNodeWhateverTheOthersEndWith) {
  auto first = elastic(0, 1, 2);
  first.rules.last_call = 1ms;
  std::atomic<bool> started = false;
  std::thread late([&] {
    started.wait(false);
    NodeSession session = make(elastic(1, 1, 2));
    EXPECT_EQ(session.await_start()->nodes, 2);
    EXPECT_EQ(session.await_verdict(ended(2)).exit_code, 0);
  });
  NodeSession session = make(first);
  session.await_start();
  started = true;
  started.notify_one();
  await_requests(session);
  session.report_failure({});
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

// Each node's clock begins when it starts. The rank that failed first is the one of which node 0
// heard first.
TEST_F(Session, ComparesFailuresOfNodesByOneClock) {
  const auto ends = run({options(0, 2), options(1, 2)}, [&](NodeSession& session, int node) {
    session.await_start();
    if (node == 0) session.report_failure({});
    if (node == 1) {
      await_requests(session);
      session.report_failure({});
    }
    Result result = ended(node + 1, (5 + node) << 8);
    for (auto& rank : result.ranks) rank.ended = node == 0 ? 5s : 1s;
    return session.await_verdict(result).report;
  });
  EXPECT_THAT(ends, Each(HasSubstr("rank 0 on node 0 (host0) failed first: exited with code 5")));
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

}  // namespace
}  // namespace paceline::nodes
