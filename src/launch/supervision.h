#pragma once

#include <sys/types.h>

#include <span>
#include <string>

#include "base/unique_fd.h"
#include "launch/supervisor.h"

namespace paceline::launch {

// The launcher's side of a supervisor process. Destroying it kills what is left of the job, lets
// the supervisor remove the job's directory, and waits for its end. While it lives, this process
// adopts what a supervisor that is killed leaves behind; it must have no other children.
class Supervision {
 public:
  // Starts the supervisor, which starts the workers. Throws Error.
  explicit Supervision(const Plan& plan);
  Supervision(const Supervision&) = delete;
  Supervision& operator=(const Supervision&) = delete;
  ~Supervision();

  // Becomes readable when nothing of the job is left; nothing is ever to be read from it.
  int fd() const { return control_.get(); }
  // Sends a signal to the job as `supervise` describes.
  void send(int signal);

  // What became of the workers; to be called when fd() is readable. Throws Error if a worker could
  // not be started, or if the supervisor has been killed; the job is gone then too.
  std::span<const WorkerState> result();

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

  void kill_unsupervised();

  SharedMemory memory_;
  std::string program_;
  base::UniqueFd control_;
  pid_t pid_ = -1;
};

}  // namespace paceline::launch
