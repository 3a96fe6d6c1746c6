#pragma once

namespace paceline::shm {

// Differs between a process and its forked children, from the first call on.
unsigned fork_generation();

// Remembers the process that made it. Shared memory, threads and descriptors of a group belong to
// that process; in a forked child every destructor leaves them alone.
class OwningProcess {
 public:
  bool is_forked_child() const { return fork_generation() != generation_; }

 private:
  unsigned generation_ = fork_generation();
};

}  // namespace paceline::shm
