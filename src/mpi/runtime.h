#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "mpi/library.h"
#include "shm/sync/fork_generation.h"

namespace paceline::mpi {

// MPI in this process, which has one. Any thread may call it through this.
//
// If MPI lets only the program's main thread call it, the others hand their calls to that thread,
// which makes them while it waits for Paceline (base/idle_work.h). So they wait until it does.
class Runtime {
 public:
  // Loads and initialises MPI at the first call. Throws UsageError as load() does, or if only
  // another thread may call MPI.
  static Runtime& get(const std::optional<std::string>& name);

  // Whether only one thread may call MPI.
  bool has_owner() const { return owner_ != std::thread::id(); }
  // Throws UsageError if only another thread may call MPI.
  void check_may_call_here() const;

  // Calls MPI on one thread at a time. `body` must not wait. Throws UsageError if MPI is finalized.
  template <typename Body>
  decltype(auto) call(Body&& body) {
    return run([&]() -> decltype(auto) {
      check_not_finalized();
      const std::lock_guard lock(mutex_);
      return body(library_);
    });
  }
  // The same for what waits for other ranks, where check_may_call_here() throws nothing: then other
  // threads call MPI, too, if it lets them.
  template <typename Body>
  decltype(auto) call_and_wait(Body&& body) {
    check_not_finalized();
    std::unique_lock lock(mutex_, std::defer_lock);
    if (library_.threads() != Library::Threads::multiple) lock.lock();
    return body(library_);
  }
  // Runs what calls MPI under locks of its own, which a thread must not hold while it hands a call
  // to another one.
  template <typename Body>
  std::invoke_result_t<Body> run(Body&& body) {
    using Result = std::invoke_result_t<Body>;
    if (!has_owner() || owner_ == std::this_thread::get_id()) return body();
    if constexpr (std::is_void_v<Result>) {
      hand_over([&] { body(); });
    } else {
      std::optional<Result> result;
      hand_over([&] { result = body(); });
      return *std::move(result);
    }
  }

  // `work` is done by the one thread that may call MPI, whenever it waits, until the key is
  // removed. Call these there.
  void add_work(const void* key, std::function<void()> work) { works_[key] = std::move(work); }
  void remove_work(const void* key) { works_.erase(key); }

  // MPI_Finalize might wait for ever for what is unfinished, so it is not called at exit. A
  // launcher ends the other processes when one ends so.
  void do_not_finalize() { library_.do_not_finalize(); }

 private:
  explicit Runtime(Library& library) : library_(library) {}

  void check_not_finalized() const;
  // Until the owner has run it. Throws what it throws.
  void hand_over(const std::function<void()>& task);
  void progress();

  Library& library_;
  std::mutex mutex_;  // held during a call of MPI
  std::thread::id owner_;
  const std::function<void()> idle_work_ = [this] { progress(); };
  shm::OwningProcess process_;
  std::map<const void*, std::function<void()>> works_;
  std::mutex handed_over_mutex_;
  std::vector<std::function<void()>> handed_over_;
};

}  // namespace paceline::mpi
