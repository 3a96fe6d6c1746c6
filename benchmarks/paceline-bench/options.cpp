#include "options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include <paceline/error.h>

#include "describe_options.h"
#include "nodes/rate.h"
#include "shm/region.h"

namespace paceline::bench {
namespace {

constexpr int kMaxRounds = 100'000;
constexpr int kMaxThreads = 1024;
constexpr int kMaxLogicalRanks = 64;  // see DdpOptions
constexpr int kMaxNodes = 16;
constexpr int kMaxDrawnRanks = 8;  // their contents fit into a line
constexpr const char* kNoLink = "none";
constexpr std::int64_t kMaxBytes = std::int64_t{4} << 30;

constexpr std::int64_t operator""_K(unsigned long long n) {
  return static_cast<std::int64_t>(n) << 10;
}
constexpr std::int64_t operator""_M(unsigned long long n) {
  return static_cast<std::int64_t>(n) << 20;
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

void check_bytes(const std::vector<std::int64_t>& sizes) {
  for (const std::int64_t bytes : sizes) {
    check_range("--bytes", bytes, 4, kMaxBytes);
    if (bytes % 4 != 0) {
      throw UsageError(
          fmt::format("--bytes {}: expected a multiple of 4, the size of a float32", bytes));
    }
  }
}

void set_bytes(Options& options) {
  if (options.bytes.empty()) {
    options.bytes = options.quick ? std::vector{std::int64_t{4}, 1_K, 64_K, 1_M, 25_M}
                                  : std::vector{std::int64_t{4}, 1_K, 16_K, 64_K, 1_M, 4_M, 25_M};
  }
  check_bytes(options.bytes);
}

// Of `nodes` and their link, before the numbers of ranks.
void set_nodes(Options& options) {
  const bool topology = options.benchmark == Benchmark::topology;
  check_range("--nodes", options.nodes, 1, kMaxNodes);
  if (options.nodes > 1 && options.benchmark == Benchmark::launch) {
    throw UsageError(fmt::format("--nodes {}: launch measures jobs on one node", options.nodes));
  }
  if (options.nodes > 1 && topology) {
    throw UsageError(
        fmt::format("--nodes {}: topology puts each rank on a node; give --ranks", options.nodes));
  }
  if (!options.link.empty() && options.nodes == 1 && !topology) {
    throw UsageError(
        fmt::format("--link {} without --nodes: ranks on one node have no link", options.link));
  }
  if (options.link.empty()) options.link = topology ? "100mbit" : "1gbit";
  if (options.link != kNoLink || !topology) static_cast<void>(bytes_per_second(options.link));
  for (const int ranks : options.ranks) {
    if (ranks % options.nodes == 0) continue;
    throw UsageError(
        fmt::format("--ranks {}: expected multiples of --nodes {}", ranks, options.nodes));
  }
}

void set_topology(Options& options) {
  complete_names("--algorithms", options.algorithms, kAlgorithms, "or all");
  for (const int ranks : options.ranks) {
    check_range("--ranks", ranks, 2, has_links(options) ? kMaxNodes : shm::kMaxRanks);
  }
  if (options.bytes.empty()) options.bytes = {1_M};
  check_bytes(options.bytes);
}

void complete(Options& options, const std::vector<std::string>& models) {
  const bool collectives = options.benchmark == Benchmark::collectives;
  const bool topology = options.benchmark == Benchmark::topology;
  const bool launch = options.benchmark == Benchmark::launch;
  options.default_ranks = options.ranks.empty();
  if (options.default_ranks) {
    const int nodes = options.nodes;
    options.ranks = topology ? options.quick ? std::vector{2, 4} : std::vector{2, 3, 4, 5, 6, 7, 8}
                    : nodes > 1     ? options.quick ? std::vector{2 * nodes}
                                                    : std::vector{nodes, 2 * nodes, 4 * nodes}
                        : options.quick ? std::vector{2}
                    : collectives   ? std::vector{2, 4, 8}
                    : launch        ? std::vector{2, 8}
                                    : std::vector{2};
  }
  if (options.rounds == 0) {
    const bool slow = launch || topology;
    options.rounds = slow ? (options.quick ? kMinRounds : 10) : (options.quick ? kQuickRounds : 40);
  }
  set_nodes(options);
  for (const int ranks : options.ranks) check_range("--ranks", ranks, 1, shm::kMaxRanks);
  check_range("--rounds", options.rounds, kMinRounds, kMaxRounds);
  check_range("--threads", options.threads, 1, kMaxThreads);
  for (const int ranks : options.ranks) {
    check_range("--micro-batches", options.micro_batches, 0, kMaxLogicalRanks / ranks);
  }
  if (launch) return;
  if (topology) {
    if (options.draw_ring) check_range("--draw-ring", *options.draw_ring, 2, kMaxDrawnRanks);
    set_topology(options);
  } else if (collectives) {
    set_collectives(options);
    set_bytes(options);
    set_mpi(options);
  } else {
    set_models(options, models);
  }
}

}  // namespace

bool has_links(const Options& options) {
  return options.benchmark == Benchmark::topology ? options.link != kNoLink : options.nodes > 1;
}

int nodes_of(const Options& options, int ranks) {
  return options.benchmark == Benchmark::topology && has_links(options) ? ranks : options.nodes;
}

std::optional<Options> parse_options(const std::vector<std::string>& arguments,
                                     const std::vector<std::string>& models, std::string& help) {
  CLI::App app("Measures Paceline beside the peers that are installed.", "paceline bench");
  Options options;
  describe_options(app, options);
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
    throw UsageError(
        fmt::format("no benchmark in '{}'; expected collectives, ddp, launch or topology",
                    fmt::join(arguments, " ")));
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  complete(options, models);
  return options;
}

}  // namespace paceline::bench
