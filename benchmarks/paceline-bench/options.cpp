#include "options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>

#include <paceline/error.h>

#include "shm/region.h"

namespace paceline::bench {
namespace {

constexpr int kMinRounds = 5;  // the 90 % interval is from end to end then; fewer have none
constexpr int kQuickRounds = 30;
constexpr int kMaxRounds = 100'000;
constexpr int kMaxThreads = 1024;
constexpr int kMaxLogicalRanks = 64;  // see DdpOptions
constexpr std::int64_t kMaxBytes = std::int64_t{4} << 30;

constexpr const char* kFooter =
    R"(Implementations take turns, round by round: MPI and Python in processes of their own, all others
in the same ones. malloc is tuned as under `paceline run`. Each rank of a collective runs on a
core of its own, if there are enough. All ranks wait for each other before the clock starts.
Times are the slowest rank's; "cpu" is the CPU time of all ranks together. "over X" is how many
times faster than X: the median of the rounds and its 90 % confidence interval. "best MPI" is the
MPI library with the lowest median of the row. Run it on a machine that does nothing else.

Under mpirun, as in `mpirun -n 2 paceline bench ddp`, its processes are the ranks, which also
measure the backend mpi.)";

constexpr std::int64_t operator""_K(unsigned long long n) {
  return static_cast<std::int64_t>(n) << 10;
}
constexpr std::int64_t operator""_M(unsigned long long n) {
  return static_cast<std::int64_t>(n) << 20;
}

void describe(CLI::App& app, Options& options) {
  app.require_subcommand(1);
  app.set_help_all_flag("--help-all");
  app.get_option("--help-all")->group("");
  app.fallthrough();
  app.add_option("--ranks", options.ranks,
                 "Numbers of ranks, a job for each (default 2, collectives also 4 and 8,\n"
                 "launch also 8)")
      ->delimiter(',')
      ->type_name("N");
  CLI::Option* const nodes =
      app.add_option("--nodes", options.nodes,
                     "Divide the ranks among so many nodes, which are network namespaces of this\n"
                     "machine; takes root (default 1; ranks then 1, 2 and 4 on each, quick 2)");
  nodes->type_name("N");
  app.add_option("--link", options.link,
                 "The rate of a node's link in each direction, as tc(8) writes it (default\n"
                 "1gbit)")
      ->needs(nodes)
      ->check(CLI::Validator(
          [](const std::string& rate) {
            return std::ranges::all_of(rate, [](unsigned char c) { return std::isalnum(c) != 0; })
                       ? ""
                       : "expected a rate such as 1gbit or 100mbit";
          },
          ""))
      ->type_name("RATE");
  app.add_option(
         "--rounds", options.rounds,
         fmt::format(
             "Rounds; each implementation has a turn in each (default 40, quick {}; launch 10\n"
             "and {}, the minimum)",
             kQuickRounds, kMinRounds))
      ->type_name("N");
  app.add_option("--threads", options.threads, "Threads of each rank (default 1)")->type_name("N");
  app.add_option("--json", options.json, "Write all rows to this file")->type_name("FILE");
  app.add_flag("--quick", options.quick, "A selection that takes less than a minute");
  // How this program starts its ranks.
  app.add_flag("--worker", options.worker)->group("");
  app.add_option("--node-processes", options.node_processes)->delimiter(',')->group("");
  app.footer(kFooter);
  CLI::App* const collectives =
      app.add_subcommand("collectives", "Collectives of float32, 2 to 8 ranks, 4 bytes to 25 MiB");
  collectives
      ->add_option("--collectives", options.collectives,
                   fmt::format("Collectives: {} (default all; quick all_reduce)",
                               fmt::join(kCollectives, ", ")))
      ->delimiter(',')
      ->type_name("NAME");
  collectives->add_option("--bytes", options.bytes, "Sizes, as in 4,64KB,25MB (KB: 1024 bytes)")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(false))
      ->type_name("SIZE");
  collectives
      ->add_option("--mpi", options.mpi,
                   fmt::format("MPI libraries to compare with, of those that `make peers` fetched: "
                               "{}, all (default) or none",
                               fmt::join(kMpiLibraries, ", ")))
      ->delimiter(',')
      ->type_name("NAME");
  CLI::App* const ddp = app.add_subcommand("ddp", "A training step of some models, 2 ranks");
  ddp->add_option("--models", options.models, "Models, or all")->delimiter(',')->type_name("NAME");
  ddp->add_option("--micro-batches", options.micro_batches,
                  "Measure steps of so many batches instead: accumulated under no_sync, and as "
                  "logical ranks")
      ->type_name("N");
  ddp->add_option("--python", options.python,
                  "The Python of python_ddp_gloo, and of python_ddp_paceline and "
                  "python_paceline_ddp if it has the package paceline (default python3)")
      ->take_last()
      ->type_name("PROGRAM");
  ddp->add_option("--python-backends", options.python_backends)->delimiter(',')->group("");
  CLI::App* const launch = app.add_subcommand(
      "launch", "Whole jobs: start, meet in a barrier, leave; 2 and 8 ranks, beside torchrun");
  launch
      ->add_option("--python", options.python,
                   "The Python of torchrun (default python3, if it can import torch)")
      ->take_last()
      ->type_name("PROGRAM");
  for (CLI::App* const one : {collectives, ddp, launch}) {
    one->footer("Takes the options of `paceline bench --help` too.\n\n" + app.get_footer());
  }
  app.parse_complete_callback([&options, ddp, launch] {
    options.benchmark = launch->parsed()             ? Benchmark::launch
                        : !ddp->parsed()             ? Benchmark::collectives
                        : options.micro_batches == 0 ? Benchmark::ddp
                                                     : Benchmark::accumulation;
  });
}

void check_range(const char* flag, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value < low || value > high) {
    throw UsageError(fmt::format("{} {}: expected {} to {}", flag, value, low, high));
  }
}

// Replaces "all", or no name at all, by all names.
template <typename Names>
void complete_names(const char* flag, std::vector<std::string>& names, const Names& known,
                    const char* others) {
  if (names.empty() || names == std::vector<std::string>{"all"}) {
    names.assign(known.begin(), known.end());
  }
  for (const std::string& name : names) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      throw UsageError(
          fmt::format("{} {}: expected {}, {}", flag, name, fmt::join(known, ", "), others));
    }
  }
}

void set_collectives(Options& options) {
  if (options.collectives.empty() && options.quick) options.collectives = {"all_reduce"};
  complete_names("--collectives", options.collectives, kCollectives, "or all");
}

void set_mpi(Options& options) {
  if (options.nodes > 1) {
    if (!options.mpi.empty()) {
      throw UsageError(
          fmt::format("--mpi with --nodes {}: its ranks are started on one node", options.nodes));
    }
    options.mpi = {"none"};
  }
  if (options.mpi == std::vector<std::string>{"none"}) {
    options.mpi.clear();
  } else {
    complete_names("--mpi", options.mpi, kMpiLibraries, "all or none");
  }
}

void set_models(Options& options, const std::vector<std::string>& known) {
  if (options.models.empty()) {
    options.models = {"tiny_mlp", "lenet", "wide_mlp"};
    if (!options.quick) options.models.emplace_back("resnet18");
  }
  complete_names("--models", options.models, known, "or all");
}

void set_bytes(Options& options) {
  if (options.bytes.empty()) {
    options.bytes = options.quick ? std::vector{std::int64_t{4}, 1_K, 64_K, 1_M, 25_M}
                                  : std::vector{std::int64_t{4}, 1_K, 16_K, 64_K, 1_M, 4_M, 25_M};
  }
  for (const std::int64_t bytes : options.bytes) {
    check_range("--bytes", bytes, 4, kMaxBytes);
    if (bytes % 4 != 0) {
      throw UsageError(
          fmt::format("--bytes {}: expected a multiple of 4, the size of a float32", bytes));
    }
  }
}

// Of `nodes`, before the numbers of ranks.
void check_nodes(const Options& options) {
  constexpr int kMaxNodes = 16;
  check_range("--nodes", options.nodes, 1, kMaxNodes);
  if (options.nodes > 1 && options.benchmark == Benchmark::launch) {
    throw UsageError(fmt::format("--nodes {}: launch measures jobs on one node", options.nodes));
  }
  for (const int ranks : options.ranks) {
    if (ranks % options.nodes == 0) continue;
    throw UsageError(
        fmt::format("--ranks {}: expected multiples of --nodes {}", ranks, options.nodes));
  }
}

void complete(Options& options, const std::vector<std::string>& models) {
  const bool collectives = options.benchmark == Benchmark::collectives;
  const bool launch = options.benchmark == Benchmark::launch;
  options.default_ranks = options.ranks.empty();
  if (options.default_ranks) {
    const int nodes = options.nodes;
    options.ranks = nodes > 1       ? options.quick ? std::vector{2 * nodes}
                                                    : std::vector{nodes, 2 * nodes, 4 * nodes}
                          : options.quick ? std::vector{2}
                    : collectives   ? std::vector{2, 4, 8}
                    : launch        ? std::vector{2, 8}
                                    : std::vector{2};
  }
  if (options.rounds == 0) {
    options.rounds =
        launch ? (options.quick ? kMinRounds : 10) : (options.quick ? kQuickRounds : 40);
  }
  check_nodes(options);
  for (const int ranks : options.ranks) check_range("--ranks", ranks, 1, shm::kMaxRanks);
  check_range("--rounds", options.rounds, kMinRounds, kMaxRounds);
  check_range("--threads", options.threads, 1, kMaxThreads);
  for (const int ranks : options.ranks) {
    check_range("--micro-batches", options.micro_batches, 0, kMaxLogicalRanks / ranks);
  }
  if (launch) return;
  if (collectives) {
    set_collectives(options);
    set_bytes(options);
    set_mpi(options);
  } else {
    set_models(options, models);
  }
}

}  // namespace

std::optional<Options> parse_options(const std::vector<std::string>& arguments,
                                     const std::vector<std::string>& models, std::string& help) {
  CLI::App app("Measures Paceline beside the peers that are installed.", "paceline bench");
  Options options;
  describe(app, options);
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());  // as CLI11 wants them
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp&) {
    help = app.help();
    return std::nullopt;
  } catch (const CLI::CallForAllHelp&) {
    help = app.help("", CLI::AppFormatMode::All);
    return std::nullopt;
  } catch (const CLI::RequiredError&) {  // only a subcommand is required
    throw UsageError(fmt::format("no benchmark in '{}'; expected collectives, ddp or launch",
                                 fmt::join(arguments, " ")));
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  complete(options, models);
  return options;
}

}  // namespace paceline::bench
