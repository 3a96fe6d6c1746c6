#include "node/mapping.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/errno_error.h"

namespace paceline::node {

base::UniqueFd Mapping::create_memory(std::size_t size) {
  base::UniqueFd memory(::memfd_create("paceline", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory) throw base::errno_error("cannot create shared memory with memfd_create");
  if (::ftruncate(memory.get(), static_cast<off_t>(size)) != 0) {
    throw base::errno_error(fmt::format("cannot size shared memory to {} bytes", size));
  }
  // No rank can shrink it under the others, which would turn their accesses into SIGBUS.
  if (::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw base::errno_error("cannot seal shared memory");
  }
  return memory;
}

Mapping::Mapping(base::UniqueFd memory, std::size_t size) : size_(size) {
  struct stat status {};
  if (::fstat(memory.get(), &status) != 0) throw base::errno_error("cannot inspect shared memory");
  if (static_cast<std::size_t>(status.st_size) != size) {
    throw Error(fmt::format("the shared memory offered by rank 0 has {} bytes, not {}",
                            status.st_size, size));
  }
  void* const address =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory.get(), 0);
  if (address == MAP_FAILED) {
    throw base::errno_error(fmt::format("cannot map {} bytes of shared memory", size));
  }
  data_ = static_cast<std::byte*>(address);
}

Mapping::~Mapping() {
  ::munmap(data_, size_);
}

}  // namespace paceline::node
