#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <paceline/distributed.h>
#include <paceline/parameter_server.h>

#include "base/deadline.h"
#include "distributed/rendezvous/agent_round.h"
#include "distributed/topology.h"
#include "parallel/parameter_server/pair.h"
#include "shm/membership/endpoint.h"

namespace paceline::parameter_server {

// What a process says of itself in the store.
struct Announcement {
  static constexpr std::int64_t kEnded = 0;

  std::int64_t number = 0;  // of the rank's processes, from 1; kEnded: this server has ended
  int servers = 0;          // ParameterServerOptions::servers
  shm::Endpoint endpoint;
  distributed::Placement placement;

  std::string encode() const;
  // `rank`: whose it is. Throws Error unless the record is an encoded Announcement.
  static Announcement decode(int rank, const std::string& text);
};

// This process's place in the job, and the store by which servers and workers find each other. No
// rank waits for another one to be in the job, except for rank 0 where agents of torchrun serve the
// store. Thread-safe.
class Job {
 public:
  // As init_process_group opens the store. Throws UsageError and Timeout.
  explicit Job(const ParameterServerOptions& options);

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::chrono::milliseconds timeout() const { return options_.timeout; }
  // Whether the launcher starts a failed process again.
  bool replaces_processes() const { return replaces_processes_; }

  // Says that this process is there, as the rank's newest one. Returns its number.
  std::int64_t announce();
  // Says that this server has ended; workers that come later throw PeerLost.
  void announce_end() noexcept;
  // The newest process of a rank; empty if none has come. Throws PeerLost if the rank has ended,
  // and Mismatch if it was given another number of servers.
  std::optional<Announcement> find(int rank) const;
  // Whether the rank has called announce_end.
  bool has_ended(int rank) const;
  // Waits for it. Throws Timeout, and what `find` throws.
  Announcement await(int rank) const;

  // Forms the group of a server, its first rank, and a worker; one of them is this process.
  // `check` throws if there is no point in waiting for the other one. Throws PeerLost if the other
  // process has ended, and Timeout.
  std::shared_ptr<Pair> meet(int server, int worker, const Announcement& other,
                             const std::function<void()>& check) const;

 private:
  std::optional<std::string> read(int rank) const;
  Announcement decode(int rank, const std::string& text) const;

  InitOptions options_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<const distributed::AgentRound> round_;
  std::string host_;
  int rank_ = 0;
  int size_ = 1;
  bool replaces_processes_ = false;
  Announcement own_;
};

}  // namespace paceline::parameter_server
