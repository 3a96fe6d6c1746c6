#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <paceline/api.h>
#include <paceline/error.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace paceline {

// Options of the backend "paceline".
struct PacelineOptions {
  // What the staging buffers of all ranks may take together, in bytes; unset: 64 MiB. Tensors that
  // are not in shared memory pass through them.
  std::optional<std::size_t> staging_bytes{};
};

// Options of one backend; std::monostate: the backend's defaults. init_process_group and new_group
// throw UsageError if they belong to another backend than the group's.
using BackendOptions = std::variant<std::monostate, PacelineOptions>;

// How this process joins the others. The fields come in the order of PyTorch's arguments.
struct InitOptions {
  // "paceline": shared memory between the ranks of one machine. "gloo": LibTorch's TCP backend.
  std::string backend = "paceline";
  // Where the ranks meet, unless `store` is given:
  //   env://             what the launcher's variables say (RANK, WORLD_SIZE, MASTER_ADDR,
  //                      MASTER_PORT); under `paceline run` that is inherited, and opens no port.
  //                      With none of RANK and WORLD_SIZE set, a world of one; UsageError if
  //                      mpirun, srun or the like started several processes.
  //   tcp://host:port    rank 0 listens there, and only there
  //   file:///path       a file on a file system with locks that all ranks see. It must be gone
  //                      before a job starts; ranks that are killed leave it behind, and those
  //                      that find it throw UsageError.
  // tcp:// and file:// take ?rank=R&world_size=N as well.
  std::string init_method = "env://";
  // How long reaching the store, then meeting the other ranks there, and later each collective call
  // may take before it throws Timeout.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  // Unset: from the init method.
  std::optional<int> world_size{};
  std::optional<int> rank{};
  // Any c10d store that all ranks share; then world_size and rank are required.
  c10::intrusive_ptr<c10d::Store> store{};
  BackendOptions backend_options{};
};

// Membership in the job, for as long as this object lives; move-only, one at a time in a process.
// The destructor leaves as destroy_process_group does. While an exception unwinds through it, it
// aborts all groups instead: the peers then throw PeerLost naming this rank and, if an enclosing
// `record` sees the exception, giving its text.
class [[nodiscard]] PACELINE_API World {
 public:
  World(World&& other) noexcept;
  World& operator=(World&& other) noexcept;
  ~World();

 private:
  friend World init_process_group(InitOptions options);
  World();

  bool owner_ = true;
  int exceptions_at_start_;
};

// Joins the job: collective over all ranks. Throws UsageError for options or variables that make no
// sense or when there is a world already, Timeout naming the ranks that did not come, PeerLost
// naming those that ended meanwhile.
[[nodiscard]] PACELINE_API World init_process_group(InitOptions options = {});

[[nodiscard]] PACELINE_API bool is_initialized();
[[nodiscard]] PACELINE_API bool is_paceline_available();
[[nodiscard]] PACELINE_API bool is_gloo_available();

struct GroupOptions {
  // Unset: the world's.
  std::optional<std::chrono::milliseconds> timeout{};
  std::optional<std::string> backend{};
  // std::monostate: the world's, if the backend is the world's.
  BackendOptions backend_options{};
};

// A group of ranks: a cheap handle. Default-constructed it means the world there is when it is
// used.
class PACELINE_API ProcessGroup {
 public:
  ProcessGroup() = default;
  // Any group of c10d's, made by whomever.
  explicit ProcessGroup(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // False on the ranks that were left out of new_group. On them, collectives over the group do
  // nothing, and get_rank and get_world_size give -1.
  [[nodiscard]] bool is_member() const { return member_; }
  // The group itself. Throws UsageError if there is no world or this rank is no member.
  [[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> c10d() const;

 private:
  friend ProcessGroup new_group(std::vector<int> ranks, const GroupOptions& options);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  bool member_ = true;
};

// A group of some ranks of the world, all of them if `ranks` is empty. Every rank of the world must
// call it, with the same arguments and in the same order. Group ranks follow the order of world
// ranks, as in PyTorch.
[[nodiscard]] PACELINE_API ProcessGroup new_group(std::vector<int> ranks = {},
                                                  const GroupOptions& options = {});

// Leaves the group, without an argument the world and all of its groups: no further calls are
// possible. Waits for this rank's own asynchronous operations, not for the others to leave. Memory
// and descriptors of the group go at once, but for what tensors allocated in it, models of
// DistributedDataParallel over it and Work objects keep; those refuse further steps. Throws
// UsageError for a group that is not of new_group or has been destroyed. Does nothing without a
// world, where the World object has been left already, and on ranks that are no members.
PACELINE_API void destroy_process_group(const ProcessGroup& group = {});

// Before init_process_group, and in a world of one, these answer from the launcher's environment;
// without a launcher, rank 0 of 1.
[[nodiscard]] PACELINE_API int get_rank(const ProcessGroup& group = {});
[[nodiscard]] PACELINE_API int get_world_size(const ProcessGroup& group = {});
[[nodiscard]] PACELINE_API int get_local_rank();
[[nodiscard]] PACELINE_API int get_local_world_size();
[[nodiscard]] PACELINE_API int get_node_rank();
// "paceline", "gloo".
[[nodiscard]] PACELINE_API std::string get_backend(const ProcessGroup& group = {});

}  // namespace paceline
