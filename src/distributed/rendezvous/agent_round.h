#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "distributed/backend.h"

namespace paceline::distributed {

// A group's own keys in the store of torchrun's agents. They start processes anew with the same
// store, where those before have left their keys, and nothing in the environment tells which ranks
// belong together: each agent counts only the restarts that it has begun. So rank 0 names the
// group, and tells the name to each rank that asks with a word of its own: both processes are alive
// then. Not thread-safe.
class AgentRound {
 public:
  // The store of the request serves for this only. Rank 0 answers on a thread until the object is
  // destroyed, or all ranks have the name. Another rank waits for its answer. Throws Timeout, and
  // what the request's check_peers throws.
  explicit AgentRound(const BackendRequest& request);
  AgentRound(const AgentRound&) = delete;
  AgentRound& operator=(const AgentRound&) = delete;
  ~AgentRound();

  // The store with the group's keys.
  c10::intrusive_ptr<c10d::Store> group_store() const;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  std::string name_;
  std::shared_ptr<std::atomic<bool>> cancelled_ = std::make_shared<std::atomic<bool>>(false);
  std::future<void> answered_;
  std::thread thread_;
};

}  // namespace paceline::distributed
