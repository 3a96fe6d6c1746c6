#pragma once

#include <mutex>
#include <optional>
#include <string>

#include "mpi/library.h"

namespace paceline::mpi {

// MPI in this process, which has one. Any thread may call it through this.
class Runtime {
 public:
  // Loads and initialises MPI at the first call. Throws UsageError as load() does, or if MPI does
  // not let several threads call it.
  static Runtime& get(const std::optional<std::string>& name);

  // Calls MPI on one thread at a time. `body` must not wait. Throws UsageError if MPI is finalized.
  template <typename Body>
  decltype(auto) call(Body&& body) {
    check_not_finalized();
    const std::lock_guard lock(mutex_);
    return body(library_);
  }
  // The same for what waits for other ranks: then other threads call MPI, too, if it lets them.
  template <typename Body>
  decltype(auto) call_and_wait(Body&& body) {
    check_not_finalized();
    std::unique_lock lock(mutex_, std::defer_lock);
    if (library_.threads() != Library::Threads::multiple) lock.lock();
    return body(library_);
  }
  // MPI_Finalize might wait for ever for what is unfinished, so it is not called at exit. A
  // launcher ends the other processes when one ends so.
  void do_not_finalize() { library_.do_not_finalize(); }

 private:
  explicit Runtime(Library& library) : library_(library) {}

  void check_not_finalized() const;

  Library& library_;
  std::mutex mutex_;
};

}  // namespace paceline::mpi
