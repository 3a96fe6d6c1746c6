// Jobs on several machines: the real `paceline`, and a program that trains over Gloo.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>

#include <chrono>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>

#include "launchers/mpirun.h"
#include "launchers/several_machines.h"
#include "launchers/trained.h"
#include "support/temporary_directory.h"

namespace paceline {
namespace {

using test::ChildProcess;
using test::Machines;
using test::SeveralMachines;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr const char* kWaits = "echo rank=$RANK; exec sleep 1000";

TEST_F(SeveralMachines, TrainToTheResultOfOneProcess) {
  for (const auto& [count, ranks] : {std::pair{2, 1}, {2, 3}, {3, 2}, {4, 4}}) {
    const Machines machines(count);
    auto launchers = start(machines, count, ranks, {TRAIN_PROGRAM, "gloo"});
    for (auto& launcher : launchers) EXPECT_EQ(launcher.wait(), 0) << launcher.err();
    test::expect_trained(launchers.front().out(), count * ranks);
  }
}

TEST_F(SeveralMachines, NameTheOneThatCannotBeReached) {
  const Machines machines(3);
  auto launchers = start(machines, 3, 2, {"sh", "-c", kWaits});
  for (std::size_t i = 0; i < launchers.size(); ++i) {
    launchers[i].wait_for(fmt::format("rank={}", 2 * i));
  }
  const auto begin = std::chrono::steady_clock::now();
  machines.cut(1);
  for (const std::size_t other : {0, 2}) {
    EXPECT_EQ(launchers[other].wait(), 1) << launchers[other].err();
    EXPECT_THAT(
        launchers[other].err(),
        AllOf(HasSubstr("paceline: node 1 (machine1), ranks 2 to 3: was lost: its machine has "
                        "not answered for 8 s\n"),
              HasSubstr("stopped by SIGTERM")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
  EXPECT_EQ(launchers[1].wait(), 1) << launchers[1].err();
  EXPECT_THAT(launchers[1].err(), HasSubstr("lost the launcher of node 0 at 10.0.0.1:29500"));
}

class SeveralMachinesLoseOne : public SeveralMachines,
                               public ::testing::WithParamInterface<std::string> {};
INSTANTIATE_TEST_SUITE_P(, SeveralMachinesLoseOne, ::testing::Values("killed", "cut"),
                         [](const auto& one) { return one.param; });

// The last machine's launcher is killed, or its link is cut; the others train on without it.
TEST_P(SeveralMachinesLoseOne, TrainOnWithThoseThatAreLeft) {
  const Machines machines(3);
  const std::string script =
      fmt::format("{} ; exec {} gloo",
                  "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then echo rank=$RANK; "
                  "exec sleep 1000; fi",
                  TRAIN_PROGRAM);
  auto launchers =
      start(machines, 3, 2, {"sh", "-c", script},
            {"--nnodes=2:3", "--rdzv-backend=c10d", "--rdzv-endpoint=" + Machines::address(0),
             "--max-restarts=1", "--rdzv-conf=last_call_timeout=1"});
  for (auto& launcher : launchers) launcher.wait_for("rank=");
  if (GetParam() == "cut") {
    machines.cut(2);
    EXPECT_EQ(launchers[2].wait(), 1) << launchers[2].err();
  } else {
    launchers[2].signal(SIGKILL);
    launchers[2].wait();
  }
  for (const std::size_t other : {0, 1}) {
    EXPECT_EQ(launchers[other].wait(), 0) << launchers[other].err();
    EXPECT_THAT(launchers[other].err(), HasSubstr("(machine2), ranks "));
  }
  test::expect_trained(launchers[0].out(), 4);
  EXPECT_EQ(machines.left_behind(), "");
}

// A machine that may bind any address, as with keepalived, is not node 0 for that. Node 0 is the
// one with the address, also if that is its second one.
TEST_F(SeveralMachines, FindNodeZeroByItsAddress) {
  const Machines machines(2);
  std::deque<ChildProcess> launchers;
  for (const int machine : {1, 0}) {
    const std::string command = fmt::format(
        "{}; exec {} run --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=10.0.0.99 "
        "--rdzv-conf=join_timeout=30 --nproc-per-node=1 sh -c 'echo $RANK'",
        machine == 0 ? "ip addr add 10.0.0.99/24 dev eth0"
                     : "echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind",
        PACELINE_COMMAND);
    launchers.emplace_back(machines.on(machine, {"sh", "-c", command}));
  }
  for (auto& launcher : launchers) EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  EXPECT_THAT(launchers[1].out(), HasSubstr("rank0"));
  EXPECT_THAT(launchers[1].err(), HasSubstr("waits for 2 nodes at 10.0.0.99:29400;"));
}

// Debian writes a machine's own name as 127.0.1.1 into its /etc/hosts.
TEST_F(SeveralMachines, NeedANameThatIsNotTheLoopback) {
  const Machines machines(1);
  const auto command = [&](const std::string& program) {
    return machines.on(0, {"sh", "-c",
                           "echo 127.0.1.1 node1 > hosts.$$; mount --bind hosts.$$ /etc/hosts; "
                           "rm hosts.$$; exec " +
                               program});
  };
  ChildProcess task(command(fmt::format("{} gloo", TRAIN_PROGRAM)),
                    {{"SLURM_JOB_ID", "1"},
                     {"SLURM_STEP_ID", "0"},
                     {"SLURM_PROCID", "0"},
                     {"SLURM_LOCALID", "0"},
                     {"SLURM_NODEID", "0"},
                     {"SLURM_STEP_NUM_TASKS", "2"},
                     {"SLURM_STEP_NUM_NODES", "2"},
                     {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                     {"SLURM_STEP_NODELIST", "node[1-2]"}});
  ChildProcess launcher(command(
      fmt::format("{} run --nnodes=2 --node-rank=0 --master-addr=node1 true", PACELINE_COMMAND)));
  for (ChildProcess* const one : {&task, &launcher}) {
    EXPECT_NE(one->wait(), 0);
    EXPECT_THAT(one->err(), HasSubstr("node1 resolves to 127.0.1.1 on this machine (/etc/hosts), "
                                      "where other machines cannot reach it"));
  }
}

// As a cluster that makes a machine's name known only once the machine runs.
TEST_F(SeveralMachines, WaitForTheNameOfNodeZero) {
  const std::string launcher = PACELINE_COMMAND + std::string(" run --nnodes=2 ");
  const std::string trains = fmt::format(" {} gloo", TRAIN_PROGRAM);
  const std::map<std::string, std::string> starts{
      {"waiting for an address",
       "exec " + launcher + "--node-rank=$NODE --master-addr=train-0.train" + trains},
      {"); waiting for an address",
       "exec " + launcher + "--rdzv-backend=c10d --rdzv-endpoint=train-0.train" + trains},
      {"trying again for",
       "RANK=$NODE WORLD_SIZE=2 MASTER_ADDR=train-0.train MASTER_PORT=29500 exec" + trains}};
  for (const auto& [waits, start] : starts) {
    const Machines machines(2);
    const test::TemporaryDirectory directory;
    const std::string hosts = directory.path() / "hosts";
    std::ofstream(hosts) << "127.0.0.1 localhost\n";
    std::deque<ChildProcess> nodes;
    for (const int node : {0, 1}) {
      nodes.emplace_back(machines.on(
          node,
          {"sh", "-c",
           fmt::format("mount --bind {} /etc/hosts; export NODE={}; {}", hosts, node, start)}));
    }
    nodes[0].wait_for(waits);
    std::ofstream(hosts, std::ios::app) << Machines::address(0) << " train-0.train\n";
    for (auto& node : nodes) EXPECT_EQ(node.wait(), 0) << node.err();
    test::expect_trained(nodes[0].out(), 2);
  }
}

// MPI starts processes on another machine by a command such as ssh: AGENT HOST COMMAND...
class MpisMachines : public SeveralMachines, public ::testing::WithParamInterface<const char*> {
 protected:
  // Starts two ranks on each of two machines, by default of a program that forms a world of their
  // communicator.
  static ChildProcess form_world(const Machines& machines,
                                 const test::TemporaryDirectory& directory,
                                 test::Variables variables = {},
                                 std::vector<std::string> program = {test::mpi_program(GetParam()),
                                                                     "world"}) {
    const std::string agent = directory.path() / "agent";
    std::ofstream script(agent);
    script << "#!/bin/sh\n[ \"$1\" = -x ] && shift\nhost=$1\nshift\ncase $host in\n";
    for (const int machine : {0, 1}) {
      script << fmt::format("{}) exec", Machines::address(machine));
      for (const std::string& word : machines.on(machine, {"sh", "-c"})) {
        script << fmt::format(" '{}'", word);
      }
      script << " \"$*\" ;;\n";
    }
    script << "esac\n";
    script.close();
    std::filesystem::permissions(agent, std::filesystem::perms::owner_all);
    const std::string hosts = fmt::format("{0}{2},{1}{2}", Machines::address(0),
                                          Machines::address(1), is_openmpi() ? ":2" : "");
    auto command = test::mpirun(mpirun(), is_openmpi());
    const std::vector<std::string> options =
        is_openmpi() ? std::vector<std::string>{"--mca", "plm_rsh_agent", agent, "--host", hosts}
                     : std::vector<std::string>{"-launcher", "ssh", "-launcher-exec", agent,
                                                "-hosts",    hosts, "-ppn",           "2"};
    command.insert(command.end(), options.begin(), options.end());
    command.insert(command.end(), {"-n", "4"});
    command.insert(command.end(), program.begin(), program.end());
    variables.insert(variables.end(), test::kAllowRoot.begin(), test::kAllowRoot.end());
    variables.emplace_back("PRTE_MCA_plm_ssh_agent", agent);  // as Open MPI 5 calls it
    return ChildProcess(machines.on(0, command), variables);
  }
  // Gives machine 0 an interface docker0, whose other end is up or down.
  static void add_to_first(const Machines& machines, const std::string& other_end) {
    const std::string script = fmt::format(
        "ip link add docker0 type veth peer name container && ip link set container {} && "
        "ip link set docker0 up && ip addr add 172.17.0.1/16 dev docker0",
        other_end);
    ChildProcess ip(machines.on(0, {"sh", "-c", script}));
    ASSERT_EQ(ip.wait(), 0) << ip.err();
  }
  static std::string mpirun() { return std::string("/usr/bin/mpirun.") + GetParam(); }
  static bool is_openmpi() { return GetParam() == std::string("openmpi"); }

  void SetUp() override {
    SeveralMachines::SetUp();
    if (const auto reason = test::why_no_mpi_program(GetParam()); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
  }
};

TEST_P(MpisMachines, NeedNoAddress) {
  const test::TemporaryDirectory directory;
  const Machines machines(2);
  add_to_first(machines, "down");  // as Docker's without containers
  for (const char* const master : {"", "localhost", "no.such.host.invalid"}) {
    auto world = form_world(machines, directory, {{"MASTER_ADDR", master}});
    EXPECT_EQ(world.wait(), 0) << world.err();
  }
}

TEST_P(MpisMachines, NeedToKnowWhichNetworkOfSeveral) {
  const test::TemporaryDirectory directory;
  const Machines machines(2);
  add_to_first(machines, "up");
  auto unknown = form_world(machines, directory);
  EXPECT_NE(unknown.wait(), 0);
  EXPECT_THAT(unknown.err(),
              HasSubstr("rank 0 does not know by which address the other machines reach machine0: "
                        "its name resolves to none of its addresses in a network, and it has "
                        "10.0.0.1 and 172.17.0.1. Set MASTER_ADDR to the right one"));
  auto known = form_world(machines, directory, {{"MASTER_ADDR", Machines::address(0)}});
  EXPECT_EQ(known.wait(), 0) << known.err();
}

TEST_P(MpisMachines, TrainOverMpi) {
  const test::TemporaryDirectory directory;
  const Machines machines(2);
  const auto train_over = [&](const char* backend) {
    auto ranks = form_world(
        machines, directory,
        {{"MASTER_ADDR", Machines::address(0)}, {"MASTER_PORT", "29500"}, {"OMP_NUM_THREADS", "1"}},
        {TRAIN_PROGRAM, backend});
    EXPECT_EQ(ranks.wait(), 0) << ranks.err();
    test::expect_trained(ranks.out(), 4);
    return test::bits_in(ranks.out());
  };
  train_over("mpi");
  ChildProcess one_machine({PACELINE_COMMAND, "run", "--nproc-per-node=4", TRAIN_PROGRAM},
                           {{"OMP_NUM_THREADS", "1"}});
  EXPECT_EQ(one_machine.wait(), 0) << one_machine.err();
  const auto expected = test::bits_in(one_machine.out());
  EXPECT_THAT(expected, SizeIs(4));
  EXPECT_EQ(train_over("paceline over mpi"), expected);
}

INSTANTIATE_TEST_SUITE_P(Of, MpisMachines, ::testing::Values("mpich", "openmpi"),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace paceline
