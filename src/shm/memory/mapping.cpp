#include "shm/memory/mapping.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include <paceline/error.h>

#include "base/errno_error.h"

namespace paceline::shm {
namespace {

// A lock of the process: one of the open file would be shared with forked children.
struct flock lock_of(int number) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = number;
  lock.l_len = 1;
  return lock;
}

}  // namespace

base::UniqueFd Mapping::create_memory(std::size_t size) {
  base::UniqueFd memory(::memfd_create("paceline", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory) throw base::errno_error("cannot create shared memory with memfd_create");
  rlimit most{};
  if (::getrlimit(RLIMIT_FSIZE, &most) == 0 && size > most.rlim_cur) {  // a signal would end us
    throw Error(fmt::format(
        "cannot size shared memory to {} bytes: files are limited to {} KiB, raise the limit with "
        "ulimit -f",
        size, most.rlim_cur / 1024));
  }
  if (::ftruncate(memory.get(), static_cast<off_t>(size)) != 0) {
    throw base::errno_error(fmt::format("cannot size shared memory to {} bytes", size));
  }
  // No rank can shrink it under the others, which would turn their accesses into SIGBUS.
  if (::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw base::errno_error("cannot seal shared memory");
  }
  return memory;
}

Mapping::Mapping(base::UniqueFd memory) : memory_(std::move(memory)) {
  struct stat status {};
  if (::fstat(memory_.get(), &status) != 0) throw base::errno_error("cannot inspect shared memory");
  size_ = static_cast<std::size_t>(status.st_size);
  // Without access at first: in a process that locks its future memory (mlockall), all of it would
  // be allocated at once otherwise.
  void* const address =
      ::mmap(nullptr, size_, PROT_NONE, MAP_SHARED | MAP_NORESERVE, memory_.get(), 0);
  if (address == MAP_FAILED) {
    const bool too_large = errno == ENOMEM;
    const Error error =
        base::errno_error(fmt::format("cannot map {} bytes of shared memory", size_));
    rlimit limit{};
    if (!too_large || ::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
      throw error;
    throw Error(
        fmt::format("{}; address space is limited to {} KiB, raise the limit with ulimit -v",
                    error.what(), limit.rlim_cur >> 10));
  }
  ::munlock(address, size_);
  if (::mprotect(address, size_, PROT_READ | PROT_WRITE) != 0) {
    const Error error = base::errno_error("cannot access shared memory");
    ::munmap(address, size_);
    throw error;
  }
  // Dumping core would allocate the pages that nobody has touched: all memory of the machine.
  ::madvise(address, size_, MADV_DONTDUMP);
  data_ = static_cast<std::byte*>(address);
  private_in_children_.emplace(data_, size_, memory_.get());
}

Mapping::~Mapping() {
  private_in_children_.reset();
  ::munmap(data_, size_);
}

bool Mapping::mark_open(int number) {
  struct flock lock = lock_of(number);
  return ::fcntl(memory_.get(), F_SETLK, &lock) == 0;
}

bool Mapping::is_open_elsewhere(int number) const {
  struct flock lock = lock_of(number);
  return ::fcntl(memory_.get(), F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace paceline::shm
