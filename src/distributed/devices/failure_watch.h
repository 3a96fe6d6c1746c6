#pragma once

#include <functional>
#include <memory>
#include <string>

#include "distributed/backend.h"
#include "shm/sync/fork_generation.h"

namespace paceline::distributed {

// For a backend on an accelerator, whose calls do not end if a rank is lost, and then block
// whatever waits for the accelerator. Calls `abort` once, on a thread of its own, if the group of
// the backend for CPU tensors, `host`, has lost a rank or failed, and logs a warning that names the
// group.
class FailureWatch {
 public:
  FailureWatch(c10::intrusive_ptr<ExtendedBackend> host, std::string group,
               std::function<void()> abort);
  FailureWatch(const FailureWatch&) = delete;
  FailureWatch& operator=(const FailureWatch&) = delete;
  // Waits for `abort` if it runs.
  ~FailureWatch();

 private:
  class Thread;

  std::unique_ptr<Thread> thread_;
  shm::OwningProcess process_;
};

}  // namespace paceline::distributed
