#include "nodes/messages.h"

#include <gmock/gmock.h>

namespace paceline::nodes {
namespace {

template <typename Kind>
Kind after_a_journey(const Kind& message) {
  const auto decoded = decode(encode(message));
  EXPECT_TRUE(decoded && std::holds_alternative<Kind>(*decoded));
  return std::get<Kind>(*decoded);
}

TEST(Messages, ArriveAsTheyWereSent) {
  const Join join = after_a_journey(Join{"1.2", "job", "host", 4, 2, 5, 3, 6, true, "reader"});
  EXPECT_EQ(join.version, "1.2");
  EXPECT_EQ(join.job, "job");
  EXPECT_EQ(join.host, "host");
  EXPECT_EQ(join.processes, 4);
  EXPECT_EQ(join.min_nodes, 2);
  EXPECT_EQ(join.max_nodes, 5);
  EXPECT_EQ(join.node, 3);
  EXPECT_EQ(join.max_restarts, 6);
  EXPECT_TRUE(join.tolerate_loss);
  EXPECT_EQ(join.role, "reader");
  EXPECT_EQ(after_a_journey(Join{}).node, std::nullopt);
  EXPECT_EQ(after_a_journey(Join{}).max_restarts, std::nullopt);
  Join without_restarts;
  without_restarts.max_restarts = 0;
  EXPECT_EQ(after_a_journey(without_restarts).max_restarts, 0);

  const Start start = after_a_journey(Start{1, 6, true, 2, 1, 4, 8, 2, 3, "job", "10.0.0.1", 2950});
  EXPECT_TRUE(start.tolerate_loss);
  EXPECT_EQ(start.restart, 1);
  EXPECT_EQ(start.max_restarts, 6);
  EXPECT_EQ(start.nodes, 2);
  EXPECT_EQ(start.node, 1);
  EXPECT_EQ(start.first_rank, 4);
  EXPECT_EQ(start.world_size, 8);
  EXPECT_EQ(start.first_role_rank, 2);
  EXPECT_EQ(start.role_world_size, 3);
  EXPECT_EQ(start.job, "job");
  EXPECT_EQ(start.master_addr, "10.0.0.1");
  EXPECT_EQ(start.master_port, 2950);

  EXPECT_THAT(after_a_journey(Failed{{4, -1}}).blamed_ranks, ElementsAre(4, -1));
  after_a_journey(Welcome{});
  after_a_journey(Ping{});
  EXPECT_EQ(after_a_journey(Signal{15}).number, 15);
  EXPECT_EQ(after_a_journey(Refuse{"why"}).reason, "why");
  EXPECT_EQ(after_a_journey(Notice{"text"}).text, "text");
  const Verdict verdict = after_a_journey(Verdict{true, 3, 2, "report"});
  EXPECT_EQ(verdict.signal, 2);
  EXPECT_TRUE(verdict.restarts);
  EXPECT_EQ(verdict.exit_code, 3);
  EXPECT_EQ(verdict.report, "report");
}

TEST(Messages, CarryResultsOfRanks) {
  launch::RankResult failed;
  failed.status = 256;
  failed.ended = std::chrono::nanoseconds(5'000'000'000);
  failed.stopped = true;
  failed.tolerated = true;
  failed.error = launch::ErrorFile{"text", {1, 2}};
  failed.last_lines = {"one", "not UTF-8: \xff"};
  const Result result = after_a_journey(Result{{launch::RankResult(), failed}, "problem"});
  EXPECT_EQ(result.problem, "problem");
  ASSERT_EQ(result.ranks.size(), 2U);
  EXPECT_FALSE(result.ranks[0].error);
  EXPECT_EQ(result.ranks[1].status, 256);
  EXPECT_EQ(result.ranks[1].ended, failed.ended);
  EXPECT_TRUE(result.ranks[1].stopped);
  EXPECT_FALSE(result.ranks[0].tolerated);
  EXPECT_TRUE(result.ranks[1].tolerated);
  EXPECT_EQ(result.ranks[1].error->message, "text");
  EXPECT_EQ(result.ranks[1].error->blamed_ranks, (std::vector{1, 2}));
  EXPECT_EQ(result.ranks[1].last_lines, (std::vector<std::string>{"one", "not UTF-8: \ufffd"}));
}

TEST(Messages, OfOtherKindsAreIgnored) {
  for (
      const char* const text :
      {"", "no JSON", "[]", "7", R"({"type": "other"})", R"({"type": 3})", R"({"type": "join"})",
       R"({"type": "signal", "number": "nine"})", R"({"type": "signal", "number": 0})",
       R"({"type": "signal", "number": 1e300})", R"({"type": "signal", "number": 4294967305})",
       R"({"type": "result", "problem": "", "ranks": [{"status": 0}]})",
       R"({"type": "result", "problem": "", "ranks": [{"status": 7e55, "ended_ns": 5,
            "stopped": false, "tolerated": false, "last_lines": []}]})",
       R"({"type": "result", "problem": "", "ranks": [{"status": 0, "ended_ns": 18446744073709551615,
            "stopped": false, "tolerated": false, "last_lines": []}]})"}) {
    EXPECT_FALSE(decode(text)) << text;
  }
}

}  // namespace
}  // namespace paceline::nodes
