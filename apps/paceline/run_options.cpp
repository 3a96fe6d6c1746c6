#include "run_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <string_view>
#include <utility>

#include <paceline/error.h>

#include "base/malloc_thresholds.h"
#include "base/parse.h"
#include "base/utf8.h"
#include "launch/signal_names.h"
#include "parse_seconds.h"
#include "run_flags.h"
#include "run_nodes.h"

namespace paceline::app {
namespace {

// As many as CUDA_VISIBLE_DEVICES names before the first invalid one, as CUDA does; if it is not
// set, as many as the driver shows.
int count_gpus() {
  if (const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible != nullptr) {
    int count = 0;
    for (const std::string_view device : base::split_at_commas(visible)) {
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
  const auto value = base::parse_number(text, 1, launch::kMaxProcesses);
  if (value) return *value;
  throw UsageError(
      fmt::format("--nproc-per-node {}: expected a number from 1 to {}, auto, cpu or gpu", text,
                  launch::kMaxProcesses));
}

// SIGUSR1 too, which Slurm sends before it ends a job: a program may save then.
std::vector<int> signals_to_pass_on(const std::string& names) {
  auto signals = launch::parse_signals(names, "--signals-to-handle");
  if (std::ranges::find(signals, SIGUSR1) == signals.end()) signals.push_back(SIGUSR1);
  return signals;
}

std::optional<launch::NumaBinding> parse_numa_binding(const RunFlags& flags) {
  if (!flags.numa_binding) return std::nullopt;
  if (flags.bind_to_cores) {
    throw UsageError("--numa-binding and --bind-to-cores cannot be combined");
  }
  using launch::NumaBinding;
  const std::map<std::string_view, NumaBinding> modes{{"node", NumaBinding::node},
                                                      {"socket", NumaBinding::socket},
                                                      {"exclusive", NumaBinding::exclusive},
                                                      {"core-complex", NumaBinding::core_complex}};
  const auto found = modes.find(*flags.numa_binding);
  if (found != modes.end()) return found->second;
  throw UsageError(fmt::format(
      "--numa-binding {}: expected node, socket, exclusive or core-complex", *flags.numa_binding));
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

// For Python: runs the script that is its first argument.
constexpr const char* kRunPath =
    "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')";

// What to start, in place of torchrun's Python script or module.
std::vector<std::string> make_command(const RunFlags& flags, std::vector<std::string> command) {
  if (command.empty())
    throw UsageError("no program given: paceline run [flags] PROGRAM [arguments]");
  if (flags.module && flags.no_python && !flags.run_path)
    throw UsageError("--module and --no-python cannot be combined");
  const bool is_script = command.front().ends_with(".py") && !flags.no_python;
  if (!flags.module && !is_script && !flags.run_path) return command;
  const char* const chosen = std::getenv("PYTHON_EXEC");
  std::vector<std::string> python{chosen != nullptr && *chosen != '\0' ? chosen : "python3", "-u"};
  if (flags.run_path) {
    python.insert(python.end(), {"-c", kRunPath});
  } else if (flags.module) {
    python.emplace_back("-m");
  }
  command.insert(command.begin(), python.begin(), python.end());
  return command;
}

// As torchrun names a job: where other launchers could join it, always the same.
std::string default_run_id(const RunFlags& flags) {
  const bool has_rendezvous =
      flags.master_port || !flags.rdzv_endpoint.empty() || flags.rdzv_backend != kStaticBackend;
  return has_rendezvous && !flags.standalone ? kUnnamedJob : launch::random_run_id();
}

// It is a part of messages between launchers, and of file names.
void check_run_id(const std::string& id) {
  constexpr std::size_t kMost = 200;
  if (id.size() > kMost) {
    throw UsageError(
        fmt::format("--rdzv-id has {} bytes; it must have at most {}", id.size(), kMost));
  }
  if (!base::is_utf8(id)) throw UsageError("--rdzv-id must be UTF-8 text");
}

launch::JobSpec make_spec(const RunFlags& flags, int cores) {
  if (flags.use_env && flags.pass_local_rank)
    throw UsageError("--use-env and --pass-local-rank cannot be combined");
  launch::JobSpec spec;
  spec.processes = parse_processes(flags.nproc_per_node, cores);
  spec.pass_local_rank = flags.pass_local_rank;
  spec.virtual_local_rank = flags.virtual_local_rank;
  if (!flags.no_tune_malloc) spec.environment = base::malloc_variables();
  if (flags.deterministic) spec.environment.merge(deterministic_variables());
  if (flags.as_gloo) spec.environment["PACELINE_AS_GLOO"] = "1";
  spec.role = flags.role;
  spec.environment["TORCHELASTIC_SIGNALS_TO_HANDLE"] = flags.signals;
  check_run_id(flags.run_id);
  spec.run_id = flags.run_id;  // also after restarts
  if (spec.run_id.empty()) spec.run_id = default_run_id(flags);
  spec.max_restarts = base::parse_integer("--max-restarts", flags.max_restarts, 0, 1000000);
  spec.max_replacements =
      base::parse_integer("--max-replacements", flags.max_replacements, 0, 1000000);
  spec.tolerate_loss = flags.tolerate_loss;
  if (!flags.master_addr.empty()) spec.master_addr = flags.master_addr;
  if (flags.master_port) {
    spec.master_port = base::parse_integer("--master-port", *flags.master_port, 1, 65535);
  }
  spec.failure_grace = parse_seconds("--failure-grace", flags.failure_grace);
  spec.stop_grace = parse_seconds("--stop-grace", flags.stop_grace);
  return spec;
}

// A line about what was given and cannot apply, or nothing.
std::string describe_without_effect(const std::vector<std::string>& names) {
  if (names.empty()) return "";
  return fmt::format("paceline: without effect here: {}\n", fmt::join(names, ", "));
}

// torchrun's flags that it needs and `paceline run` does not.
void add_unneeded(const RunFlags& flags, std::vector<std::string>& without_effect) {
  parse_seconds("--monitor-interval", flags.monitor_interval);
  const auto& method = flags.start_method;
  if (method != "spawn" && method != "fork" && method != "forkserver") {
    throw UsageError(fmt::format("--start-method {}: expected spawn, fork or forkserver", method));
  }
  for (const char* const flag :
       {"--monitor-interval", "--start-method", "--logs-specs", "--event-log-handler"}) {
    if (const std::string given = flags.given(flag); !given.empty())
      without_effect.push_back(given);
  }
}

RunOptions make_options(const RunFlags& flags, int cores, std::vector<std::string> command) {
  launch::JobSpec job = make_spec(flags, cores);
  std::vector<std::string> without_effect;
  add_unneeded(flags, without_effect);
  auto nodes = make_session_options(flags, job, without_effect);
  if (nodes) job.run_id = nodes->rules.job;  // which its logs have, too
  OutputOptions output = make_output_options(flags, job);
  job.destinations = output.destinations;
  RunOptions options{.job = std::move(job),
                     .bind_to_cores = flags.bind_to_cores,
                     .deterministic = flags.deterministic,
                     .numa_binding = parse_numa_binding(flags),
                     .output = std::move(output),
                     .signals = signals_to_pass_on(flags.signals)};
  options.nodes = std::move(nodes);
  const auto& absent = options.output.without_effect;
  without_effect.insert(without_effect.end(), absent.begin(), absent.end());
  options.notice = describe_without_effect(without_effect);
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
    const std::string flag = text.substr(0, text.find_first_of(" ="));
    if (const auto found = flags.written.find(flag); found != flags.written.end()) {
      throw UsageError(found->second + text.substr(flag.size()));
    }
    if (const auto found = flags.variables.find(flag); found != flags.variables.end()) {
      throw UsageError(fmt::format("{} (from {})", text, found->second));
    }
    throw;
  }
}

}  // namespace paceline::app
