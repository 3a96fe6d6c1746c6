// The real `paceline doctor`.
#include <gmock/gmock.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <paceline/version.h>

#include "base/cores.h"
#include "support/child_process.h"
#include "support/temporary_directory.h"

namespace paceline {
namespace {

using test::ChildProcess;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

using Environment = std::vector<std::pair<std::string, std::string>>;

// The JSON of one run.
class Document {
 public:
  // `before`: commands of a shell that becomes the doctor.
  explicit Document(const std::string& flags, const Environment& environment = {},
                    const std::string& before = "true") {
    ChildProcess doctor(
        {"sh", "-c", before + " && exec " + PACELINE_COMMAND + " doctor --json " + flags},
        environment);
    code = doctor.wait();
    whole = nlohmann::json::parse(doctor.out(), nullptr, false);
    if (!whole.is_object()) throw std::runtime_error(doctor.out() + doctor.err());
  }
  nlohmann::json check(const std::string& id) const {
    for (const auto& group : whole.at("groups")) {
      for (const auto& one : group.at("checks")) {
        if (one.at("id") == id) return one;
      }
    }
    throw std::runtime_error("no " + id + " in " + whole.dump(1));
  }
  std::string status(const std::string& id) const { return check(id).at("status"); }
  std::string text(const std::string& id) const { return check(id).at("text"); }

  int code = -1;
  nlohmann::json whole;
};

TEST(Doctor, PrintsALineForEachCheck) {
  ChildProcess doctor({PACELINE_COMMAND, "doctor"});
  EXPECT_EQ(doctor.wait(), 0) << doctor.out();
  EXPECT_THAT(doctor.err(), IsEmpty());
  const std::string& out = doctor.out();
  EXPECT_THAT(out, StartsWith("versions\n  ok       paceline        " + std::string(kVersion)));
  EXPECT_THAT(out, Not(HasSubstr("\033")));
  EXPECT_THAT(out, HasSubstr("\nself test\n  ok       paceline        two ranks met in "));
  EXPECT_THAT(out, AllOf(HasSubstr("\nno errors, "), EndsWith("\n")));
}

TEST(Doctor, PrintsJson) {
  const Document document("");
  EXPECT_EQ(document.code, 0);
  EXPECT_EQ(document.whole.at("paceline"), kVersion);
  std::vector<std::string> groups;
  std::set<std::string> ids;
  for (const auto& group : document.whole.at("groups")) {
    groups.push_back(group.at("id"));
    for (const auto& check : group.at("checks")) {
      EXPECT_THAT(check.at("id").get<std::string>(), StartsWith(groups.back() + "."));
      EXPECT_TRUE(ids.insert(check.at("id")).second) << check;
      EXPECT_THAT((std::set<std::string>{"ok", "note", "warning"}), Contains(check.at("status")));
      EXPECT_EQ(check.at("advice").get<std::string>().empty(), check.at("status") != "warning");
      EXPECT_TRUE(check.at("values").is_object());
    }
  }
  EXPECT_THAT(groups,
              ::testing::ElementsAre("versions", "backends", "cores", "memory", "descriptors",
                                     "kernel", "network", "variables", "self_test"));
  EXPECT_GT(document.check("self_test.paceline").at("values").at("all_reduce_us"), 0);
  const auto library = document.check("versions.libtorch").at("values");
  EXPECT_TRUE(std::filesystem::exists(library.at("path").get<std::string>())) << library;
  EXPECT_EQ(library.at("version"), library.at("compiled_with"));
}

TEST(Doctor, SaysWhatAutoStarts) {
  const Document document("--no-self-test");
  ChildProcess run({PACELINE_COMMAND, "run", "--nproc-per-node", "auto", "true"});
  ASSERT_EQ(run.wait(), 0) << run.err();
  // "paceline: 2 processes, 1 thread each (2 cores)"
  const std::size_t begin = run.err().find(": ") + 2;
  const std::string started = run.err().substr(begin, run.err().find(" (") - begin);
  EXPECT_THAT(document.text("cores.auto"), EndsWith("starts " + started));
  EXPECT_EQ(document.check("cores.auto").at("values").at("processes"), base::available_cores());
}

TEST(Doctor, FindsWhatLdLibraryPathBrings) {
  const Document plain("--no-self-test");
  const std::string path = plain.check("versions.libtorch").at("values").at("path");
  const std::string directory = std::filesystem::path(path).parent_path();
  const Document document("--no-self-test", {{"LD_LIBRARY_PATH", directory}});
  EXPECT_EQ(document.check("versions.libtorch").at("values").at("found_by"), "LD_LIBRARY_PATH");
}

TEST(Doctor, ReportsVariablesThatContradictTheirLauncher) {
  const Environment slurm{{"SLURM_STEP_ID", "0"},
                          {"SLURM_STEP_NUM_TASKS", "4"},
                          {"SLURM_PROCID", "1"},
                          {"SLURM_LOCALID", "1"}};
  Environment bad = slurm;
  bad.insert(bad.end(), {{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  const Document document("--no-self-test", bad);
  EXPECT_EQ(document.code, 1);
  EXPECT_EQ(document.whole.at("status"), "error");
  EXPECT_THAT(document.text("variables.launcher"),
              AllOf(HasSubstr("WORLD_SIZE=1"), HasSubstr("SLURM_STEP_NUM_TASKS=4")));
  EXPECT_EQ(document.check("variables.in_force").at("values").at("SLURM_PROCID"), "1");

  const Document no_address("--no-self-test", slurm);
  EXPECT_THAT(no_address.text("variables.launcher"), HasSubstr("set MASTER_ADDR"));
  const Document no_number("--no-self-test", {{"RANK", "x"}});
  EXPECT_EQ(no_number.code, 1);
  EXPECT_THAT(no_number.text("variables.launcher"), HasSubstr("RANK=x is not an integer"));
}

TEST(Doctor, StartsItsRanksWhateverAnotherJobLeftBehind) {
  const test::TemporaryDirectory timeline;
  const Document document("", {{"RANK", "3"},
                               {"WORLD_SIZE", "4"},
                               {"PACELINE_STORE_FD", "987654"},
                               {"PACELINE_BOOTSTRAP_SOCKETS", "987655"},
                               {"PACELINE_TIMELINE", timeline.path() / "trace"}});
  EXPECT_EQ(document.code, 1);
  EXPECT_EQ(document.status("variables.inherited"), "error");
  EXPECT_EQ(document.status("self_test.paceline"), "ok");
  EXPECT_TRUE(std::filesystem::is_empty(timeline.path()));
}

TEST(Doctor, ReportsALowLimitOfDescriptors) {
  const Document document("", {}, "ulimit -n 20");
  EXPECT_EQ(document.code, 1);
  EXPECT_EQ(document.status("descriptors.limit"), "error");
  EXPECT_EQ(document.check("descriptors.limit").at("values").at("soft"), 20);
  EXPECT_EQ(document.status("self_test.paceline"), "error");
  EXPECT_THAT(document.text("self_test.paceline"), HasSubstr("EMFILE"));
}

// With as many descriptors as the doctor says, the ranks start.
TEST(Doctor, AsksForEnoughDescriptors) {
  const Document document("--no-self-test");
  const auto values = document.check("descriptors.limit").at("values");
  const std::string limit = std::to_string(values.at("needed").get<int>());
  const std::string ranks = std::to_string(values.at("ranks").get<int>());
  ChildProcess run({"sh", "-c",
                    "ulimit -n " + limit + " && exec " + PACELINE_COMMAND +
                        " run --nproc-per-node " + ranks + " true"});
  EXPECT_EQ(run.wait(), 0) << run.err();
}

TEST(Doctor, ReportsALimitThatForbidsSharedMemory) {
  const Document document("", {}, "ulimit -f 1000");
  EXPECT_EQ(document.code, 1);
  EXPECT_THAT(document.text("memory.shared_memory"), HasSubstr("RLIMIT_FSIZE"));
  EXPECT_THAT(document.text("self_test.paceline"), HasSubstr("raise the limit with ulimit -f"));
}

TEST(Doctor, ReportsABackendThatFails) {
  const Document document("", {{"GLOO_SOCKET_IFNAME", "no-such-one"}});
  if (document.check("backends.gloo").at("values").at("available") == false) {
    GTEST_SKIP() << "built without Gloo";
  }
  EXPECT_EQ(document.code, 1);
  EXPECT_EQ(document.status("variables.gloo_interface"), "error");
  EXPECT_EQ(document.status("self_test.gloo"), "error");
  EXPECT_THAT(document.text("self_test.gloo"), HasSubstr("no-such-one"));
  EXPECT_EQ(document.status("self_test.paceline"), "ok");
}

TEST(Doctor, WorksWithoutANetwork) {
  ChildProcess permitted({"unshare", "-n", "true"});
  if (permitted.wait() != 0) GTEST_SKIP() << "unshare -n: " << permitted.err();
  ChildProcess doctor({"unshare", "-n", PACELINE_COMMAND, "doctor", "--json"});
  EXPECT_EQ(doctor.wait(), 1);  // lo is down in a new namespace
  EXPECT_THAT(doctor.out(), AllOf(HasSubstr("\"network.loopback\""), HasSubstr("lo is down")));
  EXPECT_THAT(doctor.out(), HasSubstr("none is up besides the loopback"));
  EXPECT_THAT(doctor.out(), Not(HasSubstr("a loopback address: other machines")));
}

TEST(Doctor, WorksWithoutProc) {
  ChildProcess permitted({"unshare", "-m", "umount", "-l", "/proc"});
  if (permitted.wait() != 0) GTEST_SKIP() << "unshare -m: " << permitted.err();
  const auto program = std::filesystem::path(PACELINE_COMMAND).parent_path() / "paceline-doctor";
  ChildProcess doctor(
      {"unshare", "-m", "sh", "-c", "umount -l /proc && exec " + program.string() + " --json"});
  EXPECT_EQ(doctor.wait(), 1) << doctor.err();
  EXPECT_THAT(doctor.out(), HasSubstr("/proc/self/exe does not exist"));
  EXPECT_THAT(doctor.out(), HasSubstr("\"self_test.paceline\""));
}

TEST(Doctor, EndsWithItsSignal) {
  ChildProcess doctor({PACELINE_COMMAND, "doctor"});
  doctor.wait_for("variables\n");
  doctor.signal(SIGINT);
  const int code = doctor.wait();
  EXPECT_TRUE(code == 130 || code == 0) << code << doctor.out();  // 0: it had ended before
}

TEST(Doctor, RefusesUnknownArguments) {
  for (const std::vector<std::string>& mistake :
       {std::vector<std::string>{"--jsn"}, {"train"}, {"--json=3"}}) {
    std::vector<std::string> command{PACELINE_COMMAND, "doctor"};
    command.insert(command.end(), mistake.begin(), mistake.end());
    ChildProcess doctor(command);
    EXPECT_EQ(doctor.wait(), 2) << doctor.out();
    EXPECT_THAT(doctor.out(), IsEmpty());
    EXPECT_THAT(doctor.err(), StartsWith("paceline doctor: "));
    EXPECT_THAT(doctor.err(), EndsWith("Run 'paceline doctor --help' for help.\n"));
  }
  ChildProcess help({PACELINE_COMMAND, "doctor", "--help"});
  EXPECT_EQ(help.wait(), 0);
  EXPECT_THAT(help.out(), AllOf(HasSubstr("--no-self-test"), Not(HasSubstr("--self-test-rank"))));
}

}  // namespace
}  // namespace paceline
