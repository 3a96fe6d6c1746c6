#pragma once

#include <sys/types.h>

#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "launch/supervisor.h"

namespace paceline::launch {

// The launcher's side of the guard and the supervisor, two processes. Destroying it kills what is
// left of the job, lets them remove the job's directory, and waits for their end. While it lives,
// this process adopts what they leave behind if both are killed; it must have no other children.
class Supervision {
 public:
  // Starts the guard, which starts the supervisor, which starts the workers. Throws Error.
  explicit Supervision(const Plan& plan);
  Supervision(const Supervision&) = delete;
  Supervision& operator=(const Supervision&) = delete;
  ~Supervision();

  enum class Event { none, lost, failed, ended };
  // Readable when next_event() is not none: after each Loss, once if the job has failed, and
  // when nothing of it is left. Do not read from it.
  int fd() const { return control_.get(); }
  Event next_event();
  // That of the last Event::lost.
  const Loss& loss() const { return loss_; }
  // Reaps children of this process that are not of the job: process 1 adopts all orphans.
  void reap_foreign_children();
  // Sends a signal to the job; see guard.
  void send(int signal) { send_command({signal}); }
  // The job has failed elsewhere, with an error that is about these workers.
  void send_failure(const std::set<int>& blamed_workers);

  // How the workers ended. Call after Event::ended. If a worker could not be started, throws
  // ProgramError, or Error if that is not the program's fault; throws Error if the supervisor was
  // killed. The job has ended then too.
  std::span<const WorkerState> result();
  // See SharedState. A worker may be one of these.
  pid_t foreign() { return memory_.state().foreign; }

 private:
  class SharedMemory {
   public:
    explicit SharedMemory(std::size_t workers);
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;
    ~SharedMemory();
    SharedState& state() { return *static_cast<SharedState*>(address_); }

   private:
    std::size_t size_;
    void* address_;
  };

  void send_command(const std::vector<int>& command);

  SharedMemory memory_;
  std::string program_;
  base::UniqueFd control_;
  pid_t pid_ = -1;  // the guard
  Loss loss_{};
};

}  // namespace paceline::launch
