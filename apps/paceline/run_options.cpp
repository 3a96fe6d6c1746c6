#include "run_options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <map>
#include <memory>

#include <paceline/error.h>

#include "base/malloc_thresholds.h"
#include "help_formatter.h"

namespace paceline::app {
namespace {

struct Flags {
  std::string nproc_per_node = "1";
  std::string nnodes = "1";
  std::string master_addr = "127.0.0.1";
  std::optional<std::string> master_port;
  bool pass_local_rank = false;
  bool bind_to_cores = false;
  bool no_tune_malloc = false;
  bool deterministic = false;
  bool as_gloo = false;
  std::string failure_grace = "0.5";
  std::string stop_grace = "5";
};

void describe(CLI::App& app, Flags& flags) {
  app.formatter(std::make_shared<HelpFormatter>("paceline run [flags] PROGRAM [arguments]"));
  // Defaults stand in the descriptions: CLI11 would print its own type and range beside them.
  const auto add = [&](const std::string& name, auto& value, const char* unit, const char* group,
                       const char* description) {
    return app.add_option(name, value, description)->type_name(unit)->group(group);
  };
  const char* const processes = "Processes";
  const char* const rendezvous = "Rendezvous";
  const char* const stopping = "Stopping";
  add("--nproc-per-node", flags.nproc_per_node, "N", processes,
      "Number of processes (default 1); auto or cpu: one per core");
  add("--nnodes", flags.nnodes, "N", processes,
      "Number of machines; only 1 (default) is supported");
  app.add_flag("--pass-local-rank", flags.pass_local_rank,
               "Append --local_rank=R to the arguments of local rank R's process")
      ->group(processes);
  app.add_flag("--bind-to-cores", flags.bind_to_cores,
               "Give each process cores of its own, which other jobs with this flag do not\n"
               "get; for machines that nothing else uses")
      ->group(processes);
  app.add_flag("--no-tune-malloc", flags.no_tune_malloc,
               "Do not set MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_, which make\n"
               "malloc keep freed memory for the next training step")
      ->group(processes);
  app.add_flag("--deterministic", flags.deterministic,
               "Fix what LibTorch's results depend on besides the program: one thread each\n"
               "and the instruction set AVX2, unless their variables are set\n"
               "(docs/determinism.md)")
      ->group(processes);
  app.add_flag("--as-gloo", flags.as_gloo,
               "Set PACELINE_AS_GLOO=1: in Python, the name \"gloo\" then means the backend\n"
               "paceline; the program's Python needs the package paceline (python/README.md)")
      ->group(processes);
  add("--master-addr", flags.master_addr, "HOST", rendezvous,
      "MASTER_ADDR of the processes (default 127.0.0.1)");
  add("--master-port", flags.master_port, "PORT", rendezvous,
      "MASTER_PORT of the processes (default: a free one)");
  add("--failure-grace", flags.failure_grace, "SECONDS", stopping,
      "From the first failure to SIGTERM for the others (default 0.5);\n"
      "a rank that is already failing has --stop-grace to end by itself");
  add("--stop-grace", flags.stop_grace, "SECONDS", stopping,
      "From SIGTERM, or from Ctrl-C, to SIGKILL (default 5)");
  app.set_help_flag("-h,--help", "Print this and exit")->group("Other");
  app.footer(
      "Flags may also be spelled with underscores, as in --nproc_per_node; flags after the\n"
      "program belong to the program. Each process gets RANK, LOCAL_RANK, WORLD_SIZE and\n"
      "torchrun's other variables, and OMP_NUM_THREADS unless it is set: the cores divided by\n"
      "the processes. paceline run exits with the code of the process that failed first, or\n"
      "with 128 + N if signal N ended it.\n"
      "\n"
      "Example:\n"
      "  paceline run --nproc-per-node 2 ./train --epochs 5");
}

// The name that CLI11 knows: "--nproc_per_node=2" is "--nproc-per-node=2".
std::string with_dashes(std::string flag) {
  std::replace(flag.begin(),
               flag.begin() + static_cast<std::ptrdiff_t>(std::min(flag.find('='), flag.size())),
               '_', '-');
  return flag;
}

// Separates our flags from the program and its arguments.
struct SplitArguments {
  std::vector<std::string> flags;
  std::vector<std::string> command;
};

SplitArguments split(const CLI::App& app, const std::vector<std::string>& arguments) {
  SplitArguments result;
  auto at = arguments.begin();
  while (at != arguments.end() && at->size() > 1 && at->front() == '-' && *at != "--") {
    const std::string& flag = result.flags.emplace_back(with_dashes(*at++));
    const std::size_t equals = flag.find('=');
    const CLI::Option* const option = app.get_option_no_throw(flag.substr(0, equals));
    if (option == nullptr) throw UsageError(fmt::format("unknown flag {}", flag));
    const bool takes_value = option->get_items_expected_max() > 0;
    if (equals != std::string::npos && !takes_value) {
      throw UsageError(fmt::format("{}: this flag takes no value", flag));
    }
    if (takes_value &&
        (equals == std::string::npos ? at == arguments.end() : equals + 1 == flag.size())) {
      throw UsageError(fmt::format("{}: expected a value", flag));
    }
    if (takes_value && equals == std::string::npos) result.flags.push_back(*at++);
  }
  if (at != arguments.end() && *at == "--") ++at;
  result.command.assign(at, arguments.end());
  return result;
}

template <typename Number>
std::optional<Number> parse_number(const std::string& text, Number low, Number high) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && value >= low && value <= high ? std::optional(value) : std::nullopt;
}

int parse_processes(const std::string& text, int cores) {
  if (text == "auto" || text == "cpu") return cores;
  const auto value = parse_number(text, 1, launch::kMaxProcesses);
  if (value) return *value;
  throw UsageError(fmt::format("--nproc-per-node {}: expected a number from 1 to {}, auto or cpu",
                               text, launch::kMaxProcesses));
}

int parse_port(const std::string& text) {
  const auto value = parse_number(text, 1, 65535);
  if (value) return *value;
  throw UsageError(fmt::format("--master-port {}: expected a number from 1 to 65535", text));
}

std::chrono::milliseconds parse_seconds(const char* flag, const std::string& text) {
  constexpr double kDay = 86400;
  const auto seconds = parse_number(text, 0.0, kDay);
  if (!seconds) {
    throw UsageError(fmt::format("{} {}: expected 0 to {} seconds", flag, text, kDay));
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(*seconds * 1000));
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

launch::JobSpec make_spec(const Flags& flags, int cores) {
  if (flags.nnodes != "1") {
    throw UsageError(fmt::format(
        "--nnodes {}: paceline run starts processes on this machine only; leave the flag out",
        flags.nnodes));
  }
  launch::JobSpec spec;
  spec.processes = parse_processes(flags.nproc_per_node, cores);
  spec.pass_local_rank = flags.pass_local_rank;
  if (!flags.no_tune_malloc) spec.environment = base::malloc_variables();
  if (flags.deterministic) spec.environment.merge(deterministic_variables());
  if (flags.as_gloo) spec.environment["PACELINE_AS_GLOO"] = "1";
  spec.master_addr = flags.master_addr;
  if (flags.master_port) spec.master_port = parse_port(*flags.master_port);
  spec.failure_grace = parse_seconds("--failure-grace", flags.failure_grace);
  spec.stop_grace = parse_seconds("--stop-grace", flags.stop_grace);
  return spec;
}

}  // namespace

std::optional<RunOptions> parse_run_options(const std::vector<std::string>& arguments, int cores,
                                            std::string& help) {
  CLI::App app("Starts a program as several processes on this machine.");
  Flags flags;
  describe(app, flags);
  SplitArguments parts = split(app, arguments);
  std::reverse(parts.flags.begin(), parts.flags.end());  // as CLI11 wants them
  try {
    app.parse(parts.flags);
  } catch (const CLI::CallForHelp&) {
    help = app.help();
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  RunOptions options{make_spec(flags, cores), flags.bind_to_cores, flags.deterministic};
  options.job.command = std::move(parts.command);
  if (options.job.command.empty())
    throw UsageError("no program given: paceline run [flags] PROGRAM [arguments]");
  return options;
}

}  // namespace paceline::app
