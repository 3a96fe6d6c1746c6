#pragma once

#include <sys/types.h>

#include <atomic>
#include <span>

#include "launch/worker_set.h"

namespace paceline::launch {

// What the guard and the supervisor report, in memory that they share with the launcher; complete
// once they have hung up.
struct SharedState {
  std::atomic<pid_t> supervisor;  // 0: not started
  int start_error;  // an errno: the next worker could not be started, and the job was ended
  // A process of another user that goes on, as this job may not kill it; 0: none; -1: one that this
  // user cannot see.
  pid_t foreign;
  std::span<WorkerState> workers;
};

// The body of the guard process, which has one thread and has blocked all signals. It removes the
// plan's directory at the end.
//
// Starts the supervisor and waits for its end. If the supervisor is killed, the kernel kills the
// workers, and the guard adopts and kills what they leave behind. So each of launcher, guard and
// supervisor alone can end the job and remove the directory. The guard and the supervisor do not
// have the command's name: killall and pkill -f end the launcher only.
//
// The supervisor starts the workers and waits until they, and all processes that they left behind,
// have ended; except for processes of other users, once it has to kill what is left and may not.
// `control` is connected to the launcher: each packet read from it is a signal to send to the job,
// an int (SIGSTOP and SIGCONT suspend and resume it, SIGKILL ends it, others ask it to end), or 0:
// the job has failed elsewhere, followed by the workers that the error is about. The supervisor
// sends each Loss, and a byte when the job fails. `control`'s hang-up, or the end of the process
// `launcher` (a pidfd, or -1), ends the job at once. When nothing is left it shuts down its side,
// waits for the launcher to do the same, and removes the directory.
[[noreturn]] void guard(const Plan& plan, SharedState& state, int control, int launcher);

}  // namespace paceline::launch
