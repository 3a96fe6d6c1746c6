// The real `paceline` with small shell programs as workers: torchrun's flags and variables.
#include <gmock/gmock.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "launcher.h"
#include "support/rank_here.h"

namespace paceline {
namespace {

using test::ChildProcess;
using test::Launcher;
using test::rank_here;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(Launcher, ReadsTorchrunsVariables) {
  const Environment variables{{"PET_NPROC_PER_NODE", "2"}, {"PET_NNODES", "1:1"},
                              {"PET_ROLE", "trainer"},     {"PET_RDZV_ID", "job 7"},
                              {"PET_STANDALONE", "1"},     {"PET_NO_PYTHON", "0"}};
  const std::string show = "echo $ROLE_NAME, $TORCHELASTIC_RUN_ID, $WORLD_SIZE";
  ChildProcess job({PACELINE_COMMAND, "run", "sh", "-c", show}, variables);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[rank1]: trainer, job 7, 2\n"));
  ChildProcess given(
      {PACELINE_COMMAND, "run", "--nproc_per_node=1", "--role", "b", "sh", "-c", show}, variables);
  EXPECT_EQ(given.wait(), 0) << given.err();
  EXPECT_EQ(given.out(), "[rank0]: b, job 7, 1\n");
  ChildProcess wrong({PACELINE_COMMAND, "run", "true"}, {{"PET_STANDALONE", "yes"}});
  EXPECT_EQ(wrong.wait(), 2);
  EXPECT_THAT(wrong.err(), HasSubstr("PET_STANDALONE=yes: expected 0 or 1"));
  ChildProcess nodes({PACELINE_COMMAND, "run", "true"}, {{"PET_NNODES", "many"}});
  EXPECT_EQ(nodes.wait(), 2);
  EXPECT_THAT(nodes.err(), HasSubstr("or MIN:MAX, such as 2:4 (from PET_NNODES)"));
  ChildProcess tee({PACELINE_COMMAND, "run", "true"}, {{"PET_TEE", "5"}});
  EXPECT_EQ(tee.wait(), 2);
  EXPECT_THAT(tee.err(), HasSubstr("as in 0:1,1:3 (from PET_TEE)"));
  ChildProcess port({PACELINE_COMMAND, "run", "true"}, {{"PET_MASTER_PORT", "x"}});
  EXPECT_EQ(port.wait(), 2);
  EXPECT_THAT(port.err(), HasSubstr("from 1 to 65535 (from PET_MASTER_PORT)"));
  ChildProcess interval({PACELINE_COMMAND, "run", "true"}, {{"PET_MONITOR_INTERVAL", "x"}});
  EXPECT_EQ(interval.wait(), 2);
  EXPECT_THAT(interval.err(), HasSubstr("seconds (from PET_MONITOR_INTERVAL)"));
  ChildProcess timeout({PACELINE_COMMAND, "run", "true"},
                       {{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "x"}});
  EXPECT_EQ(timeout.wait(), 2);
  EXPECT_THAT(timeout.err(), HasSubstr("seconds (from TORCH_ELASTIC_SHUTDOWN_TIMEOUT)"));
}

TEST_F(Launcher, CountsTheGpusToUse) {
  for (const auto& [visible, ranks] :
       {std::pair{"0", 1}, {"0,GPU-1,2", 3}, {"1,-1,2", 1}, {"-1", 0}}) {
    ChildProcess job(
        {PACELINE_COMMAND, "run", "--nproc-per-node", "gpu", "sh", "-c", "echo rank=1"},
        {{"CUDA_VISIBLE_DEVICES", visible}});
    EXPECT_EQ(job.wait(), ranks == 0 ? 2 : 0) << visible;
    EXPECT_EQ(test::pids_after(job.out(), "rank").size(), static_cast<std::size_t>(ranks));
    EXPECT_EQ(job.err().find("there is no NVIDIA GPU here") != std::string::npos, ranks == 0);
  }
}

TEST_F(Launcher, StartsPythonAsTorchrunDoes) {
  const test::TemporaryDirectory directory;
  const auto script = directory.path() / "train.py";
  std::ofstream(script) << "#!/bin/sh\nimport sys; print('python', *sys.argv[1:], "
                           "sys.stdout.write_through)\n";
  auto plain = paceline({"run", script.string(), "-m", "5"});
  EXPECT_EQ(plain.wait(), 0) << plain.err();
  EXPECT_EQ(plain.out(), "[rank0]: python -m 5 True\n");
  auto module = paceline({"run", "-m", "json.tool", "--help"});
  EXPECT_EQ(module.wait(), 0) << module.err();
  EXPECT_THAT(module.out(), HasSubstr("json"));
  std::ofstream(script) << "#!/bin/sh\necho shell $1\n";
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  auto direct = paceline({"run", "--no-python", script.string(), "6"});
  EXPECT_EQ(direct.wait(), 0) << direct.err();
  EXPECT_EQ(direct.out(), "[rank0]: shell 6\n");
  ChildProcess chosen({PACELINE_COMMAND, "run", script.string()}, {{"PYTHON_EXEC", "echo"}});
  EXPECT_EQ(chosen.wait(), 0) << chosen.err();
  EXPECT_EQ(chosen.out(), "[rank0]: -u " + script.string() + "\n");
}

TEST_F(Launcher, RunsAScriptByItsPath) {
  const test::TemporaryDirectory directory;
  const auto script = directory.path() / "train";  // not by its name
  std::ofstream(script) << "import sys\nif __name__ == '__main__': print(sys.argv, __file__)\n";
  const std::string path = script.string();
  auto job = paceline({"run", "--run-path", "--no-python", path, "-m", "5"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.out(), "[rank0]: ['" + path + "', '-m', '5'] " + path + "\n");
  std::ofstream(script) << "raise SystemExit(4)\n";
  auto failing = paceline({"run", "--run_path", path});
  EXPECT_EQ(failing.wait(), 4) << failing.err();
}

TEST_F(Launcher, PrefixesLinesByATemplate) {
  const std::vector<std::string> flags{"--role=trainer", "--log-line-prefix-template",
                                       "[${role_name}$local_rank/${rank}]$$${nope}$rank_x$ $1"};
  auto given = run(2, "echo out; echo err >&2", flags, {{"PET_LOG_LINE_PREFIX_TEMPLATE", "no"}});
  EXPECT_EQ(given.wait(), 0) << given.err();
  EXPECT_THAT(given.out(), HasSubstr("[trainer0/0]$${nope}$rank_x$ $1out\n"));
  EXPECT_THAT(given.out(), HasSubstr("[trainer1/1]$${nope}$rank_x$ $1out\n"));
  EXPECT_THAT(given.err(), HasSubstr("[trainer1/1]$${nope}$rank_x$ $1err\n"));
  const Environment variables{{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[x]"}};
  auto torchruns = run(1, "echo out", {}, variables);
  EXPECT_EQ(torchruns.wait(), 0);
  EXPECT_EQ(torchruns.out(), "[x]out\n");
  auto empty = run(1, "echo out", {"--log-line-prefix-template="}, variables);
  EXPECT_EQ(empty.wait(), 0);
  EXPECT_EQ(empty.out(), "[x]out\n");
  auto bracketed = run(1, "echo out", {"--log-line-prefix-template=[a,b]"});
  EXPECT_EQ(bracketed.wait(), 0) << bracketed.err();
  EXPECT_EQ(bracketed.out(), "[a,b]out\n");
}

// torchrun takes these for the default, except for the role, which is empty then, and for the
// signals, of which there are none.
TEST_F(Launcher, TakesEmptyValuesAsTorchrunDoes) {
  auto job = run(2, "echo $ROLE_NAME.$MASTER_ADDR.$TORCHELASTIC_SIGNALS_TO_HANDLE.$RANK",
                 {"--role=", "--master-addr=", "--signals-to-handle=", "--local_ranks_filter=",
                  "--rdzv-endpoint=", "--rdzv_conf=", "--local-addr=", "--rdzv-id=", "--log-dir=",
                  "--log-line-prefix-template", ""});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[rank0]: .127.0.0.1..0\n"));
  EXPECT_THAT(job.out(), HasSubstr("[rank1]: .127.0.0.1..1\n"));
  auto unhandled = run(1, "echo worker=$$; exec sleep 1000", {"--signals-to-handle="});
  unhandled.wait_for("worker=");
  const pid_t worker = test::pid_after(unhandled.out(), "worker");
  unhandled.signal(SIGTERM);
  EXPECT_EQ(unhandled.wait(), 128 + SIGTERM);
  EXPECT_TRUE(test::eventually([&] { return test::is_gone(worker); }));
}

TEST_F(Launcher, TakesTheLastOfSeveralValues) {
  auto job = run(1, "echo $ROLE_NAME",
                 {"--role=a", "-r", "1", "--role", "b", "--redirects=0", "--rdzv-conf=a=1",
                  "--rdzv_conf=b=2"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.out(), "[rank0]: b\n");
}

TEST_F(Launcher, VirtualLocalRanksAreZero) {
  auto job = run(2, "echo $RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES", {},
                 {{"PET_VIRTUAL_LOCAL_RANK", "1"}, {"CUDA_VISIBLE_DEVICES", "3,7"}});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[rank0]: 0 0 3\n"));
  EXPECT_THAT(job.out(), HasSubstr("[rank1]: 1 0 7\n"));
  auto few = run(2, "true", {"--virtual-local-rank"}, {{"CUDA_VISIBLE_DEVICES", "3"}});
  EXPECT_EQ(few.wait(), 2);
  EXPECT_THAT(few.err(), HasSubstr("CUDA_VISIBLE_DEVICES=3 names no device for local rank 1"));
}

TEST_F(Launcher, StartsAllProcessesAgainAfterAFailure) {
  auto survived = run(2,
                      "echo start=$TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS; "
                      "[ $RANK = 0 ] || [ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 3",
                      {"--max-restarts", "4"});
  EXPECT_EQ(survived.wait(), 0) << survived.err();
  EXPECT_THAT(survived.out(), HasSubstr("[rank0]: start=0/4\n"));
  EXPECT_THAT(survived.out(), HasSubstr("[rank0]: start=2/4\n"));
  EXPECT_THAT(survived.out(), HasSubstr("[rank1]: start=2/4\n"));
  EXPECT_THAT(survived.out(), Not(HasSubstr("start=3/4")));
  EXPECT_THAT(survived.err(), HasSubstr(rank_here(1) + " failed first: exited with code 3"));
  EXPECT_THAT(survived.err(), HasSubstr("paceline: starts all processes again, restart 2 of 4\n"));

  auto lost = run(1, "echo start; exit 3", {"--max-restarts=1"});
  EXPECT_EQ(lost.wait(), 3);
  EXPECT_EQ(lost.out(), "[rank0]: start\n[rank0]: start\n");
  // Programs name their checkpoints by it.
  auto id = run(1, "echo $TORCHELASTIC_RUN_ID; exit 3", {"--max-restarts=1"});
  EXPECT_EQ(id.wait(), 3);
  EXPECT_EQ(id.out().substr(0, id.out().size() / 2), id.out().substr(id.out().size() / 2));
}

TEST_F(Launcher, DoesNotStartAgainAfterASignal) {
  auto job = run(1, "echo worker=$$; while :; do sleep 0.01; done", {"--max-restarts", "9"});
  job.wait_for("worker=");
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM);
  EXPECT_THAT(job.err(), Not(HasSubstr("restart")));
}

TEST_F(Launcher, PassesOnTheSignalsToHandle) {
  auto job = run(1, "trap 'echo saved; exit 0' USR1; echo worker=$$; while :; do sleep 0.01; done",
                 {"--signals-to-handle", "SIGTERM,SIGUSR1"});
  job.wait_for("worker=");
  job.signal(SIGUSR1);
  EXPECT_EQ(job.wait(), 128 + SIGUSR1);
  EXPECT_THAT(job.out(), HasSubstr("saved"));
}

TEST_F(Launcher, PassesOnSigusr1InAnyCase) {
  auto job = run(2, "trap 'exit 75' USR1; echo ready; while :; do sleep 0.01; done",
                 {"--signals-to-handle=SIGTERM", "--max-restarts=1"});
  for (const char* line : {"[rank0]: ready", "[rank1]: ready"}) job.wait_for(line);
  job.signal(SIGUSR1);
  EXPECT_EQ(job.wait(), 75);
  EXPECT_THAT(job.err(), HasSubstr("paceline: preempted: "));
}

TEST_F(Launcher, CountsAProcessThatWasPreemptedAsNoFailure) {
  auto job = run(2, "exit $((RANK * 75))", {"--max-restarts=1"});
  EXPECT_EQ(job.wait(), 75);
  EXPECT_THAT(job.err(), AllOf(HasSubstr("paceline: preempted: "), Not(HasSubstr("restart 1"))));
}

TEST_F(Launcher, ShowsOnlyTheOutputOfTheFilteredRanks) {
  auto job = run(4, "echo out; echo err >&2", {"--local_ranks_filter=1,3"});
  EXPECT_EQ(job.wait(), 0);
  for (const std::string& text : {job.out(), job.err()}) {
    EXPECT_THAT(text, HasSubstr("[rank1]: "));
    EXPECT_THAT(text, HasSubstr("[rank3]: "));
    EXPECT_THAT(text, Not(HasSubstr("[rank0]: ")));
    EXPECT_THAT(text, Not(HasSubstr("[rank2]: ")));
  }
}

TEST_F(Launcher, SaysWhichFlagsCannotApply) {
  const std::string logs = (temporary_.path() / "logs").string();
  auto job = run(1, "true",
                 {"--rdzv-backend=c10d", "--monitor_interval=5", "-t0:1,4:1", "--log-dir=" + logs});
  EXPECT_EQ(job.wait(), 0);
  EXPECT_THAT(job.err(), HasSubstr("paceline: without effect here: --monitor-interval, "
                                   "--rdzv-backend, rank 4 of --tee\n"));
  auto by_variables = run(1, "true", {}, {{"PET_NODE_RANK", "3"}, {"PET_RDZV_BACKEND", "c10d"}});
  EXPECT_EQ(by_variables.wait(), 0) << by_variables.err();
  EXPECT_THAT(by_variables.err(),
              HasSubstr("paceline: without effect here: PET_RDZV_BACKEND, PET_NODE_RANK\n"));
  auto odd = run(1, "true", {"--standalone", "--rdzv-endpoint=a:b", "--rdzv-conf=is_host=Yes"});
  EXPECT_EQ(odd.wait(), 0) << odd.err();
  std::filesystem::remove_all(logs);
}

}  // namespace
}  // namespace paceline
