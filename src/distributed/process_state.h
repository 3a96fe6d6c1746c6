#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <paceline/communicator.h>
#include <paceline/distributed.h>

#include "distributed/topology.h"
#include "shm/membership/bootstrap.h"
#include "shm/sync/fork_generation.h"

namespace paceline::distributed {

// The world of this process, and the groups that it has made.
struct ActiveWorld {
  std::uint64_t number = 0;  // counted from 1 in this process
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  c10::intrusive_ptr<c10d::Store> store;
  std::optional<int> store_server;  // see BackendRequest
  std::string backend;
  std::chrono::milliseconds timeout;
  BackendOptions backend_options;
  std::optional<MpiHandle> mpi;
  std::string host;
  // With enable_reconfigure: this process's place in its job, and the number of its next exchange
  // of handles.
  struct Reconfigurable {
    int rank = 0;
    int size = 1;
    std::int64_t next_round = 0;
    bool launched = false;                      // `rank` is the launcher's number
    c10::intrusive_ptr<c10d::Store> handles{};  // for handle_exchange.h
  };
  std::optional<Reconfigurable> reconfigurable;
  std::shared_ptr<const Topology> topology;
  int groups_made = 0;
  shm::OwningProcess process;

  struct Member {
    c10::intrusive_ptr<c10d::ProcessGroup> group;
    std::string backend;
    std::vector<int> ranks;  // of the world, by group rank
  };
  std::vector<Member> groups;  // new_group's
};

class ProcessState {
 public:
  static ProcessState& instance();

  // Null without a world. Guarded by `mutex`. Do not destroy a backend under it: that waits for
  // callbacks, which may need the mutex.
  std::unique_ptr<ActiveWorld> world;
  // The shm::fork_generation of the process that is in a world; -1 if there is none. A forked child
  // keeps its parent's until it enters a world of its own.
  std::atomic<std::int64_t> world_process{-1};
  std::mutex mutex;
  std::uint64_t worlds = 0;  // that this process has entered
  // How often this process has tried to meet others, by place_of_keys. Guarded by `mutex`.
  std::map<std::string, int> attempts;
  // That of the last world; within record, it outlives the world until the end or until another
  // world. It keeps a store, which may serve others or have a file.
  std::optional<ActiveWorld::Reconfigurable> last_job;
  // Whether the last world numbers the ranks as the launcher does. If survivors form a world of
  // their own, its numbers differ, and the launcher must not take them for its own.
  bool numbered_by_launcher = true;
  // The file in which this process has reported its error; empty if it has not.
  std::filesystem::path error_report;
  // The processes of the last world that ended, and this process's rank and size there; null if
  // there was no world, or if its backend does not watch processes. Guarded by `mutex`.
  struct Processes {
    int rank = 0;
    int size = 0;
    std::shared_ptr<const shm::Membership> watch{};
  };
  Processes last_processes;
  // Where this process runs, by the last world it was in. Guarded by `mutex`.
  std::optional<int> last_node;

  // In a forked child, these only forget the parent's groups: destroying one over Gloo would wait
  // for threads that the child does not have.
  //
  // Ends a group made by new_group and invalidates its handles. Throws UsageError if the world has
  // no such group.
  void leave(const c10::intrusive_ptr<c10d::ProcessGroup>& group);
  // Ends the world, if there is one and `number` is 0 or its own: normally, or with an exception's
  // text for the peers.
  void leave(std::uint64_t number = 0) noexcept;
  void abort(std::uint64_t number, const std::string& text) noexcept;

  // Between these, an abort is deferred until its text is known; see record. Call
  // run_deferred_abort if the exception was caught instead.
  void enter_record();
  void exit_record(const std::string& exception_text) noexcept;
  // Call at the end of the outermost record. If the process ends without a failure, and has ended
  // its world, the other ranks of its job learn that they need not wait for it.
  void end_job(bool has_failed) noexcept;
  bool in_record() const { return record_depth_ > 0; }
  // Whether the calling thread runs the outermost record.
  bool is_record_thread() const;
  // Whether this process was forked within the outermost record.
  bool is_forked_within_record() const { return record_process_.is_forked_child(); }
  void defer_abort(std::uint64_t number) noexcept;
  void run_deferred_abort() noexcept { run_deferred_abort(kCaught); }

 private:
  static constexpr const char* kCaught = "an exception left its World and was then caught";

  void run_deferred_abort(const std::string& text) noexcept;
  std::unique_ptr<ActiveWorld> take_world(std::uint64_t number) noexcept;

  int record_depth_ = 0;
  std::thread::id record_thread_;
  shm::OwningProcess record_process_;
  std::unique_ptr<ActiveWorld> aborting_;  // guarded by `mutex`
};

// Throws UsageError in a forked child of a process in a world, or of `owner`. LibTorch's backends
// would wait for threads that the child does not have.
void check_not_forked(const char* operation);
void check_not_forked(const shm::OwningProcess& owner, const char* operation);

// The rank in `group` of a global rank. Throws UsageError if it is not a member.
int group_rank_of(const ProcessGroup& group, int global_rank);
// The global rank of a rank in `group`.
int global_rank_of(const ProcessGroup& group, int group_rank);

}  // namespace paceline::distributed
