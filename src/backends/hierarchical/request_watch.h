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
  // Also on its own thread, in the callback of a message. A forked child leaks the thread's parts.
  ~RequestWatch();

  // From here on until it has ended. Does nothing after stop(). The first call starts the thread,
  // and throws std::system_error if that fails.
  void add(std::shared_ptr<internode::RemoteMessages::Request> request);
  void stop();

 private:
  struct State;

  static void run(State& state);

  std::shared_ptr<State> state_;  // which the thread has, too
  std::thread thread_;            // guarded by the state's mutex
  shm::OwningProcess process_;
};

}  // namespace paceline::backends
