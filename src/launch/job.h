#pragma once

#include <poll.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "launch/job_result.h"
#include "launch/non_blocking_writer.h"
#include "launch/output.h"

namespace paceline::launch {

constexpr int kMaxProcesses = 1024;

class SignalForwarding;

// A name for a job that no other has.
std::string random_run_id();

// What the other nodes ask this one to do.
struct NodeRequest {
  int signal = 0;                   // to pass on; 0: to stop, since the job has failed
  std::vector<int> blamed_ranks{};  // by the error that the job has failed with
};

// The rest of a job that runs on several nodes, as the node's launcher sees it.
class OtherNodes {
 public:
  virtual ~OtherNodes() = default;
  // Adds what receive() waits for. Returns for how long at most, an hour or less.
  virtual std::chrono::milliseconds add_to(std::vector<pollfd>& fds) const = 0;
  // In order. Does not wait.
  virtual std::vector<NodeRequest> receive() = 0;
  // Tells them that a process of this node has failed, and which ranks its error is about; or which
  // signal it has passed on.
  virtual void report_failure(const std::vector<int>& blamed_ranks) = 0;
  virtual void report_signal(int signal) = 0;
};

// N processes of one program on this machine.
struct JobSpec {
  int processes = 1;                 // 1 to kMaxProcesses
  std::vector<std::string> command;  // the program, found as a shell would, and its arguments
  bool pass_local_rank = false;      // append --local_rank=R to the arguments
  // LOCAL_RANK is 0 for every rank, and CUDA_VISIBLE_DEVICES names its own device only.
  bool virtual_local_rank = false;
  // The CPUs of each rank, its affinity mask; empty: all have this process's.
  std::vector<std::vector<int>> cpus;

  // This node's part of a job on several nodes. Its processes have the ranks from first_rank on,
  // and find rank 0 by MASTER_ADDR and MASTER_PORT; on one node they inherit what they need.
  int nodes = 1;
  int node = 0;
  int first_rank = 0;
  int world_size = 0;                 // 0: `processes`
  int first_role_rank = 0;            // among the job's processes of the same role
  int role_world_size = 0;            // how many these are; 0: all of them
  OtherNodes* other_nodes = nullptr;  // not owned; null if there are none

  std::string master_addr = "127.0.0.1";
  int master_port = 0;           // 0: one that is free now
  std::string role = "default";  // ROLE_NAME
  std::string run_id;            // TORCHELASTIC_RUN_ID; empty: a random one
  int restart = 0;               // how often the job was started before, of max_restarts at most
  int max_restarts = 0;
  // How many processes that fail are started again, each by itself, while the others go on. No
  // process is once another one has ended with code 0. For a node alone.
  int max_replacements = 0;
  // Whether the job goes on without a process that fails and is not started again, unless it is
  // rank 0's.
  bool tolerate_loss = false;

  // Set for every worker, on top of this process's environment.
  std::map<std::string, std::string> environment;
  // The columns that the first process has for a progress bar if its output ends on a terminal,
  // which it cannot see itself; passed as PACELINE_TERMINAL, with the pipes that lead there. 0: no
  // terminal.
  int terminal_columns = 0;

  // Where the files of the ranks are kept: DIRECTORY/LOCAL_RANK/error.json, and stdout.log and
  // stderr.log of the streams that go to files. Empty: a temporary one, removed at the end; if none
  // can be made, errors are kept in memory.
  std::filesystem::path directory;
  // Where each rank's stdout and stderr go; empty: all of it to the console. A worker writes a file
  // itself, so that nothing is lost whichever process ends first. Needs a `directory`.
  std::vector<std::array<Destination, 2>> destinations;

  // What the console gets. Called on the thread of run_job. May be empty.
  OutputSink output;
  // What `output` writes to. While one of these has text pending, the workers' output is not read;
  // signals still are.
  std::vector<NonBlockingWriter*> writers;

  // Called on the thread of run_job after a process has failed and the job goes on. `end` is how it
  // ended. `replacement` counts those that were started again, from 1; it is 0 for one that was
  // not. If one could not be started again, which ends the job, `error` is an errno. May be empty.
  std::function<void(int local_rank, const RankResult& end, int replacement, int error)> lost;

  // Called on the thread of run_job with a line for the user: something that the job does without.
  // May be empty.
  std::function<void(const std::string&)> warn;

  // Signals that are passed on to the workers. The first one that ends the job is
  // JobResult::signal; a second SIGINT kills at once. Not owned; null: none is passed on.
  SignalForwarding* signals = nullptr;

  // From the first failure to SIGTERM: the time in which the other ranks notice and report it. If a
  // rank has written its error file, or an error file blames it, on any node, its failure is under
  // way: SIGTERM then waits for its end too, for stop_grace at most.
  std::chrono::milliseconds failure_grace{500};
  // From SIGTERM, or a forwarded signal, to SIGKILL.
  std::chrono::milliseconds stop_grace{5000};
};

// Starts the processes, waits for all of them and returns how they ended. Each leads a session
// of its own, has the variables of torchrun and of base/environment.h, and inherits only the
// descriptors 0, 1, 2 and those that the variables name. The first has this process's standard
// input unless that is a terminal; the others have none. Results and output are by local rank. A
// process that replaces another one also has PACELINE_REPLACEMENT, its number; the result is that
// of the rank's last process.
//
// No process of the job outlives the call. The supervisor process is the parent of the workers,
// adopts what they leave behind and ends all of it; the guard process does the same for the
// supervisor. If any two of this process, the guard and the supervisor are killed at once, the
// third ends the job.
//
// Throws UsageError for a bad spec, ProgramError (no program was started), and Error for what the
// system refuses. An exception from `output` or `lost` kills the job and leaves through
// here.
JobResult run_job(const JobSpec& spec);

}  // namespace paceline::launch
