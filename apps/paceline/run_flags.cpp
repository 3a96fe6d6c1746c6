#include "run_flags.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <memory>

#include <paceline/error.h>

#include "help_formatter.h"

namespace paceline::app {
namespace {

// Flags that torchrun needs and paceline run does not.
constexpr const char* kWithoutEffect[] = {"--logs-specs", "--start-method", "--event-log-handler",
                                          "--monitor-interval"};

void describe(CLI::App& app, RunFlags& flags) {
  app.formatter(std::make_shared<HelpFormatter>("paceline run [flags] PROGRAM [arguments]"));
  // Defaults stand in the descriptions: CLI11 would print its own type and range beside them.
  const auto add = [&](const std::string& name, auto& value, const char* unit, const char* group,
                       const char* description) {
    return app.add_option(name, value, description)->type_name(unit)->group(group);
  };
  const auto add_flag = [&](const char* name, bool& value, const char* group,
                            const char* description) {
    return app.add_flag(name, value, description)->group(group);
  };
  const char* const processes = "Processes";
  const char* const program = "Program";
  const char* const rendezvous = "Rendezvous";
  const char* const stopping = "Stopping";
  const char* const output = "Output";
  add("--nproc-per-node", flags.nproc_per_node, "N", processes,
      "Number of processes (default 1); auto or cpu: one per core;\n"
      "gpu: one per NVIDIA GPU");
  add("--nnodes", flags.nnodes, "N", processes,
      "Number of machines (default 1), each of which runs this command;\n"
      "MIN:MAX with --rdzv-backend c10d: at least and at most so many");
  add("--node-rank", flags.node_rank, "N", processes,
      "The number of this machine, from 0 (default)");
  add_flag("--pass-local-rank", flags.pass_local_rank, processes,
           "Append --local_rank=R to the arguments of local rank R's process");
  add_flag("--use-env", flags.use_env, processes, "Do not append it (default)");
  add_flag("--bind-to-cores", flags.bind_to_cores, processes,
           "Give each process cores of its own, which other jobs with this flag do not\n"
           "get; for machines that nothing else uses");
  add_flag("--no-tune-malloc", flags.no_tune_malloc, processes,
           "Do not set MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_, which make\n"
           "malloc keep freed memory for the next training step");
  add_flag("--deterministic", flags.deterministic, processes,
           "Fix what LibTorch's results depend on besides the program: one thread each\n"
           "and the instruction set AVX2, unless their variables are set\n"
           "(docs/determinism.md)");
  add_flag("--as-gloo", flags.as_gloo, processes,
           "Set PACELINE_AS_GLOO=1: in Python, the name \"gloo\" then means the backend\n"
           "paceline; the program's Python needs the package paceline (python/README.md)");
  add("--role", flags.role, "NAME", processes, "ROLE_NAME of the processes (default default)");
  add_flag("-m,--module", flags.module, program, "PROGRAM is a Python module, as for python -m");
  add_flag("--no-python", flags.no_python, program,
           "Start PROGRAM itself, also if its name ends with .py");
  add("--master-addr", flags.master_addr, "HOST", rendezvous,
      "The address of machine 0 in the network; MASTER_ADDR of the processes\n"
      "(default 127.0.0.1)");
  add("--master-port", flags.master_port, "PORT", rendezvous,
      "The port there where the machines meet (default 29500); on one machine\n"
      "MASTER_PORT of the processes (default: a free one)");
  add("--rdzv-backend", flags.rdzv_backend, "NAME", rendezvous,
      "static (default): machines are numbered by --node-rank; c10d: as they come");
  add("--rdzv-endpoint", flags.rdzv_endpoint, "HOST[:PORT]", rendezvous,
      "Where the machines meet (default: --master-addr and --master-port;\n"
      "the default port of c10d is 29400)");
  add("--rdzv-conf", flags.rdzv_conf, "KEY=VALUE,...", rendezvous,
      "join_timeout: seconds for all machines to come (default 600);\n"
      "last_call_timeout: seconds for more than MIN to come (default 30);\n"
      "is_host: 1 if this machine is the endpoint (default: if it has the address)");
  add("--rdzv-id", flags.run_id, "NAME", rendezvous,
      "Name of the job, TORCHELASTIC_RUN_ID of the processes\n"
      "(default: a random one; none with several machines)");
  add("--local-addr", flags.local_addr, "HOST", rendezvous,
      "MASTER_ADDR of the processes if this is machine 0 (default: the endpoint's)");
  add("--secret-file", flags.secret_file, "FILE", rendezvous,
      "File with a secret of at least 16 bytes, the same on all machines, without\n"
      "which none can join (default: the variable PACELINE_SECRET)");
  add_flag("--standalone", flags.standalone, rendezvous, "This machine only (default)");
  add("--max-restarts", flags.max_restarts, "N", stopping,
      "How often all processes are started again after a failure (default 0)");
  add("--failure-grace", flags.failure_grace, "SECONDS", stopping,
      "From the first failure to SIGTERM for the others (default 0.5);\n"
      "a rank that is already failing has --stop-grace to end by itself");
  add("--stop-grace,--shutdown-timeout", flags.stop_grace, "SECONDS", stopping,
      "From SIGTERM, or from Ctrl-C, to SIGKILL (default 30)");
  add("--signals-to-handle", flags.signals, "NAMES", stopping,
      "Signals that are passed on to the processes and end the job\n"
      "(default SIGTERM,SIGINT,SIGHUP,SIGQUIT)");
  add("--local-ranks-filter", flags.local_ranks, "RANKS", output,
      "Show only the output of these ranks, as in 0,1,2 (default: all)");
  app.set_help_flag("-h,--help", "Print this and exit")->group("Other");
  for (const char* const name : kWithoutEffect) {
    app.add_option_function<std::string>(
           name, [&flags, name](const std::string&) { flags.without_effect.emplace_back(name); })
        ->group("");
  }
  app.footer(
      "PROGRAM is started as it is; python3 -u runs one whose name ends with .py, or what\n"
      "PYTHON_EXEC names. Flags may also be spelled with underscores, as in --nproc_per_node,\n"
      "or set as torchrun's variables, PET_NPROC_PER_NODE; flags after the program belong to the\n"
      "program. Each process gets RANK, LOCAL_RANK, WORLD_SIZE and torchrun's other variables,\n"
      "and OMP_NUM_THREADS unless it is set: the cores divided by the processes. paceline run\n"
      "exits with the code of the process that failed first, or with 128 + N if signal N ended\n"
      "it.\n"
      "\n"
      "Example:\n"
      "  paceline run --nproc-per-node 2 ./train --epochs 5\n"
      "On each of two machines, with --node-rank 0 on the one at 10.0.0.1 and 1 on the other:\n"
      "  paceline run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 2 ./train");
}

// The name that CLI11 knows: "--nproc_per_node=2" is "--nproc-per-node=2".
std::string with_dashes(std::string flag) {
  std::replace(flag.begin(),
               flag.begin() + static_cast<std::ptrdiff_t>(std::min(flag.find('='), flag.size())),
               '_', '-');
  return flag;
}

bool takes_value(const CLI::Option& option) {
  return option.get_items_expected_max() > 0;
}

// Separates our flags from the program and its arguments.
struct SplitArguments {
  std::vector<std::string> flags;
  std::vector<const CLI::Option*> given;
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
    result.given.push_back(option);
    if (equals != std::string::npos && !takes_value(*option)) {
      throw UsageError(fmt::format("{}: this flag takes no value", flag));
    }
    if (takes_value(*option) &&
        (equals == std::string::npos ? at == arguments.end() : equals + 1 == flag.size())) {
      throw UsageError(fmt::format("{}: expected a value", flag));
    }
    if (takes_value(*option) && equals == std::string::npos) result.flags.push_back(*at++);
  }
  if (at != arguments.end() && *at == "--") ++at;
  result.command.assign(at, arguments.end());
  return result;
}

// torchrun's variables of flags that paceline run does not have.
void check_unsupported() {
  for (const char* const variable :
       {"PET_LOG_DIR", "PET_REDIRECTS", "PET_TEE", "PET_LOG_LINE_PREFIX_TEMPLATE",
        "PET_DUPLICATE_STDOUT_FILTERS", "PET_DUPLICATE_STDERR_FILTERS", "PET_VIRTUAL_LOCAL_RANK",
        "PET_RUN_PATH"}) {
    const char* const value = std::getenv(variable);
    if (value == nullptr || *value == '\0' || std::string(value) == "0") continue;
    throw UsageError(
        fmt::format("{}={}: paceline run does not have this flag of torchrun's; unset "
                    "the variable",
                    variable, value));
  }
}

// Adds what torchrun's variables set and the command line does not.
void add_variables(const CLI::App& app, SplitArguments& parts, RunFlags& flags) {
  for (const CLI::Option* const option : app.get_options()) {
    if (option->get_lnames().empty() || option == app.get_help_ptr()) continue;
    if (std::ranges::find(parts.given, option) != parts.given.end()) continue;
    for (const std::string& name : option->get_lnames()) {
      std::string variable = "PET_" + name;
      for (char& letter : variable) {
        letter = letter == '-'
                     ? '_'
                     : static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
      }
      const char* const value = std::getenv(variable.c_str());
      if (value == nullptr || *value == '\0') continue;
      flags.variables["--" + option->get_lnames().front()] = variable;
      if (takes_value(*option)) {
        parts.flags.push_back(fmt::format("--{}={}", name, value));
      } else if (const std::string text = value; text == "1") {
        parts.flags.push_back("--" + name);
      } else if (text != "0") {
        throw UsageError(fmt::format("{}={}: expected 0 or 1", variable, value));
      }
      break;
    }
  }
}

}  // namespace

std::optional<std::vector<std::string>> parse_run_flags(const std::vector<std::string>& arguments,
                                                        RunFlags& flags, std::string& help) {
  CLI::App app("Starts a program as several processes, on this machine or on several.");
  describe(app, flags);
  SplitArguments parts = split(app, arguments);
  check_unsupported();
  add_variables(app, parts, flags);
  std::reverse(parts.flags.begin(), parts.flags.end());  // as CLI11 wants them
  try {
    app.parse(parts.flags);
  } catch (const CLI::CallForHelp&) {
    help = app.help();
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  return std::move(parts.command);
}

}  // namespace paceline::app
