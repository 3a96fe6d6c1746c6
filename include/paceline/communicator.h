#pragma once

/// @file
/// The world of ranks that can already reach each other. <paceline/mpi.h> makes it of MPI's.

#include <paceline/api.h>
#include <paceline/distributed.h>
#include <paceline/error.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <utility>

namespace paceline {

/// A communicator of MPI.
struct MpiHandle {
  std::string library;  ///< "openmpi", or "mpich" for all libraries with its ABI.
  int fortran_handle;   ///< What MPI_Comm_c2f returns.
};

/// What another runtime, such as MPI, knows of the ranks that are to form a world.
class Communicator {
 public:
  /// Copies `bytes` bytes at `data` on rank 0 to `data` on all other ranks. Collective.
  using Broadcast = std::function<void(void* data, std::size_t bytes)>;

  /// `rank` of `size`, from 0. `one_machine`: whether all ranks are on one, which rank 0 has to
  /// know. `mpi`: for the backend and the engine mpi, which otherwise use MPI_COMM_WORLD. It must
  /// live as long as the world. Throws UsageError for an empty function.
  Communicator(int rank, int size, bool one_machine, Broadcast broadcast,
               std::optional<MpiHandle> mpi = {})
      : rank_(rank),
        size_(size),
        one_machine_(one_machine),
        broadcast_(std::move(broadcast)),
        mpi_(std::move(mpi)) {
    if (!broadcast_) throw UsageError("a Communicator needs a function that broadcasts");
  }

  [[nodiscard]] int rank() const { return rank_; }                 ///< this process's, from 0
  [[nodiscard]] int size() const { return size_; }                 ///< how many ranks there are
  [[nodiscard]] bool one_machine() const { return one_machine_; }  ///< whether all are on one

  /// If it is a communicator of MPI.
  [[nodiscard]] const std::optional<MpiHandle>& mpi() const { return mpi_; }
  /// Calls the function that the communicator was made with.
  void broadcast(void* data, std::size_t bytes) const { broadcast_(data, bytes); }

 private:
  int rank_;
  int size_;
  bool one_machine_;
  Broadcast broadcast_;
  std::optional<MpiHandle> mpi_;
};

/// Forms the world of a communicator's ranks, with their numbers. Collective over them; broadcasts
/// once, and uses the communicator for nothing else. The broadcast has the communicator's own time
/// limit, if any; options.timeout counts from then on.
///
/// Ranks of one machine open no port. Otherwise rank 0 serves a store at a free port of the address
/// that MASTER_ADDR names, if its machine has it; else of the address that its machine's name
/// resolves to; else of its only address in a network.
///
/// Throws as the other init_process_group does, and UsageError if the options give the ranks or
/// their rendezvous, too. All ranks throw what rank 0 throws before the broadcast.
[[nodiscard]] PACELINE_API World init_process_group(const Communicator& communicator,
                                                    InitOptions options = {});

}  // namespace paceline
