#pragma once

/// @file
/// The world in a program that uses MPI. Everything is inline, for the MPI with which the program
/// is compiled; the library itself has none. <paceline/paceline.h> does not include this.

#include <mpi.h>

#include <paceline/communicator.h>
#include <paceline/error.h>

#include <climits>
#include <concepts>
#include <cstddef>
#include <string>
#include <utility>

namespace paceline {

namespace detail {

#if defined(OPEN_MPI)
inline constexpr const char* kMpiLibrary = "openmpi";
#else
inline constexpr const char* kMpiLibrary = "mpich";
#endif

inline void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(std::string(call) +
              " failed: " + std::string(text, static_cast<std::size_t>(length)));
}

inline void check_usable(MPI_Comm communicator) {
  int begun = 0;
  int over = 0;
  check_mpi(MPI_Initialized(&begun), "MPI_Initialized");
  check_mpi(MPI_Finalized(&over), "MPI_Finalized");
  if (begun == 0 || over != 0) {
    throw UsageError("init_process_group needs MPI between MPI_Init and MPI_Finalize");
  }
  if (communicator == MPI_COMM_NULL) {
    throw UsageError(
        "init_process_group(MPI_COMM_NULL): this process is not in the communicator; only those "
        "that are call it");
  }
  int is_inter = 0;
  check_mpi(MPI_Comm_test_inter(communicator, &is_inter), "MPI_Comm_test_inter");
  if (is_inter != 0) {
    throw UsageError(
        "init_process_group was given an inter-communicator: merge it with MPI_Intercomm_merge");
  }
}

}  // namespace detail

/// What a communicator of MPI says. Collective over it. `communicator` must live as long as the
/// result is used, and with the backend or the engine mpi as long as the world. Throws UsageError
/// for MPI_COMM_NULL and inter-communicators, or if MPI is not initialized; Error if a call of MPI
/// fails and MPI's error handler lets it return.
[[nodiscard]] inline Communicator communicator_of(MPI_Comm communicator) {
  using detail::check_mpi;
  detail::check_usable(communicator);
  int rank = 0;
  int size = 0;
  int local_size = 0;
  MPI_Comm local = MPI_COMM_NULL;
  check_mpi(MPI_Comm_rank(communicator, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(communicator, &size), "MPI_Comm_size");
  check_mpi(MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &local),
            "MPI_Comm_split_type");
  check_mpi(MPI_Comm_size(local, &local_size), "MPI_Comm_size");
  check_mpi(MPI_Comm_free(&local), "MPI_Comm_free");
  return {rank, size, local_size == size,
          [communicator](void* data, std::size_t bytes) {
            if (bytes > INT_MAX) throw UsageError("a broadcast of more than 2 GiB");
            check_mpi(MPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, 0, communicator),
                      "MPI_Bcast");
          },
          MpiHandle{detail::kMpiLibrary, static_cast<int>(MPI_Comm_c2f(communicator))}};
}

/// Forms the world of a communicator's ranks: `init_process_group(MPI_COMM_WORLD)`. Collective over
/// it, after MPI_Init and on any thread that may call MPI. Afterwards the world does not use MPI,
/// unless the backend is mpi. So MPI needs no support of threads, and MPI_Finalize may come before
/// or after the world ends.
///
/// Sub-communicators form worlds of their own, side by side. Processes that do not train have
/// MPI_COMM_NULL (MPI_Comm_split with MPI_UNDEFINED) and do not call this.
///
/// Throws as init_process_group(const Communicator&) and communicator_of do. Where MPI_Comm is an
/// int, as in MPICH, any int is taken for a communicator.
template <std::same_as<MPI_Comm> Handle>
[[nodiscard]] World init_process_group(Handle communicator, InitOptions options = {}) {
  return init_process_group(communicator_of(communicator), std::move(options));
}

}  // namespace paceline
