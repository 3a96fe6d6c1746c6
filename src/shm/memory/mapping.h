#pragma once

#include <cstddef>
#include <optional>

#include "base/unique_fd.h"
#include "shm/memory/private_in_children.h"

namespace paceline::shm {

// A shared, writable mapping of a whole memfd, zero where nothing was written. Pages take memory
// once they are touched, so a mapping may be far larger than the machine's memory. It is not locked
// where a process locks its memory, and a core dump does not contain it. A forked child has a
// private one: what it writes is its own.
class Mapping {
 public:
  // A new memfd of `size` bytes. Throws Error saying what was needed.
  static base::UniqueFd create_memory(std::size_t size);

  explicit Mapping(base::UniqueFd memory);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

  // Marks the memory as open in this process, under a number of its own. The mark is a lock on that
  // byte of the file, which ends with the process and when it executes another program, and which
  // forked children do not have. False if the system knows no such locks. It is a POSIX record
  // lock: closing any other descriptor of this memfd in this process would drop it.
  bool mark_open(int number);
  // Whether another process has it open under this number; true if that cannot be found out.
  bool is_open_elsewhere(int number) const;

 private:
  base::UniqueFd memory_;
  std::byte* data_;
  std::size_t size_;
  std::optional<PrivateInChildren> private_in_children_;
};

}  // namespace paceline::shm
