// The real `paceline` with small shell programs as workers: its flags and their mistakes.
#include <fcntl.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <utility>

#include "base/unique_fd.h"
#include "launcher.h"

namespace paceline {
namespace {

using test::ChildProcess;
using test::Launcher;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST_F(Launcher, AcceptsDashesAndUnderscoresAndPassesTheProgramsFlags) {
  ChildProcess job({PACELINE_COMMAND, "run", "--nproc_per_node=2", "--pass_local_rank", "echo",
                    "--nproc-per-node", "9"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[rank0]: --nproc-per-node 9 --local_rank=0\n"));
  EXPECT_THAT(job.out(), HasSubstr("[rank1]: --nproc-per-node 9 --local_rank=1\n"));
}

TEST_F(Launcher, NamesAProgramThatCannotBeStarted) {
  const test::TemporaryDirectory directory;
  const auto script = directory.path() / "script";
  std::ofstream(script) << "#!/no/such/interpreter\n";
  auto plain = paceline({"run", script.string()});
  EXPECT_EQ(plain.wait(), 126);
  EXPECT_THAT(plain.err(), HasSubstr("script is not executable"));
  auto missing = paceline({"run", "--nproc-per-node", "2", "no-such-program"});
  EXPECT_EQ(missing.wait(), 127);
  EXPECT_EQ(missing.err(), "paceline run: program 'no-such-program' not found on PATH\n");

  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  auto broken = paceline({"run", script.string()});
  EXPECT_EQ(broken.wait(), 127);
  EXPECT_THAT(broken.err(), HasSubstr("interpreter that its first line names may be missing"));
  std::ofstream(script) << "echo no first line\n";
  auto no_program = paceline({"run", script.string()});
  EXPECT_EQ(no_program.wait(), 126);
  EXPECT_THAT(no_program.err(), HasSubstr("a script needs a first line such as #!/bin/sh"));
}

TEST_F(Launcher, SaysThatItsHelpCannotBeWritten) {
  for (const char* const flag : {"--help", "--version"}) {
    base::UniqueFd full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
    ChildProcess job({PACELINE_COMMAND, flag}, {}, {base::UniqueFd(), std::move(full)});
    EXPECT_EQ(job.wait(), 1);
    EXPECT_THAT(job.err(), StartsWith("paceline: cannot write to standard output: No space left"));
  }
}

TEST_F(Launcher, NamesALogDirectoryWithoutACurrentOne) {
  ChildProcess job({"sh", "-c",
                    "mkdir $TMPDIR/gone && cd $TMPDIR/gone && rmdir $TMPDIR/gone && "
                    "exec \"$0\" run --log-dir logs true",
                    PACELINE_COMMAND},
                   {{"TMPDIR", temporary_.path().string()}});
  EXPECT_EQ(job.wait(), 1);
  EXPECT_THAT(job.err(), StartsWith("paceline run: cannot make the directory logs/"));
  EXPECT_THAT(job.err(), EndsWith("_ in the current one: No such file or directory (ENOENT); give "
                                  "--log-dir a directory that can be written\n"));
}

struct Mistake {
  const char* name;
  std::vector<std::string> arguments;
  std::string message;  // its start
};
const Mistake kMistakes[] = {
    {"UnknownCommand",
     {"ruin"},
     "paceline: unknown command 'ruin'; expected run, report, top, bench or doctor\n"},
    {"NoProgram",
     {"run"},
     "paceline run: no program given: paceline run [flags] PROGRAM [arguments]\n"},
    {"UnknownFlag", {"run", "--nope", "true"}, "paceline run: unknown flag --nope\n"},
    {"AbbreviatedFlag",
     {"run", "--nproc", "2", "true"},
     "paceline run: unknown flag --nproc; did you mean --nproc-per-node?\n"},
    {"MisspelledFlag",
     {"run", "--nproc-pernode", "2", "true"},
     "paceline run: unknown flag --nproc-pernode; did you mean --nproc-per-node?\n"},
    {"FlagOfMpirun",
     {"run", "-np", "2", "true"},
     "paceline run: unknown flag -np; did you mean --nproc-per-node?\n"},
    {"FlagWithoutValue",
     {"run", "--master-port"},
     "paceline run: --master-port: expected a value\n"},
    {"FlagWithEmptyValue",
     {"run", "--master-port=", "true"},
     "paceline run: --master-port= is not an integer from 1 to 65535\n"},
    {"FlagThatTakesNoValue",
     {"run", "--pass-local-rank=1", "true"},
     "paceline run: --pass-local-rank=1: this flag takes no value\n"},
    {"PortIsNoNumber",
     {"run", "--master-port", "x", "true"},
     "paceline run: --master-port=x is not an integer from 1 to 65535\n"},
    {"PortTooLarge",
     {"run", "--master-port", "70000", "true"},
     "paceline run: --master-port=70000 is not an integer from 1 to 65535\n"},
    {"NoProcesses",
     {"run", "--nproc-per-node=0", "true"},
     "paceline run: --nproc-per-node 0: expected a number from 1 to 1024, auto, cpu or gpu\n"},
    {"NegativeProcesses",
     {"run", "--nproc-per-node", "-3", "true"},
     "paceline run: --nproc-per-node -3: expected a number"},
    {"TooManyProcesses",
     {"run", "--nproc-per-node", "10000", "true"},
     "paceline run: --nproc-per-node 10000: expected a number"},
    {"ProcessesAreNoNumber",
     {"run", "--nproc-per-node", "two", "true"},
     "paceline run: --nproc-per-node two: expected a number"},
    {"MoreProcessesThanCoresOfTheirOwn",
     {"run", "--bind-to-cores", "--nproc-per-node", "1024", "true"},
     "paceline run: --bind-to-cores: 1024 processes cannot have cores of their own on "},
    {"ModuleWithoutPython",
     {"run", "--no-python", "-m", "true"},
     "paceline run: -m and --no-python cannot be combined\n"},
    {"RestartsAreNoNumber",
     {"run", "--max-restarts", "-1", "true"},
     "paceline run: --max-restarts=-1 is not an integer from 0 to 1000000\n"},
    {"ReplacementsAreNoNumber",
     {"run", "--max-replacements", "many", "true"},
     "paceline run: --max-replacements=many is not an integer from 0 to 1000000\n"},
    {"ReplacementsOnSeveralNodes",
     {"run", "--max-replacements", "2", "--nnodes", "2", "true"},
     "paceline run: --max-replacements 2: processes are replaced on one node, and --nnodes 2 means "
     "several; --max-restarts starts all of them again\n"},
    {"SignalThatDoesNotExist",
     {"run", "--signals-to-handle", "SIGTERM,USR1", "true"},
     "paceline run: --signals-to-handle SIGTERM,USR1: 'USR1' is none of SIGTERM, SIGINT,"},
    {"SignalThatCannotBeHandled",
     {"run", "--signals-to-handle", "SIGKILL", "true"},
     "paceline run: --signals-to-handle SIGKILL: 'SIGKILL' is none of"},
    {"RankThatDoesNotExist",
     {"run", "--nproc-per-node=2", "--local-ranks-filter", "0,2", "true"},
     "paceline run: --local-ranks-filter 0,2: '2' is not a rank from 0 to 1"},
    {"AnotherMachine",
     {"run", "--node-rank", "1", "true"},
     "paceline run: --node-rank=1 is not an integer from 0 to 0\n"},
    {"LocalRankTwice",
     {"run", "--use_env", "--pass-local-rank", "true"},
     "paceline run: --use-env and --pass-local-rank cannot be combined\n"},
    {"StreamsThatDoNotExist",
     {"run", "-r4", "true"},
     "paceline run: -r 4: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one of them "
     "for each local rank, as in 0:1,1:3\n"},
    {"StreamsOfSomeRanksOnly",
     {"run", "--tee", "0:1,1", "true"},
     "paceline run: --tee 0:1,1: expected 0 (none), "},
    {"NoStreams", {"run", "-r=", "true"}, "paceline run: -r : expected 0 (none), "},
    {"NumaModeThatDoesNotExist",
     {"run", "--numa-binding", "cache", "true"},
     "paceline run: --numa-binding cache: expected node, socket, exclusive or core-complex\n"},
    {"NumaModeIsEmpty",
     {"run", "--numa-binding=", "true"},
     "paceline run: --numa-binding : expected "},
    {"TwoBindings",
     {"run", "--numa-binding", "node", "--bind-to-cores", "true"},
     "paceline run: --numa-binding and --bind-to-cores cannot be combined\n"},
    {"MoreProcessesThanExclusiveCores",
     {"run", "--numa-binding", "exclusive", "--nproc-per-node", "1024", "true"},
     "paceline run: --numa-binding: NUMA node "},
    {"ShellWithoutCompletion",
     {"run", "--print-completion", "fish"},
     "paceline run: --print-completion fish: expected bash, zsh or tcsh\n"},
    {"TimeWithUnit",
     {"run", "--stop-grace", "5s", "true"},
     "paceline run: --stop-grace 5s: expected 0 to 31536000 seconds\n"},
    {"NegativeTime",
     {"run", "--stop-grace", "-1", "true"},
     "paceline run: --stop-grace -1: expected 0 to 31536000 seconds\n"},
    {"TimeIsNan",
     {"run", "--stop-grace", "nan", "true"},
     "paceline run: --stop-grace nan: expected 0 to 31536000 seconds\n"},
    {"TimeByTorchrunsName",
     {"run", "--shutdown_timeout=5s", "true"},
     "paceline run: --shutdown-timeout 5s: expected 0 to 31536000 seconds\n"},
    {"IntervalWithUnit",
     {"run", "--monitor-interval", "5s", "true"},
     "paceline run: --monitor-interval 5s: expected 0 to 31536000 seconds\n"},
    {"StartMethodThatDoesNotExist",
     {"run", "--start-method", "thread", "true"},
     "paceline run: --start-method thread: expected spawn, fork or forkserver\n"},
    {"FailureGraceWithUnit",
     {"run", "--failure-grace", "5s", "true"},
     "paceline run: --failure-grace 5s: expected 0 to 31536000 seconds\n"},
};

class LauncherRefuses : public Launcher, public ::testing::WithParamInterface<Mistake> {};
INSTANTIATE_TEST_SUITE_P(, LauncherRefuses, ::testing::ValuesIn(kMistakes),
                         [](const auto& one) { return one.param.name; });

TEST_P(LauncherRefuses, AndSaysWhatIsExpected) {
  auto command = paceline(GetParam().arguments);
  EXPECT_EQ(command.wait(), 2);
  EXPECT_THAT(command.err(), StartsWith(GetParam().message));
  EXPECT_THAT(command.err(), EndsWith(" --help' for help.\n"));
}

TEST_F(Launcher, PrintsHelpAndRejectsUnknownCommands) {
  auto help = paceline({});
  EXPECT_EQ(help.wait(), 0);
  EXPECT_THAT(help.out(), HasSubstr("Usage: paceline COMMAND"));
  auto run_help = paceline({"run", "-h"});
  EXPECT_EQ(run_help.wait(), 0);
  EXPECT_THAT(run_help.out(), HasSubstr("--nproc-per-node N"));
  EXPECT_THAT(run_help.out(), HasSubstr("--no-tune-malloc"));
  auto unknown = paceline({"ruin"});
  EXPECT_EQ(unknown.wait(), 2);
  EXPECT_THAT(unknown.err(), HasSubstr("'ruin'"));
  // Beside a copy of the command there is no bench.
  const test::TemporaryDirectory directory;
  const auto copy = directory.path() / "paceline";
  std::filesystem::copy(PACELINE_COMMAND, copy);
  ChildProcess bench({copy.string(), "bench"});
  EXPECT_EQ(bench.wait(), 2);
  EXPECT_THAT(bench.err(), HasSubstr("paceline bench is not installed"));
}

}  // namespace
}  // namespace paceline
