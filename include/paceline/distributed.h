#pragma once

/// @file
/// The world and groups of ranks.

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <paceline/api.h>
#include <paceline/error.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

// Declared only, as its header costs every source file seconds: programs that use a c10d group
// include <torch/csrc/distributed/c10d/ProcessGroup.hpp>.
namespace c10d {
class ProcessGroup;
}

namespace paceline {

class Communicator;

/// Options of the backend "gloo". The interfaces are this rank's; every rank must name equally
/// many.
struct GlooOptions {
  /// Network interfaces of this machine, such as "eth0". Calls use them in turn. One may be named
  /// several times: each time adds a connection to every other rank, since one connection does not
  /// fill a fast link. Empty: `hostnames`.
  std::vector<std::string> interfaces{};
  /// The same, as addresses of this machine or names for them. If this is empty too, the interfaces
  /// of GLOO_SOCKET_IFNAME (separated by commas) count. Without that variable, Paceline chooses:
  /// the loopback if all ranks are known to be on one machine, else the address on the way to rank
  /// 0.
  std::vector<std::string> hostnames{};
  /// How many threads run asynchronous calls. Unset: two for each interface.
  std::optional<int> threads{};
  /// Whether a rank connects to another one at their first message, instead of to all ranks at
  /// once. Unset: as TORCH_GLOO_LAZY_INIT says.
  std::optional<bool> lazy_init{};
};

/// Options of the backend "paceline". Every rank must give the same, unless said otherwise.
struct PacelineOptions {
  /// The limit for the staging buffers of all ranks together, in bytes. Unset: 64 MiB. Each rank
  /// has two buffers, each of at least 4 KiB and at most 1 MiB. Tensors in unregistered memory
  /// pass through these buffers.
  std::optional<std::size_t> staging_bytes{};
  /// In a scatter or an all_to_all, if a rank's largest part in unregistered memory has this many
  /// bytes or more, the others read its parts from the memory of its process, in one copy, with
  /// process_vm_readv(2), instead of through these buffers. Unset: 4 MiB if the group has at least
  /// 3 ranks and a core for each, else never. If the system forbids it, parts pass through the
  /// buffers. Ranks may give different values.
  std::optional<std::size_t> single_copy_bytes{};
  /// What carries data between nodes, if the ranks run on several: "gloo"; or "mpi", in a program
  /// that mpirun or the like has started, and whose MPI any thread may call.
  std::string engine = "gloo";
  /// Options of the engine "gloo". `lazy_init` has no effect: the engine connects two ranks at
  /// their first message. If neither interfaces nor host names are given, they get two connections.
  GlooOptions gloo{};
};

/// Options of one backend. std::monostate: the backend's defaults. A group over another backend
/// throws UsageError.
using BackendOptions = std::variant<std::monostate, PacelineOptions, GlooOptions>;

/// How this process enters the world. The fields have the order of PyTorch's arguments.
struct InitOptions {
  /// "paceline": shared memory between the ranks of each machine, and an engine between machines
  /// (docs/multi-node.md). "gloo": LibTorch's TCP backend. "mpi": the MPI that the program is
  /// linked to, or whose mpirun started it. docs/backends.md compares them. CUDA tensors may be
  /// used with each of these. "nccl": NCCL for CUDA tensors, with paceline for CPU tensors; also
  /// written as in PyTorch, with any backend for CPU tensors: "cpu:gloo,cuda:nccl"
  /// (docs/accelerators.md).
  std::string backend = "paceline";
  /// Where the ranks meet, unless `store` is given:
  /// - `env://`: as the launcher's variables say: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or
  ///   those of mpirun, srun and others (docs/launching.md). Ranks of one machine that a launcher
  ///   started open no port. If nothing gives a rank or a world size, this is a world of one.
  ///   UsageError if variables are missing, or contradict each other.
  /// - `tcp://host:port`: rank 0 listens at that address only.
  /// - `file:///path`: a file on a file system with locks that all ranks see. It must not exist
  ///   before the job starts. Ranks that are killed leave it behind; a later job that finds it
  ///   throws UsageError.
  ///
  /// Each takes `?rank=R&world_size=N`, which goes before the variables.
  std::string init_method = "env://";
  /// The time limit for reaching the store, then for meeting the other ranks there, and later for
  /// each collective. Past it, the call throws Timeout. Must be positive.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// The number of ranks. Unset: from the init method.
  std::optional<int> world_size{};
  /// This process's rank, from 0 to world_size - 1. Unset: from the init method.
  std::optional<int> rank{};
  /// Any c10d store that all ranks share, in place of the init method. Then world_size and rank are
  /// required.
  c10::intrusive_ptr<c10d::Store> store{};
  /// Options of `backend`. Groups that new_group makes over the same backend inherit them.
  BackendOptions backend_options{};
  /// Whether the ranks of the world may change. Entering such a world does not wait for other
  /// ranks. Calls throw UsageError until paceline::reconfigure has given it some; `rank` and
  /// `world_size` are what get_rank and get_world_size answer until then. It needs the backend
  /// "paceline" and ranks of one machine, and has no smaller groups.
  bool enable_reconfigure = false;
};

/// Membership in the world for as long as this object lives. Move-only; a process has one at a
/// time.
///
/// The destructor leaves as destroy_process_group does, unless the world has ended already. While
/// an exception unwinds through it, it aborts all groups instead: the peers then throw PeerLost
/// that names this rank. If an enclosing record() sees the exception, PeerLost has its text too.
class [[nodiscard]] PACELINE_API World {
 public:
  /// Takes over the membership; `other` then does nothing.
  World(World&& other) noexcept;
  /// Swaps the memberships: the destructor of `other` then ends this object's previous one.
  World& operator=(World&& other) noexcept;
  ~World();

 private:
  friend World init_process_group(InitOptions options);
  friend World init_process_group(const Communicator& communicator, InitOptions options);
  explicit World(std::uint64_t number);

  std::uint64_t number_;  // of the world, in this process; 0 without a membership
  int exceptions_at_start_;
};

/// Forms the world. Collective over all ranks; returns when all have come. Reads the environment
/// variables at each call.
///
/// If mpirun, srun or the like started this process, the world has several ranks, and
/// OMP_NUM_THREADS and MKL_NUM_THREADS are unset: LibTorch's intra-op threads become at most this
/// process's share of the cores that the launcher's processes have here.
///
/// Throws UsageError for invalid options or variables, or if there is a world already; Timeout that
/// names the ranks that did not come; PeerLost that names the ranks that ended meanwhile.
[[nodiscard]] PACELINE_API World init_process_group(InitOptions options = {});

/// Whether this process is in a world. Safe to call from any thread.
[[nodiscard]] PACELINE_API bool is_initialized();
/// Whether this build has the backend "paceline".
[[nodiscard]] PACELINE_API bool is_paceline_available();
/// Whether this build has the backend "gloo".
[[nodiscard]] PACELINE_API bool is_gloo_available();
/// Whether this build has the backend "mpi".
[[nodiscard]] PACELINE_API bool is_mpi_available();
/// Whether the backend "nccl" can be used: this build has it, and this machine a driver and a
/// device. If not, writes why to `reason`, unless that is null. Loads LibTorch's part for CUDA, as
/// local_device does.
[[nodiscard]] PACELINE_API bool is_nccl_available(std::string* reason = nullptr);

/// Options of new_group.
struct GroupOptions {
  /// The time limit of each collective. Unset: the world's. Must be positive.
  std::optional<std::chrono::milliseconds> timeout{};
  /// As InitOptions::backend. Unset: the world's.
  std::optional<std::string> backend{};
  /// Options of the backend. std::monostate: the world's options if the group has the world's
  /// backend, otherwise the backend's defaults.
  BackendOptions backend_options{};
};

/// A group of ranks, as a handle that is cheap to copy. A default-constructed one means the world
/// that exists when it is used.
class PACELINE_API ProcessGroup {
 public:
  /// The world.
  ProcessGroup() = default;
  /// A c10d group from elsewhere. Throws UsageError for a null pointer.
  explicit ProcessGroup(c10::intrusive_ptr<c10d::ProcessGroup> group);

  /// False on the ranks that were left out of new_group. On them, collectives over the group do
  /// nothing, and get_rank and get_world_size return -1.
  [[nodiscard]] bool is_member() const { return member_; }
  /// The c10d group. Throws UsageError if there is no world, if this rank is not a member, or if
  /// the group has been destroyed.
  [[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> c10d() const;

 private:
  friend ProcessGroup new_group(std::vector<int> ranks, const GroupOptions& options);
  friend int get_rank(const ProcessGroup& group);
  friend int get_world_size(const ProcessGroup& group);

  c10::intrusive_ptr<c10::intrusive_ptr_target> group_;  // a c10d::ProcessGroup
  bool member_ = true;
};

/// Makes a group of `ranks`, which are global ranks; empty: all ranks. Collective over the world:
/// every rank calls it with the same arguments and in the same order. Group ranks follow the order
/// of global ranks, as in PyTorch.
///
/// Throws UsageError for invalid arguments, Timeout or PeerLost if a rank of the group does not
/// come.
[[nodiscard]] PACELINE_API ProcessGroup new_group(std::vector<int> ranks = {},
                                                  const GroupOptions& options = {});

/// What new_subgroups makes.
struct Subgroups {
  ProcessGroup current;           ///< This rank's.
  std::vector<ProcessGroup> all;  ///< In the order of their first ranks.
};

/// Divides the world into groups of `group_size` consecutive ranks; unset: into the ranks of each
/// node, and nodes may have different numbers of ranks. Collective over the world, as new_group.
///
/// Throws UsageError unless the size is positive and divides the world's, and as new_group does.
[[nodiscard]] PACELINE_API Subgroups new_subgroups(std::optional<int> group_size = {},
                                                   const GroupOptions& options = {});

/// A node of the world.
struct Node {
  std::string host;        ///< The name of its machine.
  std::vector<int> ranks;  ///< Ascending, never empty.
};

/// The nodes of the world, by get_node_rank(). Throws UsageError if there is no world.
[[nodiscard]] PACELINE_API std::vector<Node> topology();

/// Leaves a group that new_group made; without an argument, the world and all its groups. It waits
/// for this rank's own asynchronous operations, not for the other ranks. No further calls are
/// possible.
///
/// The group's memory and descriptors are freed at once, except what is kept by tensors allocated
/// in it, by models of DistributedDataParallel over it, and by Work objects. Such models refuse
/// further steps. At the end of the world, ProcessGroup objects keep what belongs to their group.
///
/// Does nothing without a world and on ranks that are not members. Throws UsageError for a group
/// that new_group did not make in this world, or that has been destroyed, and in hooks of a c10d
/// backend.
PACELINE_API void destroy_process_group(const ProcessGroup& group = {});

/// This process's rank in the group; -1 if it is not a member.
///
/// Before init_process_group, get_rank and get_world_size answer from the launcher's environment;
/// without a launcher, rank 0 of 1.
[[nodiscard]] PACELINE_API int get_rank(const ProcessGroup& group = {});
/// The number of ranks in the group; -1 if this process is not a member.
[[nodiscard]] PACELINE_API int get_world_size(const ProcessGroup& group = {});
/// This process's rank on its node; 0 without a launcher. If torchrun or `paceline run` started the
/// ranks with `--virtual-local-rank`, it is 0 for each: the index of the one device that a rank
/// sees then. Such ranks have get_rank() to tell them apart.
///
/// In a world, this and the next two functions follow LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK
/// if the launcher set them for all ranks; otherwise each machine is a node, in the order of their
/// first ranks. Outside a world, and in a world of one, they answer from the launcher's
/// environment.
[[nodiscard]] PACELINE_API int get_local_rank();
/// The number of ranks on this node; 1 without a launcher.
[[nodiscard]] PACELINE_API int get_local_world_size();
/// The number of this node in the world; 0 without a launcher.
[[nodiscard]] PACELINE_API int get_node_rank();
/// The name of the group's backend: as it was given. Throws UsageError if this
/// rank is not a member.
[[nodiscard]] PACELINE_API std::string get_backend(const ProcessGroup& group = {});

}  // namespace paceline
