#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/launcher.h"

namespace paceline::base {

// What a launcher passed to this process, in torchrun's variables and our own. An unset or empty
// variable is nullopt. If RANK is unset, and WORLD_SIZE is unset or what `launched` says, the first
// seven are what `launched` says.
struct Environment {
  std::optional<int> rank;                 // RANK
  std::optional<int> world_size;           // WORLD_SIZE
  std::optional<int> local_rank;           // LOCAL_RANK
  std::optional<int> local_world_size;     // LOCAL_WORLD_SIZE
  std::optional<int> node_rank;            // GROUP_RANK
  std::optional<std::string> master_addr;  // MASTER_ADDR
  std::optional<int> master_port;          // MASTER_PORT
  bool use_agent_store = false;            // TORCHELASTIC_USE_AGENT_STORE=True: the launcher serves
                                           // the store at MASTER_ADDR:MASTER_PORT
  std::optional<std::string> run_id;       // TORCHELASTIC_RUN_ID: how the launcher calls the job
  std::optional<int> restart_count;        // TORCHELASTIC_RESTART_COUNT
  std::optional<std::string> error_file;   // TORCHELASTIC_ERROR_FILE

  // Set if another launcher (mpirun, srun, ...) started this process, and not torchrun or
  // `paceline run`.
  std::optional<LaunchedProcess> launched;
  std::string launched_error{};       // why its variables make no sense; only ranks need them
  bool numbered_by_launched = false;  // rank and world_size are its
  bool sets_threads = false;          // OMP_NUM_THREADS or MKL_NUM_THREADS is set

  // TORCHELASTIC_SIGNALS_TO_HANDLE: the names of the signals that the launcher passes on.
  std::optional<std::string> signals_to_handle;

  // PACELINE_BOOTSTRAP_SOCKETS, set by `paceline run`: inherited Unix seqpacket sockets, comma
  // separated. Rank 0 has one to each other rank, in order; each other rank has one to rank 0.
  std::vector<int> bootstrap_sockets;
  // PACELINE_STORE_FD, set by `paceline run`: an inherited memfd that all ranks share, empty at
  // first, the file of their store.
  std::optional<int> store_fd;
  // PACELINE_MAX_REPLACEMENTS, set by `paceline run`: how many processes of the job may be replaced
  // while the others go on.
  std::optional<int> max_replacements;
  // PACELINE_TERMINAL=COLUMNS,PIPE..., set by `paceline run` for rank 0: output to the pipes with
  // these inode numbers goes to a terminal with this many columns.
  struct Terminal {
    int columns;
    std::vector<std::int64_t> pipes;

    bool operator==(const Terminal&) const = default;
  };
  std::optional<Terminal> terminal;
  // PACELINE_SPAWN=CALL,PID, set by spawn: the process PID started this one for its CALL-th call of
  // spawn. Programs that this process starts inherit the variable too, but have another parent.
  struct Spawned {
    int call;
    int parent;

    bool operator==(const Spawned&) const = default;
  };
  std::optional<Spawned> spawned;
  // PACELINE_ERROR_FD: an inherited memfd for the error of this process. Spawn sets it, and it is
  // empty until the process has reached the call. `paceline run` sets it for an error that cannot
  // be written to error_file.
  std::optional<int> error_fd;
  // PACELINE_DATA: the directory of the data sets.
  std::optional<std::string> data_root;
  // TORCH_WORKER_SERVER_SOCKET: where record() starts a debug server.
  std::optional<std::string> worker_server_socket;
  // PACELINE_TIMELINE: the directory where each rank writes its timeline.
  std::optional<std::string> timeline;

  bool operator==(const Environment&) const = default;
};

// Throws UsageError naming the variable, its value and what is allowed.
Environment parse_environment(const Getenv& getenv);

// The environment of this process as it was at the first call, or at the last one of
// refresh_environment. References stay valid. Both throw as parse_environment does.
const Environment& environment();
const Environment& refresh_environment();

}  // namespace paceline::base
