// Several real launchers on this machine, as if each were a machine of its own, with small shell
// programs as workers.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "launcher.h"
#include "net/listener.h"

namespace paceline {
namespace {

using test::ChildProcess;
using test::eventually;
using test::Launcher;
using test::pid_after;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Nodes : public Launcher {
 protected:
  std::vector<std::string> endpoint() const {
    return {"--master-addr", "127.0.0.1", "--master-port", std::to_string(port_.port())};
  }

  // Node `node` of `nodes`, with 2 - node processes.
  ChildProcess start(int node, int nodes, const std::string& script,
                     std::vector<std::string> flags = {}, Environment environment = {}) {
    const auto where = endpoint();
    flags.insert(flags.end(), where.begin(), where.end());
    flags.insert(flags.end(),
                 {"--nnodes", std::to_string(nodes), "--node-rank", std::to_string(node)});
    return run(2 - node, script, flags, std::move(environment));
  }

  net::PortReservation port_{base::resolve("127.0.0.1", 0).front()};
};

TEST_F(Nodes, RanksHaveTorchrunsVariables) {
  const std::string show =
      "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE "
      "$ROLE_RANK/$ROLE_WORLD_SIZE $MASTER_ADDR $TORCHELASTIC_RUN_ID $PACELINE_STORE_FD.; "
      "echo port=$MASTER_PORT";
  auto second = start(1, 2, show);
  auto first = start(0, 2, show);
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
  EXPECT_THAT(first.out(), AllOf(HasSubstr("[rank0]: 0/3 0/2 0/2 0/3 127.0.0.1 none .\n"),
                                 HasSubstr("[rank1]: 1/3 1/2 0/2 1/3 127.0.0.1 none .\n")));
  EXPECT_THAT(second.out(), HasSubstr("[rank2]: 2/3 0/1 1/2 2/3 127.0.0.1 none .\n"));
  const int port = pid_after(second.out(), "port");
  EXPECT_NE(port, port_.port());
  EXPECT_THAT(first.out(), HasSubstr("port=" + std::to_string(port) + "\n"));
  EXPECT_THAT(second.err(), HasSubstr("paceline: node 1 of 2, rank 2 of 3: 1 process"));
}

TEST_F(Nodes, RanksAreCountedByRoleToo) {
  const std::string show = "echo $ROLE_NAME $ROLE_RANK/$ROLE_WORLD_SIZE";
  auto first = start(0, 2, show, {"--role", "trainer"});
  auto second = start(1, 2, show, {"--role", "reader"});
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
  EXPECT_THAT(first.out(),
              AllOf(HasSubstr("[rank0]: trainer 0/2\n"), HasSubstr("[rank1]: trainer 1/2\n")));
  EXPECT_THAT(second.out(), HasSubstr("[rank2]: reader 0/1\n"));
}

TEST_F(Nodes, AllLaunchersReportTheFirstFailure) {
  const std::string script = "test $RANK = 2 && { echo last words; exit 7; }; exec sleep 1000";
  auto first = start(0, 2, script);
  auto second = start(1, 2, script);
  for (auto* const one : {&first, &second}) {
    EXPECT_EQ(one->wait(), 7) << one->err();
    EXPECT_THAT(one->err(), AllOf(HasSubstr("paceline: rank 2 on node 1 ("),
                                  HasSubstr(") failed first: exited with code 7\n"
                                            "  last lines of rank 2:\n"
                                            "    | last words\n"
                                            "  ranks 0, 1: stopped by SIGTERM\n")));
  }
}

TEST_F(Nodes, ARankOfAnotherNodeIsBlamed) {
  const std::string script = R"(
    if [ $RANK = 0 ]; then
      printf '{"message": {"message": "lost", "extraInfo": {"blamed_ranks": [2]}}}' \
        > $TORCHELASTIC_ERROR_FILE
      exit 1
    fi
    if [ $RANK = 2 ]; then exit 0; fi
    exec sleep 1000)";
  auto first = start(0, 2, script);
  auto second = start(1, 2, script);
  EXPECT_EQ(first.wait(), 1) << first.err();
  EXPECT_EQ(second.wait(), 1) << second.err();
  EXPECT_THAT(second.err(), AllOf(HasSubstr("paceline: rank 2 on node 1 ("),
                                  HasSubstr(") ended early: exited with code 0 while other ranks "
                                            "needed it\n"),
                                  HasSubstr("  rank 0: exited with code 1: lost\n")));
}

// Rank 2 fails by itself, long after rank 0, whose error is about it: as a rank that is late does.
TEST_F(Nodes, ABlamedRankOfAnotherNodeIsWaitedFor) {
  const std::string script = R"(
    if [ $RANK = 0 ]; then
      until rm $TMPDIR/rank_1_is_ready; do sleep 0.1; done
      printf '{"message": {"message": "late", "extraInfo": {"blamed_ranks": [2]}}}' \
        > $TORCHELASTIC_ERROR_FILE
      exit 1
    fi
    if [ $RANK = 2 ]; then
      until rm $TMPDIR/rank_1_was_stopped; do sleep 0.1; done
      exit 7
    fi
    trap 'touch $TMPDIR/rank_1_was_stopped; exit 15' TERM
    touch $TMPDIR/rank_1_is_ready
    while :; do sleep 0.1; done)";
  auto first = start(0, 2, script, {"--stop-grace", "60"});
  auto second = start(1, 2, script, {"--stop-grace", "60"});
  for (auto* const one : {&first, &second}) {
    EXPECT_EQ(one->wait(), 7) << one->err();
    EXPECT_THAT(one->err(), AllOf(HasSubstr("paceline: rank 2 on node 1 ("),
                                  HasSubstr(") failed first: exited with code 7\n"),
                                  HasSubstr("  rank 0: exited with code 1: late\n")));
  }
}

TEST_F(Nodes, AKilledLauncherIsNamed) {
  const std::string script = "echo worker$RANK=$$; exec sleep 1000";
  auto first = start(0, 2, script);
  auto second = start(1, 2, script);
  for (const char* const worker : {"worker0=", "worker1="}) first.wait_for(worker);
  second.wait_for("worker2=");
  second.signal(SIGKILL);
  EXPECT_EQ(first.wait(), 1) << first.err();
  EXPECT_THAT(first.err(), AllOf(HasSubstr("paceline: node 1 ("),
                                 HasSubstr("), rank 2: was lost: it closed the connection"),
                                 HasSubstr("  ranks 0, 1: stopped by SIGTERM\n")));
  const pid_t worker = pid_after(second.out(), "worker2");
  EXPECT_TRUE(eventually([&] { return test::has_ended(worker); }));
  second.wait();
}

TEST_F(Nodes, WithoutNode0TheOthersEnd) {
  const std::string script = "echo worker$RANK=$$; exec sleep 1000";
  auto first = start(0, 2, script);
  auto second = start(1, 2, script);
  second.wait_for("worker2=");
  first.wait_for("worker0=");
  first.signal(SIGKILL);
  EXPECT_EQ(second.wait(), 1) << second.err();
  EXPECT_THAT(second.err(), HasSubstr("paceline run: lost the launcher of node 0 at 127.0.0.1:"));
  EXPECT_TRUE(test::has_ended(pid_after(second.out(), "worker2")));
  first.wait();
}

// Ends once the file exists.
std::string wait_until(const std::filesystem::path& file) {
  return "while ! [ -e " + file.string() + " ]; do sleep 0.01; done";
}

TEST_F(Nodes, GoOnWithoutProcessesThatFail) {
  const test::TemporaryDirectory shared;
  const auto file = shared.path() / "end";
  const std::string script = "[ $RANK = 0 ] || exit $RANK; " + wait_until(file);
  auto first = start(0, 2, script, {"--tolerate-loss"});
  auto second = start(1, 2, script, {"--tolerate-loss"});
  first.wait_for("rank 1 exited with code 1; the others go on without it\n");
  second.wait_for("rank 2 exited with code 2; the others go on without it\n");
  std::ofstream(file).close();
  for (auto* const one : {&first, &second}) {
    EXPECT_EQ(one->wait(), 0) << one->err();
    EXPECT_THAT(one->err(),
                HasSubstr("paceline: ended without 2 of 3 ranks, which failed: 1, 2\n"));
  }
}

TEST_F(Nodes, GoOnWithoutANodeThatIsLost) {
  const test::TemporaryDirectory shared;
  const auto file = shared.path() / "end";
  const std::string script = "echo worker$RANK=$$; " + wait_until(file);
  auto first = start(0, 2, script, {"--tolerate-loss"});
  auto second = start(1, 2, script, {"--tolerate-loss"});
  first.wait_for("worker1=");
  second.wait_for("worker2=");
  second.signal(SIGKILL);
  second.wait();
  first.wait_for("the others go on without it\n");
  EXPECT_THAT(first.err(), AllOf(HasSubstr("paceline: node 1 ("),
                                 HasSubstr("), rank 2: was lost: it closed the connection")));
  std::ofstream(file).close();
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_THAT(first.err(), HasSubstr("paceline: ended without 1 of 3 ranks, which failed: 2\n"
                                     "  rank 2 on node 1 ("));
}

TEST_F(Nodes, DoNotGoOnWithoutRank0) {
  const std::string script = "[ $RANK = 0 ] && exit 4; exec sleep 1000";
  auto first = start(0, 2, script, {"--tolerate-loss"});
  auto second = start(1, 2, script, {"--tolerate-loss"});
  for (auto* const one : {&first, &second}) {
    EXPECT_EQ(one->wait(), 4) << one->err();
    EXPECT_THAT(one->err(), HasSubstr("failed first: exited with code 4"));
  }
}

// Node 0 decides.
TEST_F(Nodes, AnotherNumberOfRestartsIsRefused) {
  auto first = start(0, 2, "exec sleep 1000", {"--max-restarts=1"});
  for (const char* const flag : {"--max-restarts=2", "--max-restarts=0", "--tolerate-loss"}) {
    auto second = start(1, 2, "exec sleep 1000", {flag});
    EXPECT_EQ(second.wait(), 1) << second.err();
    EXPECT_THAT(second.err(), HasSubstr("on node 0, which decides")) << flag;
  }
  first.signal(SIGTERM);
  first.wait();
}

TEST_F(Nodes, AJobIsStartedAgainOnAllNodes) {
  const std::string script =
      "echo start=$TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; "
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || { [ $RANK = 2 ] && exit 3; exec sleep 1000; }";
  auto first = start(0, 2, script, {"--max-restarts=1"});
  auto second = start(1, 2, script);
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
  EXPECT_THAT(second.out(), AllOf(HasSubstr("start=0 of 1"), HasSubstr("start=1 of 1")));
  EXPECT_THAT(second.err(), HasSubstr("paceline: starts all processes again, restart 1 of 1\n"));
}

TEST_F(Nodes, ALostNodeIsReplaced) {
  const std::string script =
      "echo worker$RANK=$$; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 1000";
  auto first = start(0, 2, script, {"--max-restarts=1"});
  auto second = start(1, 2, script);
  first.wait_for("worker0=");
  second.wait_for("worker2=");
  second.signal(SIGKILL);
  second.wait();
  first.wait_for("restart 1 of 1");
  auto replacement = start(1, 2, script);
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(replacement.wait(), 0) << replacement.err();
}

class NodesAfter : public Nodes, public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(ASignal, NodesAfter, ::testing::Values(SIGKILL, SIGTERM));

// Two launchers of three go on when one is lost, or leaves.
TEST_P(NodesAfter, AJobGoesOnWithThoseThatAreLeft) {
  const std::string script =
      "echo size=$WORLD_SIZE; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 1000";
  const std::vector<std::string> flags{"--nnodes=2:3", "--rdzv-backend=c10d",
                                       "--rdzv-endpoint=127.0.0.1:" + std::to_string(port_.port()),
                                       "--rdzv-conf=last_call_timeout=0.2", "--max-restarts=1"};
  auto first = run(1, script, flags);
  first.wait_for("waits for 2 to 3 nodes");
  auto second = run(1, script, flags);
  auto third = run(1, script, flags);
  for (auto* const one : {&first, &second, &third}) one->wait_for("size=3");
  third.signal(GetParam());
  EXPECT_EQ(third.wait(), 128 + GetParam());
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
  EXPECT_THAT(first.out(), HasSubstr("size=2\n"));
  EXPECT_THAT(second.err(),
              HasSubstr(GetParam() == SIGKILL ? "was lost: " : "left: SIGTERM ended its launcher"));
}

TEST_F(Nodes, ASignalEndsTheWholeJob) {
  const std::string script =
      "trap 'echo saved; exit 0' INT; echo worker=$$; while :; do sleep 0.01; done";
  auto first = start(0, 2, script);
  auto second = start(1, 2, script);
  first.wait_for("worker=");
  second.wait_for("worker=");
  second.signal(SIGINT);
  for (auto* const one : {&first, &second}) {
    EXPECT_EQ(one->wait(), 128 + SIGINT) << one->err();
    EXPECT_THAT(one->out(), HasSubstr("saved"));
    EXPECT_THAT(one->err(), HasSubstr("paceline: stopped by SIGINT\n"));
  }
  EXPECT_THAT(first.err(),
              HasSubstr("paceline: SIGINT came to node 1 (" + base::host_name() + ")\n"));
}

TEST_F(Nodes, ASpareNodeSaysThatItWaits) {
  const auto done = temporary_.path() / "done";
  const std::vector<std::string> flags{"--nnodes=2", "--rdzv-backend=c10d",
                                       "--rdzv-endpoint=127.0.0.1:" + std::to_string(port_.port())};
  const std::string script = "echo worker=$$; " + wait_until(done);
  auto first = run(1, script, flags);
  auto second = run(1, script, flags);
  for (auto* const one : {&first, &second}) one->wait_for("worker=");
  auto spare = run(1, script, flags);
  spare.wait_for("paceline: the job runs on 2 nodes already; this one waits for a place\n");
  std::ofstream(done).close();
  for (auto* const one : {&first, &second, &spare}) EXPECT_EQ(one->wait(), 0) << one->err();
  EXPECT_EQ(spare.out(), "");
  EXPECT_THAT(spare.err(), HasSubstr("paceline: the job has ended without this node\n"));
  std::filesystem::remove(done);
}

// Each launcher gets the signal itself and from the other: it is one signal.
TEST_F(Nodes, ASignalToAllLaunchersIsOneSignal) {
  const std::string script =
      "trap 'sleep 0.5; echo saved; exit 0' INT; echo worker=$$; while :; do sleep 0.01; done";
  auto first = start(0, 2, script);
  auto second = start(1, 2, script);
  first.wait_for("worker=");
  second.wait_for("worker=");
  first.signal(SIGINT);
  second.signal(SIGINT);
  for (auto* const one : {&first, &second}) {
    EXPECT_EQ(one->wait(), 128 + SIGINT) << one->err();
    EXPECT_THAT(one->out(), HasSubstr("saved"));
  }
}

TEST_F(Nodes, ASecondCtrlCKillsAtOnce) {
  const std::string script = "trap 'echo deaf' INT; echo worker=$$; while :; do sleep 0.01; done";
  auto first = start(0, 2, script);
  auto second = start(1, 2, script);
  first.wait_for("worker=");
  second.wait_for("worker=");
  second.signal(SIGINT);
  first.wait_for("deaf");
  second.wait_for("deaf");
  second.signal(SIGINT);
  for (auto* const one : {&first, &second}) EXPECT_EQ(one->wait(), 128 + SIGINT) << one->err();
}

TEST_F(Nodes, APreemptedJobEndsWithItsCodeOnAllNodes) {
  const std::vector<std::string> flags{"--nnodes=2", "--rdzv-backend=c10d",
                                       "--rdzv-endpoint=127.0.0.1:" + std::to_string(port_.port())};
  const std::string script = "trap 'exit 75' TERM; echo worker=$$; while :; do sleep 0.01; done";
  auto first = run(1, script, flags);
  auto second = run(1, script, flags);
  first.wait_for("worker=");
  second.wait_for("worker=");
  // A scheduler's signal comes to all launchers.
  for (auto* const one : {&first, &second}) one->signal(SIGTERM);
  for (auto* const one : {&first, &second}) EXPECT_EQ(one->wait(), 75) << one->err();
}

// A scheduler signals all launchers. Another one may have passed its signal on to these processes
// before this launcher gets its own.
TEST_F(Nodes, ASignalAfterTheEndOfItsProcessesLeavesANodesCode) {
  const std::vector<std::string> flags{"--nnodes=2", "--rdzv-backend=c10d",
                                       "--rdzv-endpoint=127.0.0.1:" + std::to_string(port_.port())};
  auto first = run(1, "trap 'exit 75' TERM; echo waits; while :; do sleep 0.01; done", flags);
  first.wait_for("waits for 2 nodes");
  auto second = run(1, "echo worker=$$; exit 75", flags);
  second.wait_for("worker=");
  const int worker = pid_after(second.out(), "worker");
  ASSERT_TRUE(eventually([&] { return test::is_gone(worker); }));
  second.signal(SIGTERM);
  EXPECT_EQ(second.wait(), 75) << second.err();
  first.signal(SIGTERM);
  EXPECT_EQ(first.wait(), 75) << first.err();
}

TEST_F(Nodes, OutputOfANodeThatHasEndedDoesNotWaitForTheOthers) {
  auto [reader, writer] = base::make_pipe();
  auto flags = endpoint();
  flags.insert(flags.end(), {"--nnodes=2", "--node-rank=1"});
  auto second =
      run(1, std::string(test::kNameGuard) + "seq 1 12000", flags, {}, {{}, std::move(writer)});
  auto first = start(0, 2, "echo ready; until [ -e $TMPDIR/go ]; do sleep 0.01; done");
  second.wait_for("guard=");
  const int guard = pid_after(second.err(), "guard");
  ASSERT_TRUE(eventually([&] { return test::is_gone(guard); }));
  EXPECT_EQ(test::read_lines(reader.get(), 12000), 12000);
  const std::filesystem::path go = temporary_.path() / "go";
  std::ofstream(go).close();
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
  std::filesystem::remove(go);
}

// A start that follows no failure has files of its own, too.
TEST_F(Nodes, ANodeMayComeLateAlsoIfFilesAreKept) {
  const std::string logs = (temporary_.path() / "logs").string();
  const std::vector<std::string> flags{"--nnodes=1:2",
                                       "--rdzv-backend=c10d",
                                       "--rdzv-endpoint=127.0.0.1:" + std::to_string(port_.port()),
                                       "--rdzv-conf=last_call_timeout=0",
                                       "--log-dir=" + logs,
                                       "-t3"};
  const std::string script = "echo size=$WORLD_SIZE; [ $WORLD_SIZE = 2 ] || exec sleep 1000";
  auto first = run(1, script, flags);
  first.wait_for("size=1");
  auto second = run(1, script, flags);
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_EQ(second.wait(), 0) << second.err();
  EXPECT_THAT(first.out(), HasSubstr("size=2"));
  EXPECT_THAT(first.err(), HasSubstr("as a node has come"));
  std::filesystem::remove_all(logs);
}

TEST_F(Nodes, ASignalEndsTheWaitForOtherNodes) {
  for (const int signal : {SIGTERM, SIGUSR1}) {
    auto first = start(0, 2, "true");
    first.wait_for("waits for 2 nodes");
    first.signal(signal);
    EXPECT_EQ(first.wait(), 128 + signal) << first.err();
    auto second = start(1, 2, "true");
    second.wait_for("looks for node 0");
    second.signal(signal);
    EXPECT_EQ(second.wait(), 128 + signal) << second.err();
  }
}

TEST_F(Nodes, OnlyNodesWithTheSecretTakePart) {
  std::ofstream(temporary_.path() / "secret") << "0123456789abcdef\n";
  const std::string file = (temporary_.path() / "secret").string();
  auto first = start(0, 2, "true", {"--secret-file", file});
  auto other = start(1, 2, "true", {}, {{"PACELINE_SECRET", "0123456789abcdeX"}});
  EXPECT_EQ(other.wait(), 1);
  EXPECT_THAT(other.err(), HasSubstr("it has another secret"));
  auto without = start(1, 2, "true");
  EXPECT_EQ(without.wait(), 1);
  EXPECT_THAT(without.err(), HasSubstr("it has another secret"));
  auto second = start(1, 2, "true", {}, {{"PACELINE_SECRET", "0123456789abcdef"}});
  EXPECT_EQ(second.wait(), 0) << second.err();
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_THAT(first.err(), Not(HasSubstr("can join")));
  std::filesystem::remove(file);
}

TEST_F(Nodes, WrongFlagsAreRefused) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases{
      {{"--nnodes=0"}, "--nnodes 0: expected a number from 1 to 4096, or MIN:MAX"},
      {{"--nnodes=4:2"}, "--nnodes 4:2: expected"},
      {{"--nnodes=two"}, "--nnodes two: expected"},
      {{"--nnodes=1:2"}, "needs --rdzv-backend c10d and --rdzv-endpoint"},
      {{"--nnodes=2", "--node-rank=2"}, "--node-rank=2 is not an integer from 0 to 1"},
      {{"--node-rank=1"}, "--node-rank=1 is not an integer from 0 to 0"},
      {{"--nnodes=2", "--rdzv-backend=c10d"}, "needs --rdzv-endpoint HOST:PORT"},
      {{"--nnodes=2", "--rdzv-backend=etcd"}, "--rdzv-backend etcd: expected static or c10d"},
      {{"--nnodes=2", "--rdzv-endpoint=host:port"}, "--rdzv-endpoint host:port: expected HOST"},
      {{"--nnodes=2", "--rdzv-endpoint=[::1]5"}, "--rdzv-endpoint [::1]5: expected HOST"},
      {{"--rdzv-endpoint=host:port"}, "--rdzv-endpoint host:port: expected HOST"},
      {{"--rdzv-conf=join_timeout"}, "'join_timeout' is not KEY=VALUE"},
      {{"--nnodes=2", "--rdzv-conf=join_timeout"}, "'join_timeout' is not KEY=VALUE"},
      {{"--nnodes=2", "--rdzv-conf=join_timeout=soon"}, "join_timeout: soon: expected 0 to"},
      {{"--nnodes=2", "--rdzv-conf=is_host=2"}, "is_host: 2: expected 0 or 1"},
      {{"--nnodes=2", "--standalone"}, "--standalone means one machine, and --nnodes 2 several"},
      {{"--nnodes=2", "--secret-file=/no/file"}, "--secret-file /no/file: cannot read it"},
      {{"--nnodes=2", "--secret-file=/"}, "--secret-file /: cannot read it: Is a directory"},
      {{"--nnodes=2", "--secret-file=/dev/zero"}, "a secret must have at most 4096 bytes"},
      {{"--rdzv-id=" + std::string(201, 'j')}, "--rdzv-id has 201 bytes; it must have at most 200"},
      {{"--rdzv-id=\xff"}, "--rdzv-id must be UTF-8 text"},
      {{"--nnodes=2", "--secret-file=/dev/null"}, "the secret has 0 bytes; expected at least 16"},
  };
  for (const auto& [flags, message] : cases) {
    auto job = run(1, "true", flags);
    EXPECT_EQ(job.wait(), 2) << message;
    EXPECT_THAT(job.err(), HasSubstr(message));
  }
  ChildProcess secret({PACELINE_COMMAND, "run", "--nnodes=2", "true"},
                      {{"PACELINE_SECRET", "short"}});
  EXPECT_EQ(secret.wait(), 2);
  EXPECT_THAT(secret.err(), HasSubstr("PACELINE_SECRET: the secret has 5 bytes"));
}

TEST_F(Nodes, SayWhichFlagsCannotApply) {
  const std::string endpoint = fmt::format("--rdzv-endpoint=127.0.0.1:{}", port_.port());
  auto dynamic = run(1, "true",
                     {"--nnodes=1:2", "--rdzv-backend=c10d", endpoint, "--node-rank=1",
                      "--master-addr=127.0.0.2", "--rdzv-conf=last_call_timeout=0,read_timeout=9"});
  EXPECT_EQ(dynamic.wait(), 0) << dynamic.err();
  EXPECT_THAT(dynamic.err(), HasSubstr("paceline: without effect here: read_timeout of "
                                       "--rdzv-conf, --node-rank, --master-addr\n"));
  auto numbered = run(1, "true",
                      {"--nnodes=2", endpoint, "--master-port=1",
                       "--rdzv-conf=join_timeout=0,last_call_timeout=9,is_host=1"});
  EXPECT_EQ(numbered.wait(), 1);
  EXPECT_THAT(numbered.err(),
              HasSubstr("paceline: without effect here: last_call_timeout of --rdzv-conf, is_host "
                        "of --rdzv-conf, --master-port\n"));
}

TEST_F(Nodes, ATakenPortIsNamed) {
  const net::Listener other(base::resolve("127.0.0.1", port_.port()).front());
  auto job = start(0, 2, "true");
  EXPECT_EQ(job.wait(), 1);
  EXPECT_THAT(job.err(), HasSubstr("EADDRINUSE); is another job using the port?"));
}

TEST_F(Nodes, AJobThatNeverFillsEnds) {
  auto job = start(0, 2, "true", {"--rdzv-conf=join_timeout=0.2"});
  EXPECT_EQ(job.wait(), 1);
  EXPECT_THAT(job.err(),
              AllOf(HasSubstr("paceline: only 1 of 2 nodes has come ("),
                    HasSubstr("), not node 1 within 0.2 s: start the same command there")));
}

}  // namespace
}  // namespace paceline
