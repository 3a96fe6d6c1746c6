#include "shm/membership/cross_memory_reader.h"

#include <sys/uio.h>

#include <algorithm>
#include <bit>
#include <random>

#include "shm/memory/copy.h"
#include "shm/sync/fault_point.h"

namespace paceline::shm {
namespace {

// The kernel copies no more than 2 GiB at a time.
constexpr std::size_t kMostAtOnce = std::size_t{1} << 30;

std::uint64_t random_mark() {
  std::random_device random;
  return std::uint64_t{random()} << 32 | random();
}

void* pointer(std::uint64_t address) {
  return std::bit_cast<void*>(static_cast<std::uintptr_t>(address));
}

}  // namespace

CrossMemoryReader::CrossMemoryReader(RegionMemory& memory,
                                     std::shared_ptr<const Membership> membership, int rank)
    : memory_(memory), membership_(std::move(membership)), mark_(random_mark()) {
  RankBlock& own = memory_.rank_block(rank);
  own.mark = mark_;
  own.mark_address = reinterpret_cast<std::uintptr_t>(&mark_);
}

bool CrossMemoryReader::read(int from, std::uint64_t address, void* target,
                             std::size_t bytes) const {
  const pid_t process = membership_->peers[static_cast<std::size_t>(from)].pid;
  if (process == 0) return false;
  const RankBlock& peer = memory_.rank_block(from);
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t size = std::min(bytes - done, kMostAtOnce);
    std::uint64_t mark = 0;
    fault_point();
    const iovec local[] = {{advance(target, done), size}, {&mark, sizeof(mark)}};
    const iovec remote[] = {{pointer(address + done), size},
                            {pointer(peer.mark_address), sizeof(mark)}};
    const ssize_t copied = ::process_vm_readv(process, local, 2, remote, 2, 0);
    if (copied != static_cast<ssize_t>(size + sizeof(mark)) || mark != peer.mark) return false;
    done += size;
  }
  return true;
}

}  // namespace paceline::shm
