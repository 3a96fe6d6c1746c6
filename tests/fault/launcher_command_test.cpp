// The real `paceline` with small shell programs as workers: its flags and their mistakes.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <utility>

#include "launcher.h"

namespace paceline {
namespace {

using test::ChildProcess;
using test::Launcher;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST_F(Launcher, BothSpellingsAndTheProgramsOwnFlags) {
  ChildProcess job({PACELINE_COMMAND, "run", "--nproc_per_node=2", "--pass_local_rank", "echo",
                    "--nproc-per-node", "9"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[rank0]: --nproc-per-node 9 --local_rank=0\n"));
  EXPECT_THAT(job.out(), HasSubstr("[rank1]: --nproc-per-node 9 --local_rank=1\n"));
}

TEST_F(Launcher, ProgramsThatCannotBeStartedAreNamed) {
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
  EXPECT_EQ(broken.wait(), 1);
  EXPECT_THAT(broken.err(), HasSubstr("interpreter that its first line names may be missing"));
}

TEST_F(Launcher, BadFlagsAreNamed) {
  for (const auto& flags : std::vector<std::vector<std::string>>{{"--nproc-per-node", "0"},
                                                                 {"--nproc-per-node", "-3"},
                                                                 {"--nproc-per-node", "10000"},
                                                                 {"--nproc-per-node", "two"},
                                                                 {"--nnodes", "2"},
                                                                 {"--master-port", "70000"},
                                                                 {"--stop-grace", "-1"},
                                                                 {"--stop-grace", "nan"},
                                                                 {"--master-port", "x"},
                                                                 {"--failure-grace", "5s"},
                                                                 {"--pass-local-rank=1"},
                                                                 {"--no-such-flag"}}) {
    std::vector<std::string> arguments{"run"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    arguments.emplace_back("true");
    auto command = paceline(arguments);
    EXPECT_EQ(command.wait(), 2) << flags[0];
    EXPECT_THAT(command.err(), HasSubstr(flags[0]));
    EXPECT_THAT(command.err(), Not(HasSubstr("processes, ")));
  }
}

TEST_F(Launcher, ErrorsSayWhatIsExpected) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> errors{
      {{"ruin"}, "paceline: unknown command 'ruin'; expected run, report or bench\n"},
      {{"run"}, "paceline run: no program given: paceline run [flags] PROGRAM [arguments]\n"},
      {{"run", "--nope", "true"}, "paceline run: unknown flag --nope\n"},
      {{"run", "--master-port"}, "paceline run: --master-port: expected a value\n"},
      {{"run", "--master-port=", "true"}, "paceline run: --master-port=: expected a value\n"},
      {{"run", "--master-port", "x", "true"},
       "paceline run: --master-port x: expected a number from 1 to 65535\n"},
      {{"run", "--nproc-per-node=0", "true"},
       "paceline run: --nproc-per-node 0: expected a number from 1 to 1024, auto or cpu\n"},
      {{"run", "--stop-grace", "5s", "true"},
       "paceline run: --stop-grace 5s: expected 0 to 86400 seconds\n"}};
  for (const auto& [arguments, message] : errors) {
    auto command = paceline(arguments);
    EXPECT_EQ(command.wait(), 2);
    EXPECT_THAT(command.err(), StartsWith(message));
    EXPECT_THAT(command.err(), EndsWith(" --help' for help.\n"));
  }
}

TEST_F(Launcher, HelpAndMissingCommands) {
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
