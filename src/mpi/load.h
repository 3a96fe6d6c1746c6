#pragma once

#include <optional>
#include <string>
#include <vector>

#include "mpi/library.h"

namespace paceline::mpi {

// The MPIs for which there is a plug-in beside this library: "mpich", "openmpi".
std::vector<std::string> available();

// Loads a plug-in, which stays loaded. Without a name: that of the MPI that the program has loaded;
// else the only one there is; else that of the MPI whose launcher started this process. Throws
// UsageError if there is none, or if it is another MPI than the program's.
Library& load(const std::optional<std::string>& name);

}  // namespace paceline::mpi
