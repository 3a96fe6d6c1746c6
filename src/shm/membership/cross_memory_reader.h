#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "shm/membership/bootstrap.h"
#include "shm/memory/region_memory.h"

namespace paceline::shm {

// Reads the private memory of other ranks' processes with process_vm_readv(2), "cross-memory
// attach": one copy, which the reader makes. Yama, seccomp or user namespaces may forbid it.
class CrossMemoryReader {
 public:
  // Publishes where this rank's process has its mark, a random number. Others read it along with
  // the data, from the same address space: the data are a rank's only if its mark is. A process id
  // may be that of a process in another namespace, or be used again after the rank's end, and the
  // rank's process may have executed another program.
  CrossMemoryReader(RegionMemory& memory, std::shared_ptr<const Membership> membership, int rank);

  // Copies `bytes` from `address` in the process of another rank, which has published a round.
  // False if that is not possible; then `target` may hold anything.
  bool read(int from, std::uint64_t address, void* target, std::size_t bytes) const;

 private:
  RegionMemory& memory_;
  std::shared_ptr<const Membership> membership_;
  std::uint64_t mark_;
};

}  // namespace paceline::shm
