#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace paceline::bench {

enum class Benchmark { collectives, ddp, accumulation, launch, topology };

inline constexpr std::array kCollectives{"all_reduce",     "reduce", "broadcast", "all_gather",
                                         "reduce_scatter", "gather", "scatter",   "all_to_all",
                                         "send_recv",      "barrier"};

// Of an all-reduce.
inline constexpr std::array kAlgorithms{"all_reduce", "ring", "naive", "parameter_server",
                                        "sharded_server"};

inline constexpr std::array kMpiLibraries{"mpich", "intel_mpi", "openmpi"};

struct Options {
  Benchmark benchmark = Benchmark::collectives;
  bool quick = false;
  std::vector<int> ranks;      // numbers of ranks, one job for each
  bool default_ranks = false;  // they were not given
  int nodes = 1;               // that the ranks are on, as many on each
  std::string link;            // the rate of a node's link, as tc(8) writes it; topology: or none
  std::vector<std::string> collectives;
  std::vector<std::int64_t> bytes;      // collectives; topology, which has one
  std::vector<std::string> algorithms;  // topology: of kAlgorithms
  std::vector<std::string> mpi;         // collectives: of kMpiLibraries
  std::vector<std::string> models;      // ddp, accumulation
  int micro_batches = 0;                // accumulation
  int rounds = 0;
  int threads = 1;                           // of each rank
  std::string json;                          // the file to write; empty: none
  std::string svg;                           // topology: the same
  std::optional<int> draw_ring;              // topology: of so many ranks, instead of measuring
  std::string python;                        // with torch, for its peers; empty: python3
  std::vector<std::string> python_backends;  // the backends that this Python has
  bool worker = false;                       // this process is one of the ranks
  std::vector<int> node_processes;           // of the Network that it is in, if there are nodes
};

// Whether the ranks of a job are on several nodes.
bool has_links(const Options& options);
// On how many, for so many ranks.
int nodes_of(const Options& options, int ranks);

// Translates the arguments after the program's name; `models` are the known ones. Empty if they ask
// for help; `help` is its text then. Throws UsageError naming the flag, its value and what is
// allowed.
std::optional<Options> parse_options(const std::vector<std::string>& arguments,
                                     const std::vector<std::string>& models, std::string& help);

}  // namespace paceline::bench
