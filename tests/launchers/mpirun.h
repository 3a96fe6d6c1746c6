#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace paceline::test {

using Variables = std::vector<std::pair<std::string, std::string>>;

// Open MPI refuses root without them; others ignore them.
inline const Variables kAllowRoot{{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                  {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}};

// The mpirun of a library, for any number of ranks on any cores.
inline std::vector<std::string> mpirun(const std::string& path, bool is_openmpi) {
  if (!is_openmpi) return {path};
  return {path, "--oversubscribe", "--bind-to", "none"};
}

// mpi_program.cpp for a library, "mpich" or "openmpi".
inline std::string mpi_program(const std::string& library) {
  return MPI_PROGRAM + library;
}

// Why it is not there; empty if it is.
inline std::string why_no_mpi_program(const std::string& library) {
  return std::filesystem::exists(mpi_program(library)) ? "" : "Debian has lib" + library + "-dev";
}

}  // namespace paceline::test
