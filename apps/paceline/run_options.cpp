#include "run_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <string_view>

#include <paceline/error.h>

#include "base/malloc_thresholds.h"
#include "launch/signal_names.h"
#include "run_flags.h"

namespace paceline::app {
namespace {

template <typename Number>
std::optional<Number> parse_number(std::string_view text, Number low, Number high) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && value >= low && value <= high ? std::optional(value) : std::nullopt;
}

std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

// As many as CUDA_VISIBLE_DEVICES names, of which CUDA takes those before an invalid one; if it is
// not set, as many as the driver shows.
int count_gpus() {
  if (const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible != nullptr) {
    int count = 0;
    for (const std::string& device : split_at_commas(visible)) {
      if (device.empty() || device.front() == '-') break;
      ++count;
    }
    return count;
  }
  std::error_code error;
  const std::filesystem::directory_iterator gpus("/proc/driver/nvidia/gpus", error);
  return error ? 0 : static_cast<int>(std::distance(begin(gpus), end(gpus)));
}

int parse_processes(const std::string& text, int cores) {
  if (text == "auto" || text == "cpu") return cores;
  if (text == "gpu") {
    if (const int gpus = count_gpus(); gpus > 0) return gpus;
    throw UsageError(
        "--nproc-per-node gpu: there is no NVIDIA GPU here (CUDA_VISIBLE_DEVICES, "
        "/proc/driver/nvidia/gpus); give a number, auto or cpu");
  }
  const auto value = parse_number(text, 1, launch::kMaxProcesses);
  if (value) return *value;
  throw UsageError(
      fmt::format("--nproc-per-node {}: expected a number from 1 to {}, auto, cpu or gpu", text,
                  launch::kMaxProcesses));
}

int parse_integer(const char* flag, const std::string& text, int low, int high) {
  const auto value = parse_number(text, low, high);
  if (value) return *value;
  throw UsageError(fmt::format("{} {}: expected a number from {} to {}", flag, text, low, high));
}

std::chrono::milliseconds parse_seconds(const char* flag, const std::string& text) {
  constexpr double kDay = 86400;
  const auto seconds = parse_number(text, 0.0, kDay);
  if (!seconds) {
    throw UsageError(fmt::format("{} {}: expected 0 to {} seconds", flag, text, kDay));
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(*seconds * 1000));
}

// By their names.
std::vector<int> parse_signals(const std::string& text) {
  constexpr int kAllowed[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU};
  std::vector<int> signals;
  for (const std::string& name : split_at_commas(text)) {
    const auto found = std::ranges::find(kAllowed, name, launch::signal_name);
    if (found == std::end(kAllowed)) {
      throw UsageError(
          fmt::format("--signals-to-handle {}: '{}' is none of SIGTERM, SIGINT, SIGHUP, SIGQUIT, "
                      "SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU",
                      text, name));
    }
    signals.push_back(*found);
  }
  return signals;
}

std::set<int> parse_ranks(const std::string& text, int processes) {
  std::set<int> ranks;
  for (const std::string& one : split_at_commas(text)) {
    const auto rank = parse_number(one, 0, processes - 1);
    if (!rank) {
      throw UsageError(
          fmt::format("--local-ranks-filter {}: '{}' is not a rank from 0 to {}; separate ranks by "
                      "commas",
                      text, one, processes - 1));
    }
    ranks.insert(*rank);
  }
  return ranks;
}

// The variables of LibTorch, MKL, oneDNN and OpenMP. MKL's also makes results independent of the
// alignment of memory.
std::map<std::string, std::string> deterministic_variables() {
  std::map<std::string, std::string> variables{{"ATEN_CPU_CAPABILITY", "avx2"},
                                               {"MKL_CBWR", "AVX2,STRICT"},
                                               {"ONEDNN_MAX_CPU_ISA", "AVX2"},
                                               {"OMP_NUM_THREADS", "1"}};
  std::erase_if(variables, [](const auto& one) {
    const char* const chosen = std::getenv(one.first.c_str());
    return chosen != nullptr && *chosen != '\0';
  });
  return variables;
}

void check_one_machine(const RunFlags& flags) {
  if (flags.nnodes != "1" && flags.nnodes != "1:1") {
    throw UsageError(
        fmt::format("--nnodes {}: paceline run starts processes on this machine only; leave the "
                    "flag out",
                    flags.nnodes));
  }
  if (flags.node_rank != "0") {
    throw UsageError(
        fmt::format("--node-rank {}: there is one machine, number 0", flags.node_rank));
  }
}

// What to start, in place of torchrun's Python script or module.
std::vector<std::string> make_command(const RunFlags& flags, std::vector<std::string> command) {
  if (command.empty())
    throw UsageError("no program given: paceline run [flags] PROGRAM [arguments]");
  if (flags.module && flags.no_python)
    throw UsageError("--module and --no-python cannot be combined");
  const bool is_script = command.front().ends_with(".py") && !flags.no_python;
  if (!flags.module && !is_script) return command;
  const char* const chosen = std::getenv("PYTHON_EXEC");
  std::vector<std::string> python{chosen != nullptr && *chosen != '\0' ? chosen : "python3", "-u"};
  if (flags.module) python.emplace_back("-m");
  command.insert(command.begin(), python.begin(), python.end());
  return command;
}

launch::JobSpec make_spec(const RunFlags& flags, int cores) {
  check_one_machine(flags);
  if (flags.use_env && flags.pass_local_rank)
    throw UsageError("--use-env and --pass-local-rank cannot be combined");
  launch::JobSpec spec;
  spec.processes = parse_processes(flags.nproc_per_node, cores);
  spec.pass_local_rank = flags.pass_local_rank;
  if (!flags.no_tune_malloc) spec.environment = base::malloc_variables();
  if (flags.deterministic) spec.environment.merge(deterministic_variables());
  if (flags.as_gloo) spec.environment["PACELINE_AS_GLOO"] = "1";
  spec.role = flags.role;
  spec.run_id = flags.run_id ? *flags.run_id : launch::random_run_id();  // also after restarts
  spec.max_restarts = parse_integer("--max-restarts", flags.max_restarts, 0, 1000000);
  spec.master_addr = flags.master_addr;
  if (flags.master_port) {
    spec.master_port = parse_integer("--master-port", *flags.master_port, 1, 65535);
  }
  spec.failure_grace = parse_seconds("--failure-grace", flags.failure_grace);
  spec.stop_grace = parse_seconds("--stop-grace", flags.stop_grace);
  return spec;
}

RunOptions make_options(const RunFlags& flags, int cores, std::vector<std::string> command) {
  RunOptions options{.job = make_spec(flags, cores),
                     .bind_to_cores = flags.bind_to_cores,
                     .deterministic = flags.deterministic,
                     .signals = parse_signals(flags.signals)};
  if (flags.local_ranks) {
    options.shown_ranks = parse_ranks(*flags.local_ranks, options.job.processes);
  }
  if (!flags.without_effect.empty()) {
    options.notice = fmt::format(
        "paceline: without effect, as the processes are on one machine "
        "and have no agent: {}\n",
        fmt::join(flags.without_effect, ", "));
  }
  options.job.command = make_command(flags, std::move(command));
  return options;
}

}  // namespace

std::optional<RunOptions> parse_run_options(const std::vector<std::string>& arguments, int cores,
                                            std::string& help) {
  RunFlags flags;
  auto command = parse_run_flags(arguments, flags, help);
  if (!command) return std::nullopt;
  try {
    return make_options(flags, cores, std::move(*command));
  } catch (const UsageError& error) {
    const std::string text = error.what();
    for (const auto& [flag, variable] : flags.variables) {
      if (!text.starts_with(flag + " ")) continue;
      throw UsageError(fmt::format("{} (from {})", text, variable));
    }
    throw;
  }
}

}  // namespace paceline::app
