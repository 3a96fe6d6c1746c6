#pragma once

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <paceline/communicator.h>
#include <paceline/distributed.h>
#include <paceline/error.h>

#include "base/unique_fd.h"
#include "distributed/bucket_reducer.h"
#include "distributed/translate.h"
#include "internode/engine.h"
#include "shm/membership/bootstrap.h"

namespace paceline::distributed {

// Abilities of a backend beyond c10d::Backend's virtuals.
class ExtendedBackend : public c10d::Backend {
 public:
  using c10d::Backend::Backend;
  // Collective over the group. Null: it has none of its own.
  virtual std::unique_ptr<BucketReducer> make_bucket_reducer(
      const BucketReducer::Options& options) = 0;
  // Whether that reducer has InPlaceGradients. `several_leaves`: ranks have them.
  virtual bool reduces_in_place(bool /*several_leaves*/) const { return true; }
  // Reduces a tensor and returns with the result, without a Work, which costs more than a small
  // reduction. Returns false, and has done nothing, if the call needs one.
  virtual bool all_reduce_now(const at::Tensor& tensor, const c10d::ReduceOp& op) = 0;
  // A uint8 tensor in memory that all ranks map, uninitialised. It is freed when no process has it
  // any more. Collective over the group, whose ranks are on one node.
  virtual at::Tensor allocate_shared(std::size_t bytes) = 0;
  // Leaves because of an exception: the peers throw PeerLost with this text.
  virtual void abort_because(const std::string& text) noexcept = 0;
  // Throws PeerLost if a peer is known to have died, or one of `needed` to have left, and the
  // group's failure if there is one.
  virtual void check_peers(const std::vector<int>& needed, const shm::OpContext& op) = 0;
  // Whether the group has failed or lost a rank. Records nothing; any thread may ask.
  virtual bool has_failed() const = 0;
  // How many collective calls this rank has made.
  virtual std::uint64_t call_count() = 0;
  // Whether one of the first `calls` is under way, or waits for its turn.
  virtual bool is_busy_with(std::uint64_t calls) = 0;
  // Watches the ranks' processes after the group has ended.
  virtual std::shared_ptr<const shm::Membership> membership() const = 0;
};

// The arguments of a backend's factory.
struct BackendRequest {
  c10::intrusive_ptr<c10d::Store> store{};  // keys in it are this group's own
  // The global rank whose process serves the store; none if it is another process, or not known.
  std::optional<int> store_server{};
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{};
  std::string group_name{};
  // A backend throws UsageError for another backend's options.
  BackendOptions options{};
  // The global ranks of the group, by group rank; empty: the same.
  std::vector<int> members{};
  // The ranks' nodes, by group rank; empty if all are on one.
  std::vector<int> nodes{};
  // Inherited bootstrap sockets to rank 0 (on rank 0: to each other rank, in order), if a launcher
  // made them; else empty.
  std::vector<base::UniqueFd> sockets{};
  // This machine's address by which the other ranks reach it; empty if it is not known.
  std::string host{};
  // Whether the ranks have just met in the store.
  bool met = false;
  // Throws if it is known that the ranks will not all come; asked while waiting for them.
  std::function<void()> check_peers = [] {};
  // Of the program, if the world was formed with one.
  std::optional<MpiHandle> mpi{};
  bool enable_reconfigure = false;  // as c10d's option
  // For CUDA tensors only: the group's backend for CPU tensors.
  c10::intrusive_ptr<c10d::Backend> host_backend{};
  // The ranks' processes, if they are known; else null.
  std::shared_ptr<const shm::Membership> processes{};

  shm::GlobalRanks global_ranks() const { return shm::GlobalRanks(members, nodes); }
  bool spans_nodes() const {
    return std::ranges::any_of(nodes, [&](int node) { return node != nodes.front(); });
  }
};

struct BackendKind {
  using Factory = std::function<c10::intrusive_ptr<c10d::Backend>(BackendRequest)>;

  Factory make;
  c10d::ProcessGroup::BackendType type;
  bool one_node = false;      // reaches the ranks of one node only
  bool reconfigures = false;  // has enable_reconfigure
  bool is_internal = false;   // for groups on several nodes, in place of another one
  int max_ranks = shm::kMaxWorldSize;
  // The backend that takes its place in groups on several nodes, if this build has it.
  std::string across_nodes{};
  // Makes an engine between the ranks of a group, which all call it. Null if the backend cannot.
  std::function<std::unique_ptr<internode::Engine>(const BackendRequest&)> make_engine{};
};

// Asks the group's backend, if it has this ability.
void check_peers(c10d::ProcessGroup& group, const std::vector<int>& needed,
                 const char* operation = "new_group");
// As translate, for a call of the group's backend for `device`. If a call on an accelerator throws
// and the group has failed, throws the group's failure, which names the rank.
template <typename Body>
auto translate_on(c10::DeviceType device, c10d::ProcessGroup& group, const char* operation,
                  Body&& body) {
  return translate(operation, [&] {
    try {
      return body();
    } catch (const Error&) {
      throw;
    } catch (const std::exception&) {
      if (device != c10::DeviceType::CPU) check_peers(group, {}, operation);
      throw;
    }
  });
}
// Leaves the group because of an exception, if its backend can tell the peers.
void abort_because(c10d::ProcessGroup& group, const std::string& text) noexcept;
// Call instead of check_peers if a peer is known to be lost. A process closes its files before it
// counts as ended, so this retries for a while, and returns if the backend still finds nothing.
void await_loss(c10d::ProcessGroup& group, const std::vector<int>& needed);

// The options that the request has for the backend, by default its defaults. Throws UsageError for
// another backend's.
template <typename Own>
Own own_options(const BackendRequest& request, const char* backend) {
  if (const auto* const own = std::get_if<Own>(&request.options)) return *own;
  if (std::holds_alternative<std::monostate>(request.options)) return {};
  throw UsageError(
      fmt::format("backend_options of group {} are another backend's, but its backend is {}: leave "
                  "them out, or give those of {}",
                  request.group_name, backend, backend));
}

// Each folder of src/backends registers itself when the library is loaded.
bool register_backend(const std::string& name, BackendKind kind);
bool is_backend_available(const std::string& name);
// Throws UsageError that lists the known names.
const BackendKind& find_backend(const std::string& name);
// The same for a group on one node or several; null if the backend reaches one only.
const BackendKind* find_backend(const std::string& name, bool several_nodes);

}  // namespace paceline::distributed
