// What `paceline doctor` makes of facts.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include <paceline/error.h>

#include "checks/checks.h"
#include "support/child_process.h"

namespace paceline::doctor {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

constexpr std::uint64_t kGibibyte = std::uint64_t{1} << 30;

bool has_check(const Group& group, const std::string& name) {
  return std::ranges::count(group.checks, name, &Check::name) > 0;
}

Check find(const Group& group, const std::string& name) {
  const auto found = std::ranges::find(group.checks, name, &Check::name);
  if (found == group.checks.end()) throw std::runtime_error(group.name + " has no " + name);
  return *found;
}

// Every warning and error says what to do.
void expect_advice(const Group& group) {
  for (const Check& check : group.checks) {
    if (check.status < Status::warning) continue;
    EXPECT_THAT(check.advice, Not(IsEmpty())) << check.name;
  }
}

VersionFacts versions(const std::string& running, const std::string& found_by) {
  return {.libtorch = running,
          .libtorch_compiled = "2.15.0",
          .library = "/opt/torch/lib/libtorch_cpu.so",
          .found_by = found_by,
          .compiler = "g++ 12",
          .glibc = "2.36",
          .kernel = "Linux 6.1"};
}

TEST(CheckVersions, AcceptsAnotherPatchVersionOfLibTorch) {
  const Check check = find(check_versions(versions("2.15.1+cpu", "RUNPATH")), "libtorch");
  EXPECT_EQ(check.status, Status::ok);
  EXPECT_THAT(check.text,
              AllOf(HasSubstr("2.15.1"), HasSubstr("/opt/torch"), HasSubstr("RUNPATH")));
}

TEST(CheckVersions, NamesTheVariableThatBringsAnotherMinorVersion) {
  const Group group = check_versions(versions("2.1.0", "LD_LIBRARY_PATH"));
  const Check check = find(group, "libtorch");
  EXPECT_EQ(check.status, Status::error);
  EXPECT_THAT(check.text, HasSubstr("compiled with 2.15.0"));
  EXPECT_THAT(check.advice, HasSubstr("LD_LIBRARY_PATH"));
  EXPECT_EQ(find(check_versions(versions("2.16.0", "RUNPATH")), "libtorch").status, Status::error);
}

// A build of one's own may leave it out.
TEST(CheckVersions, WarnsIfLibTorchDoesNotSayItsVersion) {
  const Group group = check_versions(versions("", "RUNPATH"));
  const Check check = find(group, "libtorch");
  EXPECT_EQ(check.status, Status::warning);
  EXPECT_THAT(check.text, StartsWith("in /opt/torch/lib (RUNPATH); it does not say its version"));
  expect_advice(group);
}

TEST(CheckBackends, SaysHowToGetGloo) {
  const Group group = check_backends({{"paceline", true}, {"gloo", false}});
  EXPECT_EQ(find(group, "paceline").status, Status::ok);
  EXPECT_EQ(find(group, "gloo").status, Status::note);
  EXPECT_THAT(find(group, "gloo").text, HasSubstr("libgloo-dev"));
  EXPECT_EQ(find(group, "gloo").values.at("available"), false);
}

TEST(CheckBackends, SaysWhyThereIsNoNccl) {
  const Group group = check_backends({{"nccl", false, "there is no NVIDIA driver"}});
  EXPECT_EQ(find(group, "nccl").text, "there is no NVIDIA driver");
}

// Four hyper-threads of two physical cores, on two sockets.
CoreFacts four_threads() {
  return {.online = 8,
          .affinity = {0, 1, 2, 5},
          .quota = 0,
          .cpus = {{0, 0, 0, 0}, {1, 0, 0, 0}, {2, 1, 1, 2}, {5, 1, 1, 2}},
          .available = 4};
}

TEST(CheckCores, CountsPhysicalCoresSocketsAndNodes) {
  const Group group = check_cores(four_threads());
  EXPECT_THAT(find(group, "available").text, HasSubstr("4 of 8 cores (CPU 0-2,5)"));
  EXPECT_EQ(find(group, "topology").text,
            "2 physical cores, 2 sockets, 2 NUMA nodes; 4 hyper-threads");
  EXPECT_EQ(find(group, "topology").values.at("physical_cores"), 2);
  EXPECT_THAT(find(group, "auto").text, HasSubstr("starts 4 processes, 1 thread each"));
}

TEST(CheckCores, WarnsOfASingleCore) {
  CoreFacts facts = four_threads();
  facts.quota = facts.available = 1;
  const Group group = check_cores(facts);
  EXPECT_EQ(find(group, "available").status, Status::warning);
  EXPECT_THAT(find(group, "available").text, HasSubstr("control group's CPU limit is 1"));
  EXPECT_EQ(find(group, "available").values.at("control_group_cores"), 1);
  EXPECT_THAT(find(group, "auto").text, HasSubstr("starts 1 process,"));
  expect_advice(group);
}

TEST(CheckCores, WarnsWhereAutoStartsMoreThreadsThanCores) {
  CoreFacts facts = four_threads();
  for (const char* threads : {"", "1", "1,2", "many"}) {
    facts.omp_num_threads = threads;
    EXPECT_EQ(find(check_cores(facts), "auto").status, Status::ok) << threads;
  }
  for (const char* threads : {"2", "2,1"}) {
    facts.omp_num_threads = threads;
    const Group group = check_cores(facts);
    EXPECT_EQ(find(group, "auto").status, Status::warning);
    EXPECT_THAT(find(group, "auto").text, HasSubstr("8 threads on 4 cores"));
    EXPECT_THAT(find(group, "auto").advice, HasSubstr("unset OMP_NUM_THREADS"));
    expect_advice(group);
  }
  facts.omp_num_threads = "2147483647";
  EXPECT_THAT(find(check_cores(facts), "auto").text, HasSubstr("8589934588 threads"));
}

TEST(CheckCores, WarnsWhereAutoStartsMoreRanksThanTheBackendHas) {
  CoreFacts facts = four_threads();
  facts.available = 65;
  const Group group = check_cores(facts);
  EXPECT_EQ(find(group, "auto").status, Status::warning);
  EXPECT_THAT(find(group, "auto").advice, HasSubstr("--nproc-per-node 64"));
  facts.available = 64;
  EXPECT_EQ(find(check_cores(facts), "auto").status, Status::ok);
}

MemoryFacts sixteen_gibibytes() {
  return {.total = 16 * kGibibyte,
          .available = 12 * kGibibyte,
          .mapped = kGibibyte / 2,
          .region = 32 * kGibibyte};
}

TEST(CheckMemory, IsSilentAboutLimitsThatAreNot) {
  const Group group = check_memory(sixteen_gibibytes(), {}, 2);
  EXPECT_EQ(find(group, "free").text, "12.0 GiB of 16.0 GiB available, no swap");
  EXPECT_FALSE(has_check(group, "control_group"));
  EXPECT_EQ(find(group, "shared_memory").status, Status::ok);
  EXPECT_EQ(find(group, "shared_memory").values.at("address_space_limit_bytes"), nullptr);
}

TEST(CheckMemory, DoesNotJudgeWhatItCannotRead) {
  EXPECT_EQ(find(check_memory({}, {}, 2), "free").status, Status::note);
}

TEST(CheckMemory, CountsWhatTheControlGroupLeaves) {
  MemoryFacts facts = sixteen_gibibytes();
  facts.limit = 4 * kGibibyte;
  facts.used_of_limit = 3 * kGibibyte;
  const Group roomy = check_memory(facts, {}, 8);  // 128 MiB each
  EXPECT_EQ(find(roomy, "control_group").status, Status::note);
  EXPECT_THAT(find(roomy, "control_group").text, HasSubstr("3.0 GiB of at most 4.0 GiB"));
  EXPECT_EQ(find(roomy, "free").status, Status::ok);

  const Group tight = check_memory(facts, {}, 9);
  EXPECT_EQ(find(tight, "free").status, Status::warning);
  EXPECT_THAT(find(tight, "free").text, HasSubstr("1.0 GiB can be used, but 9 ranks need 1.1 GiB"));
  expect_advice(tight);
}

TEST(CheckMemory, RefusesLimitsBelowTheSharedMemory) {
  const MemoryFacts facts = sixteen_gibibytes();
  const auto shared = [&](const Limits& limits) {
    const Group group = check_memory(facts, limits, 2);
    expect_advice(group);
    return find(group, "shared_memory");
  };
  // The address space has what the process has mapped already, too; the file does not.
  EXPECT_EQ(shared({.address_space = 32 * kGibibyte + kGibibyte / 2}).status, Status::ok);
  EXPECT_EQ(shared({.file_size = 32 * kGibibyte}).status, Status::ok);
  EXPECT_EQ(shared({.locked_memory = 0}).status, Status::ok);
  const Check space = shared({.address_space = 32 * kGibibyte});
  EXPECT_EQ(space.status, Status::error);
  EXPECT_THAT(space.text, AllOf(HasSubstr("RLIMIT_AS is 32.0 GiB"), HasSubstr("32.5 GiB")));
  EXPECT_THAT(space.advice, HasSubstr("ulimit -v"));
  const Check file = shared({.file_size = 100 << 10});
  EXPECT_EQ(file.status, Status::error);
  EXPECT_THAT(file.text, HasSubstr("RLIMIT_FSIZE is 100.0 KiB"));
  EXPECT_THAT(file.advice, HasSubstr("ulimit -f"));
}

TEST(CheckDescriptors, ComparesTheLimitWithTheRanks) {
  const auto check = [](std::uint64_t soft, std::uint64_t hard, int ranks) {
    const Group group = check_descriptors({.descriptors = soft, .descriptors_hard = hard}, ranks);
    expect_advice(group);
    return find(group, "limit");
  };
  EXPECT_EQ(check(1024, 1 << 20, 64).status, Status::ok);
  const Check low = check(256, 4096, 64);
  EXPECT_EQ(low.status, Status::error);
  EXPECT_THAT(low.text, HasSubstr("256 (at most 4096); 64 ranks need 528"));
  EXPECT_EQ(low.advice, "raise it: ulimit -n 4096");
  EXPECT_EQ(check(600, 4096, 64).status, Status::warning);
  EXPECT_THAT(check(256, 256, 64).advice, HasSubstr("administrator"));
  EXPECT_EQ(find(check_descriptors({}, 64), "limit").status, Status::ok);
}

TEST(CheckDescriptors, RanksStartWithAsManyAsTheyNeed) {
  for (const int ranks : {1, 16, 64}) {
    test::ChildProcess job({"sh", "-c",
                            fmt::format("ulimit -n {} && exec {} run --nproc-per-node {} true",
                                        needed_descriptors(ranks), PACELINE_COMMAND, ranks)});
    EXPECT_EQ(job.wait(), 0) << job.err();
  }
}

TEST(CheckKernel, SaysWhatDoesNotWorkWithout) {
  EXPECT_TRUE(std::ranges::all_of(check_kernel({}).checks, [](const Check& check) {
    return check.status == Status::ok && check.text.empty() && check.values.at("works") == true;
  }));
  KernelFacts facts;
  facts.sealed_memfd = "cannot create shared memory";
  facts.temporary_files = "cannot create /nowhere/x";
  const Group group = check_kernel(facts);
  EXPECT_EQ(find(group, "sealed_memfd").status, Status::error);
  EXPECT_THAT(find(group, "sealed_memfd").text, HasSubstr("cannot create shared memory: the back"));
  EXPECT_EQ(find(group, "temporary_files").status, Status::warning);
  EXPECT_THAT(find(group, "temporary_files").advice, HasSubstr("TMPDIR"));
  EXPECT_EQ(find(group, "futex").status, Status::ok);
  expect_advice(group);
}

TEST(CheckKernel, NamesYamaWhereSingleCopiesAreRefused) {
  KernelFacts facts;
  facts.single_copy = "process_vm_readv failed";
  EXPECT_THAT(find(check_kernel(facts), "single_copy").text, Not(HasSubstr("ptrace_scope")));
  facts.ptrace_scope = 1;
  const Check check = find(check_kernel(facts), "single_copy");
  EXPECT_EQ(check.status, Status::note);  // it works without
  EXPECT_THAT(check.text, HasSubstr("ptrace_scope is 1"));
  EXPECT_EQ(check.values.at("ptrace_scope"), 1);
}

NetworkFacts network(const std::vector<std::string>& host) {
  return {.interfaces = {{"lo", {"127.0.0.1"}, true}, {"eth0", {"10.0.0.7", "fd00::7"}, false}},
          .host_name = "node7",
          .host = {.addresses = host}};
}

TEST(CheckNetwork, WarnsOfAHostNameThatIsALoopbackAddress) {
  for (const std::string address : {"127.0.1.1", "127.0.0.1", "::1"}) {
    const Group group = check_network(network({address, "10.0.0.7"}));
    const Check check = find(group, "host_name");
    EXPECT_EQ(check.status, Status::warning) << address;
    EXPECT_THAT(check.text, HasSubstr("node7 resolves to " + address + ", a loopback address"));
    EXPECT_THAT(check.advice, AllOf(HasSubstr("MASTER_ADDR (or --master-addr) to 10.0.0.7"),
                                    HasSubstr("/etc/hosts")));
  }
}

TEST(CheckNetwork, AcceptsAHostNameThatIsAnAddressOfThisMachine) {
  EXPECT_EQ(find(check_network(network({"10.0.0.7"})), "host_name").status, Status::ok);
  EXPECT_EQ(find(check_network(network({"fd00::7", "127.0.1.1"})), "host_name").status, Status::ok);
  EXPECT_THAT(find(check_network(network({"10.0.0.7"})), "interfaces").text,
              "eth0 10.0.0.7 fd00::7");
}

TEST(CheckNetwork, WarnsOfAHostNameThatLeadsElsewhereOrNowhere) {
  EXPECT_THAT(find(check_network(network({"10.0.0.8"})), "host_name").text,
              HasSubstr("no interface here has"));
  NetworkFacts facts = network({});
  facts.host.failure = "no answer within 3 s";
  const Group group = check_network(facts);
  EXPECT_EQ(find(group, "host_name").status, Status::warning);
  EXPECT_THAT(find(group, "host_name").text, HasSubstr("no answer within 3 s"));
  expect_advice(group);
}

TEST(CheckNetwork, WithoutANetworkNobodyNeedsTheHostName) {
  NetworkFacts facts = network({"127.0.1.1"});
  facts.interfaces.pop_back();
  const Group alone = check_network(facts);
  EXPECT_EQ(find(alone, "host_name").status, Status::ok);
  EXPECT_EQ(find(alone, "interfaces").status, Status::note);
  EXPECT_EQ(find(alone, "loopback").status, Status::ok);
  facts.interfaces.clear();
  facts.host = {.failure = "unknown"};
  const Group down = check_network(facts);
  EXPECT_EQ(find(down, "loopback").status, Status::error);
  EXPECT_EQ(find(down, "host_name").status, Status::ok);
  expect_advice(down);
}

void accept(const base::Environment&) {}

VariableFacts variables(const Variables& all) {
  VariableFacts facts = read_variables(all, accept);
  facts.interfaces = {"lo", "eth0"};
  facts.cores = 4;
  return facts;
}

TEST(CheckVariables, NamesTheLauncherAndWhatItSays) {
  const auto launcher = [](const Variables& all) {
    return find(check_variables(variables(all)), "launcher");
  };
  EXPECT_THAT(launcher({}).text, HasSubstr("a world of one rank"));
  EXPECT_EQ(launcher({}).values.at("name"), nullptr);
  const Check slurm = launcher({{"SLURM_STEP_ID", "0"},
                                {"SLURM_STEP_NUM_TASKS", "4"},
                                {"SLURM_PROCID", "1"},
                                {"SLURM_LOCALID", "1"}});
  EXPECT_EQ(slurm.text, "srun (SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=4): rank 1 of 4");
  EXPECT_EQ(slurm.values.at("name"), "srun");
  const Variables torchrun{{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"TORCHELASTIC_RUN_ID", "x"}};
  EXPECT_EQ(launcher(torchrun).text, "torchrun (TORCHELASTIC_RUN_ID): rank 2 of 3");
  EXPECT_EQ(launcher({{"RANK", "2"}, {"WORLD_SIZE", "3"}}).text,
            "not known (RANK, WORLD_SIZE): rank 2 of 3");
}

TEST(CheckVariables, ReportsThoseThatContradictEachOther) {
  const Group group = check_variables(variables({{"RANK", "4"}, {"WORLD_SIZE", "4"}}));
  EXPECT_EQ(find(group, "launcher").status, Status::error);
  EXPECT_THAT(find(group, "launcher").text, HasSubstr("RANK=4 is not less than WORLD_SIZE=4"));
  expect_advice(group);
}

TEST(CheckVariables, ReportsWhatInitProcessGroupWouldThrow) {
  const auto facts =
      read_variables({}, [](const base::Environment&) { throw paceline::UsageError("why"); });
  EXPECT_EQ(find(check_variables(facts), "launcher").status, Status::error);
  EXPECT_EQ(find(check_variables(facts), "launcher").text, "why");
}

TEST(CheckVariables, NamesDescriptorsThatAreNotOpen) {
  const Group group = check_variables(
      variables({{"PACELINE_STORE_FD", "987654"}, {"PACELINE_BOOTSTRAP_SOCKETS", "0,987655"}}));
  const Check check = find(group, "inherited");
  EXPECT_EQ(check.status, Status::error);
  EXPECT_THAT(check.text,
              HasSubstr("PACELINE_STORE_FD=987654, PACELINE_BOOTSTRAP_SOCKETS=987655:"));
  expect_advice(group);
  EXPECT_FALSE(has_check(check_variables(variables({{"PACELINE_STORE_FD", "0"}})), "inherited"));
}

TEST(CheckVariables, WarnsOfMoreThreadsThanCores) {
  const auto group = [](const std::string& threads) {
    return check_variables(variables({{"OMP_NUM_THREADS", threads}}));
  };
  EXPECT_FALSE(has_check(group("4"), "omp_num_threads"));
  EXPECT_FALSE(has_check(group("4,2"), "omp_num_threads"));
  EXPECT_THAT(find(group("5"), "omp_num_threads").text, HasSubstr("OMP_NUM_THREADS=5 on 4 cores"));
  for (const std::string bad : {"0", "-1", "two", "4x"}) {
    EXPECT_EQ(find(group(bad), "omp_num_threads").status, Status::warning) << bad;
    expect_advice(group(bad));
  }
}

TEST(CheckVariables, NamesAnInterfaceOfGlooThatIsNotUp) {
  const auto group = [](const std::string& names) {
    return check_variables(variables({{"GLOO_SOCKET_IFNAME", names}}));
  };
  EXPECT_FALSE(has_check(group("eth0,lo"), "gloo_interface"));
  const Check check = find(group("eth0,ib0"), "gloo_interface");
  EXPECT_EQ(check.status, Status::error);
  EXPECT_THAT(check.text, HasSubstr("no interface 'ib0'"));
  EXPECT_THAT(check.advice, HasSubstr("lo, eth0"));
}

TEST(CheckVariables, RefusesALoopbackAddressForSeveralMachines) {
  const auto group = [](const std::string& size, const std::string& local, Resolution master) {
    VariableFacts facts = variables({{"RANK", "0"},
                                     {"WORLD_SIZE", size},
                                     {"LOCAL_WORLD_SIZE", local},
                                     {"MASTER_ADDR", "node7"}});
    facts.master = std::move(master);
    return check_variables(facts);
  };
  const Resolution loopback{.addresses = {"127.0.1.1"}};
  EXPECT_EQ(find(group("4", "2", loopback), "master_addr").status, Status::error);
  EXPECT_EQ(find(group("4", "", loopback), "master_addr").status, Status::note);
  EXPECT_FALSE(has_check(group("4", "4", loopback), "master_addr"));
  EXPECT_FALSE(has_check(group("4", "2", {.addresses = {"10.0.0.7"}}), "master_addr"));
  const Group unknown = group("4", "4", {.failure = "Name or service not known"});
  EXPECT_THAT(find(unknown, "master_addr").text, HasSubstr("Name or service not known"));
  expect_advice(unknown);
  VariableFacts slurm = variables({{"SLURM_JOB_ID", "7"},
                                   {"SLURM_STEP_ID", "0"},
                                   {"SLURM_STEP_NUM_TASKS", "2"},
                                   {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                                   {"SLURM_STEP_NODELIST", "node[7-8]"},
                                   {"SLURM_PROCID", "0"},
                                   {"SLURM_LOCALID", "0"},
                                   {"SLURM_NODEID", "0"}});
  slurm.master = loopback;
  const Check check = find(check_variables(slurm), "master_addr");
  EXPECT_EQ(check.status, Status::error);
  EXPECT_THAT(check.text, HasSubstr("node7, rank 0's host by srun, is 127.0.1.1, a loopback"));
  EXPECT_THAT(check.advice, HasSubstr("give node7 this address in /etc/hosts"));
}

TEST(CheckSelfTest, GivesTimesOrTheError) {
  const Check passed = check_self_test({.backend = "gloo", .times = Times{12.3, 104.2}});
  EXPECT_EQ(passed.name, "gloo");
  EXPECT_EQ(passed.text, "two ranks met in 12 ms; an all_reduce of 4 bytes takes 104 us");
  EXPECT_EQ(passed.values.at("all_reduce_us"), 104.2);
  const Check failed = check_self_test({.backend = "gloo", .error = "rank 1: why"});
  EXPECT_EQ(failed.status, Status::error);
  EXPECT_EQ(failed.text, "rank 1: why");
  EXPECT_EQ(failed.values.at("passed"), false);
}

}  // namespace
}  // namespace paceline::doctor
