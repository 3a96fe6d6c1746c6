#pragma once

#include <filesystem>
#include <string>

#include "measure/external_peer.h"

namespace paceline::bench {

// Where `make peers` puts MPI libraries.
inline constexpr const char* kMpiDirectory = PACELINE_MPI_DIRECTORY;

// Why the MPI library, one of kMpiLibraries, cannot be a peer with `ranks` ranks, and what to do;
// "" if it can.
std::string why_absent(const std::string& library, int ranks,
                       const std::filesystem::path& directory = kMpiDirectory);

// Starts the ranks of a library that is not absent: `collective` on `bytes` bytes.
PeerProgram mpi_program(const std::string& library, int ranks, const std::string& collective,
                        const std::string& bytes);

}  // namespace paceline::bench
