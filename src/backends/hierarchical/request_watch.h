#pragma once

#include <memory>
#include <thread>

#include "internode/remote_messages.h"
#include "shm/sync/fork_generation.h"

namespace paceline::backends {

// Checks messages for which no thread waits, so that their futures end with the group's failure and
// at their deadlines. Thread-safe.
class RequestWatch {
 public:
  explicit RequestWatch(std::shared_ptr<internode::RemoteMessages> messages);
  RequestWatch(const RequestWatch&) = delete;
  RequestWatch& operator=(const RequestWatch&) = delete;
  // A forked child leaks the thread's parts.
  ~RequestWatch();

  // Checks the request until it has ended. Does nothing after stop(). The first call starts the
  // thread, and throws Error if that fails.
  void add(std::shared_ptr<internode::RemoteMessages::Request> request);
  // Not on its own thread, on which hooks run.
  void stop();

 private:
  struct State;

  static void run(State& state);
  static bool wait_for_work(State& state, bool has_open);

  std::shared_ptr<State> state_;  // shared with the thread
  std::thread thread_;            // guarded by the state's mutex
  shm::OwningProcess process_;
};

}  // namespace paceline::backends
