#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <paceline/distributed.h>

#include "support/cases.h"
#include "support/process_ranks.h"

namespace paceline::test {

// The backends of tests over several ranks.
std::vector<std::string> backends();
// For run_torch_ranks: the backend paceline with ranks on two nodes, of which the first has as many
// as the second or one more.
inline constexpr const char* kAcrossNodes = "hierarchical";
inline constexpr const char* kMpi = "mpi";
// The same, with MPI between the nodes.
inline constexpr const char* kMpiAcrossNodes = "mpiNodes";

// The backend paceline with the ranks that a launcher has started.
inline constexpr const char* kLaunched = "launched";

// If mpirun or a launcher has started ranks of this program to run tests in them: the only case of
// its tests of worlds, kMpi, kMpiAcrossNodes or kLaunched and the number of ranks. Then
// run_torch_ranks runs bodies in this process.
std::optional<WorldCase> launched_world();

// Sets this process's variables as a launcher does that has started the ranks on two nodes.
void pretend_nodes(int rank, int size);

// What a body needs for init_process_group.
struct RankContext {
  int rank;
  int size;
  InitOptions init;  // for init_process_group
};

// Runs `body` in `size` processes with one thread each, whose store is in memory.
std::vector<RankEnd> run_torch_ranks(int size, const std::string& backend,
                                     const std::function<std::string(const RankContext&)>& body);

// Runs bodies without a result in a world, and expects every rank to exit cleanly.
void expect_torch_ranks(int size, const std::string& backend,
                        const std::function<void(int rank, int size)>& body);

}  // namespace paceline::test
