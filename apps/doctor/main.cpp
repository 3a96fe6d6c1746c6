#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "base/errno_error.h"
#include "check.h"
#include "checks/checks.h"
#include "facts/libtorch.h"
#include "options.h"
#include "output/json.h"
#include "output/text.h"
#include "self_test/job.h"
#include "self_test/rank.h"
#include "shm/collectives/fingerprint.h"

namespace paceline::doctor {
namespace {

constexpr int kUsageExitCode = 2;
constexpr std::chrono::seconds kSelfTestDeadline{15};

bool wants_colours() {
  const char* const no_colour = std::getenv("NO_COLOR");
  const char* const terminal = std::getenv("TERM");
  return ::isatty(STDOUT_FILENO) != 0 && (no_colour == nullptr || *no_colour == '\0') &&
         (terminal == nullptr || std::string(terminal) != "dumb");
}

// Prints each group as soon as it is known, or all at the end as JSON.
class Report {
 public:
  explicit Report(bool json) : json_(json), colours_(!json && wants_colours()) {}

  void add(Group group) {
    if (!json_) print(text_of(group, colours_) + "\n");
    groups_.push_back(std::move(group));
  }
  // Returns the exit code.
  int finish() const {
    print(json_ ? json_of(groups_) : summary(groups_, colours_));
    return worst(groups_) == Status::error ? 1 : 0;
  }

 private:
  static void print(const std::string& text) {
    if (std::fputs(text.c_str(), stdout) >= 0 && std::fflush(stdout) == 0) return;
    throw base::errno_error("cannot write to standard output");
  }

  bool json_;
  bool colours_;
  std::vector<Group> groups_;
};

VariableFacts gather_variables(const NetworkFacts& network, int cores) {
  VariableFacts facts = read_variables(all_variables(), check_rendezvous);
  if (facts.environment && facts.environment->master_addr) {
    facts.master = resolve(*facts.environment->master_addr, std::chrono::seconds(3));
  }
  for (const Interface& one : network.interfaces) facts.interfaces.push_back(one.name);
  facts.cores = cores;
  return facts;
}

// Without /proc, the link itself: starting it then fails with a reason.
std::string own_path() {
  const std::filesystem::path link = "/proc/self/exe";
  std::error_code error;
  const auto target = std::filesystem::read_symlink(link, error);
  return error ? link : target;
}

// Returns the signal that interrupted it, or 0.
int self_test(const std::vector<BackendFacts>& backends, Report& report) {
  const std::string self = own_path();
  Group group{"self_test", {}};
  for (const BackendFacts& one : backends) {
    if (!one.available || one.name == "mpi") continue;  // whose ranks mpirun has to start
    const SelfTest result =
        run_self_test(one.name, {self, "--self-test-rank", one.name}, kSelfTestDeadline);
    if (result.signal != 0) return result.signal;
    group.checks.push_back(check_self_test(result));
  }
  report.add(std::move(group));
  return 0;
}

int examine(const Options& options) {
  const KernelFacts kernel = probe_kernel();  // before anything may start a thread
  Report report(options.json);
  report.add(check_versions(read_versions()));
  const auto backends = read_backends();
  report.add(check_backends(backends));
  const CoreFacts cores = read_cores();
  report.add(check_cores(cores));
  const int ranks = std::clamp(auto_processes(cores), 2, shm::kMaxRanks);
  const Limits limits = read_limits();
  report.add(check_memory(read_memory(ranks), limits, ranks));
  report.add(check_descriptors(limits, ranks));
  report.add(check_kernel(kernel));
  const NetworkFacts network = read_network();
  report.add(check_network(network));
  report.add(check_variables(gather_variables(network, cores.available)));
  if (options.self_test) {
    if (const int signal = self_test(backends, report); signal != 0) return 128 + signal;
  }
  return report.finish();
}

int run(const std::vector<std::string>& arguments) {
  std::string help;
  const auto options = parse_options(arguments, help);
  if (!options) {
    std::fputs(help.c_str(), stdout);
    return 0;
  }
  if (!options->self_test_rank.empty()) return run_self_test_rank(options->self_test_rank);
  return examine(*options);
}

}  // namespace
}  // namespace paceline::doctor

int main(int argc, char** argv) {
  try {
    return paceline::doctor::run({argv + 1, argv + argc});
  } catch (const paceline::UsageError& error) {
    std::fprintf(stderr, "paceline doctor: %s\nRun 'paceline doctor --help' for help.\n",
                 error.what());
    return paceline::doctor::kUsageExitCode;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "paceline doctor: %s\n", error.what());
    return 1;
  }
}
