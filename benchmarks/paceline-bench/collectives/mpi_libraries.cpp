#include "collectives/mpi_libraries.h"

#include <fmt/format.h>

#include <filesystem>
#include <map>
#include <vector>

#include "base/cores.h"

namespace paceline::bench {
namespace {

namespace fs = std::filesystem;

struct Library {
  std::string program;  // see mpi.cpp
  // A rank that waits lets the others of its core run.
  bool yields = true;
  std::vector<std::string> variables = {};
  std::vector<std::string> flags = {};  // of its mpiexec
};

// Ranks bind themselves to cores (PinnedThread), as ours do.
const Library& find_library(const std::string& name) {
  static const std::map<std::string, Library> libraries{
      {"mpich", {.program = "paceline-bench-mpi-abi", .yields = false}},
      {"intel_mpi",
       {.program = "paceline-bench-mpi-abi", .variables = {"I_MPI_FABRICS=shm", "I_MPI_PIN=0"}}},
      {"openmpi",
       {.program = "paceline-bench-openmpi",
        .variables = {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"},
        .flags = {"--bind-to", "none", "--oversubscribe"}}}};
  return libraries.at(name);
}

}  // namespace

std::string why_absent(const std::string& library, int ranks, const fs::path& directory) {
  const Library& found = find_library(library);
  const auto cores = static_cast<int>(base::affinity().size());
  if (!found.yields && ranks > cores) {
    return fmt::format("its waits do not yield, and {} ranks share {} cores", ranks, cores);
  }
  if (!fs::exists(directory / library / "bin/mpiexec") ||
      !fs::exists(beside_this_program(found.program))) {
    return "`make peers` fetches and builds it";
  }
  return "";
}

PeerProgram mpi_program(const std::string& library, int ranks, const std::string& collective,
                        const std::string& bytes) {
  const Library& found = find_library(library);
  const std::string root = fs::path(kMpiDirectory) / library;
  // Wheels are not where their libraries were built to be.
  std::vector<std::string> command{"env", "LD_LIBRARY_PATH=" + root + "/lib", "OPAL_PREFIX=" + root,
                                   "I_MPI_ROOT=" + root, "FI_PROVIDER_PATH=" + root + "/lib"};
  const auto append = [&](const std::vector<std::string>& words) {
    command.insert(command.end(), words.begin(), words.end());
  };
  append(found.variables);
  append({root + "/bin/mpiexec"});
  append(found.flags);
  append({"-n", std::to_string(ranks), beside_this_program(found.program), collective, bytes});
  return {library, command, "--mpi selects the MPI libraries to measure"};
}

}  // namespace paceline::bench
