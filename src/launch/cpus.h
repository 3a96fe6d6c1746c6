#pragma once

#include <filesystem>
#include <vector>

namespace paceline::launch {

// A CPU as the kernel counts them, and where it is. CPUs with the same `core` are hyper-threads of
// one physical core.
struct Cpu {
  int number;
  int package;
  int node;  // of memory (NUMA)
  int core;  // the lowest number among its hyper-threads
  // The lowest number among the CPUs with the same last-level cache; -1: not described.
  int cache = -1;

  bool operator==(const Cpu&) const = default;
};

// Where the CPUs `numbers` are, from a directory in the format of the Linux kernel. A CPU that is
// not described there is a physical core of its own, in package 0 and on node 0.
std::vector<Cpu> read_cpus(const std::vector<int>& numbers,
                           const std::filesystem::path& root = "/sys/devices/system/cpu");

// CPUs of its own for each of `ranks` ranks, in the order of ranks, the same number for each;
// empty if ranks outnumber CPUs.
//
// With enough physical cores, each rank gets as many whole ones as there are for all, adjacent ones
// and on one package and node where that is possible. Otherwise each gets one CPU, and ranks share
// physical cores only where none is free.
std::vector<std::vector<int>> assign_cpus(const std::vector<Cpu>& cpus, int ranks);

// Where torchrun's --numa-binding keeps a rank: on a NUMA node, a package, cores of its own on a
// node, or the cores of a last-level cache.
enum class NumaBinding { node, socket, exclusive, core_complex };

struct NumaCpus {
  std::vector<std::vector<int>> cpus;  // of each rank
  int domains = 0;                     // nodes, packages or caches that were dealt out
};

// CPUs for each of `ranks` ranks, at least 1, in the order of ranks. The domains are dealt out
// evenly: ranks that follow each other share one, or each has one to itself.
//
// Throws UsageError if a node has fewer physical cores than ranks that are to have cores of their
// own there, or if there are no CPUs.
NumaCpus bind_to_numa(const std::vector<Cpu>& cpus, int ranks, NumaBinding binding);

}  // namespace paceline::launch
