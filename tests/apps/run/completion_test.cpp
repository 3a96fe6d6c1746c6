// The real `paceline`: the scripts that complete its flags.
#include <gmock/gmock.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "launcher.h"

namespace paceline {
namespace {

using test::ChildProcess;
using test::Launcher;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// What bash offers for the last word of a command line, given as bash splits it.
std::vector<std::string> complete(const std::string& words) {
  const test::TemporaryDirectory directory;
  const auto script = directory.path() / "test.sh";
  std::ofstream(script) << "set -e\n. <(" PACELINE_COMMAND " run --print-completion bash)\n"
                        << "complete -p paceline > /dev/null\n"
                        << "COMP_WORDS=(" << words << ")\n"
                        << "COMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n"
                        << "_paceline || true\n"
                        << "printf '%s\\n' \"${COMPREPLY[@]}\"\n";
  ChildProcess bash({"bash", script.string()});
  EXPECT_EQ(bash.wait(), 0) << bash.err();
  std::vector<std::string> offers;
  std::istringstream stream(bash.out());
  for (std::string line; std::getline(stream, line);) {
    if (!line.empty()) offers.push_back(line);
  }
  return offers;
}

TEST(Completion, OffersTheFlagsThatBeginSo) {
  EXPECT_THAT(complete("paceline run --dup"),
              ElementsAre("--duplicate-stdout-filters", "--duplicate-stderr-filters"));
  EXPECT_THAT(complete("paceline run --nproc_per"), ElementsAre("--nproc-per-node"));
  EXPECT_THAT(complete("paceline run -m --rdzv-b"), ElementsAre("--rdzv-backend"));
  EXPECT_THAT(complete("paceline re"), ElementsAre("report"));
  EXPECT_THAT(complete("paceline d"), ElementsAre("doctor"));
  const auto all = complete("paceline run --nnodes=1 --");
  for (const char* const flag : {"--help", "--tee", "--stop-grace", "--shutdown-timeout"}) {
    EXPECT_THAT(all, Contains(flag));
  }
}

TEST(Completion, PassesOverValues) {
  for (const char* const before : {"--nproc-per-node 2", "--nproc_per_node = 2", "-r 3", "-r3",
                                   "--log-dir d -t 1 --standalone"}) {
    EXPECT_THAT(complete(std::string("paceline run ") + before + " --red"),
                ElementsAre("--redirects"));
  }
}

TEST(Completion, OffersNothingForValuesAndForTheProgram) {
  for (const char* const words : {"paceline run --log-dir --n", "paceline run ./train --n",
                                  "paceline run -- --n", "paceline run --nnodes 1 ./train --n",
                                  "paceline report --n", "paceline run --log-dir ''"}) {
    EXPECT_THAT(complete(words), IsEmpty()) << words;
  }
}

TEST(Completion, IsThereForTheOtherShellsOfTorchrun) {
  for (const char* const shell : {"zsh", "tcsh"}) {
    ChildProcess command({PACELINE_COMMAND, "run", "--print-completion", shell});
    EXPECT_EQ(command.wait(), 0);
    EXPECT_THAT(command.out(), HasSubstr("paceline"));
    EXPECT_THAT(command.out(), HasSubstr(" --duplicate-stdout-filters "));
  }
}

}  // namespace
}  // namespace paceline
