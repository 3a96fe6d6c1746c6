#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <paceline/api.h>
#include <paceline/distributed.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace paceline {

// Every rank of the group must make the same calls in the same order. The calls return when this
// rank's tensors are final, and throw on failure: Mismatch if the ranks do not agree, PeerLost,
// Timeout, UsageError for arguments that cannot work. Tensors are modified in place; those that are
// not contiguous through a copy, which for asynchronous calls is written back by wait(). What a
// call writes must not overlap what else it writes or reads; only the part that a rank gives itself
// may lie where the call puts it.
//
// On the backend paceline: reductions take floating, integer, bool and complex tensors with SUM,
// PRODUCT and PREMUL_SUM, all but complex ones with MIN and MAX, all but bool ones with AVG,
// integer and bool ones with BAND, BOR and BXOR; 16-bit floats are reduced in float32 and rounded
// once, and averages of integers are truncated towards zero. The calls that only move data take
// every type. Tensors live on the CPU. all_reduce adds up sparse COO tensors, too.

using ReduceOp = c10d::ReduceOp;

struct AllReduceOptions {
  ReduceOp op = ReduceOp::SUM;
  ProcessGroup group{};
};
// Ranks in options are those of the world, as in PyTorch, also when `group` is smaller.
struct ReduceOptions {
  int dst = 0;
  ReduceOp op = ReduceOp::SUM;
  ProcessGroup group{};
};
struct BroadcastOptions {
  int src = 0;
  ProcessGroup group{};
};
struct AllGatherOptions {
  ProcessGroup group{};
};
struct GatherOptions {
  int dst = 0;
  ProcessGroup group{};
};
struct ScatterOptions {
  int src = 0;
  ProcessGroup group{};
};
struct ReduceScatterOptions {
  ReduceOp op = ReduceOp::SUM;
  ProcessGroup group{};
};
struct AllToAllOptions {
  ProcessGroup group{};
};
struct AllToAllSingleOptions {
  // Rows of the first dimension for each rank; empty: equally many.
  std::vector<std::int64_t> output_split_sizes{};
  std::vector<std::int64_t> input_split_sizes{};
  ProcessGroup group{};
};
struct BarrierOptions {
  ProcessGroup group{};
};
struct MonitoredBarrierOptions {
  ProcessGroup group{};
  std::optional<std::chrono::milliseconds> timeout{};  // unset: the group's
  bool wait_all_ranks = false;
};
struct SendOptions {
  ProcessGroup group{};
  int tag = 0;
};
struct RecvOptions {
  std::optional<int> src{};  // unset: any rank, the first message to come
  ProcessGroup group{};
  int tag = 0;
};

// An operation under way. It keeps its tensors alive; they must not be touched before wait()
// returns. Dropping it lets the operation finish by itself. Move-only: one that was moved from is
// complete. Used by one thread at a time.
class [[nodiscard]] PACELINE_API Work {
 public:
  // Of a call on a group that this rank is no member of: complete.
  Work() = default;
  // `dense[i]` is what the operation writes for `tensors[i]`: the same, or a contiguous copy.
  Work(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors,
       std::vector<at::Tensor> dense, ProcessGroup group);
  Work(Work&&) noexcept = default;
  Work& operator=(Work&&) noexcept = default;

  // Returns once the operation is complete and throws its error if it failed. With a timeout,
  // throws Timeout if it takes longer; the operation itself goes on.
  void wait();
  void wait(std::chrono::milliseconds timeout);
  [[nodiscard]] bool is_completed() const;
  // Of a recv_async that is complete: who sent it, by its rank in the world. -1 on a rank that is
  // no member of the group; throws for other operations.
  [[nodiscard]] int source_rank() const;

 private:
  void write_back();

  c10::intrusive_ptr<c10d::Work> work_;
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> dense_;
  ProcessGroup group_;
};

// A contiguous tensor of unset values in memory that the group's ranks share, where its backend has
// such: calls then read and write it in place instead of through staging buffers. On other backends
// an ordinary one. It may outlive the group. Throws Error saying how much was asked for if there is
// no room, and the group's failure after it failed.
[[nodiscard]] PACELINE_API at::Tensor allocate_tensor(at::IntArrayRef sizes,
                                                      const at::TensorOptions& options = {},
                                                      const ProcessGroup& group = {});

PACELINE_API void all_reduce(const at::Tensor& tensor, const AllReduceOptions& options = {});
// As all_reduce, but the result is on rank `dst` only; the other ranks' tensors keep their values
// on the backend paceline, and may hold anything on others.
PACELINE_API void reduce(const at::Tensor& tensor, const ReduceOptions& options = {});
PACELINE_API void broadcast(const at::Tensor& tensor, const BroadcastOptions& options = {});
// tensors[r] receives rank r's `tensor`; all have the same type, on the backend paceline not
// necessarily the same size.
PACELINE_API void all_gather(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor,
                             const AllGatherOptions& options = {});
// `output` is the concatenation of every rank's `input`: get_world_size(group) times its elements.
PACELINE_API void all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input,
                                         const AllGatherOptions& options = {});
// gather_list[r] receives rank r's `tensor`, on rank `dst`; it is empty on the others.
PACELINE_API void gather(const at::Tensor& tensor, const std::vector<at::Tensor>& gather_list = {},
                         const GatherOptions& options = {});
// `tensor` receives scatter_list[r] of rank `src`, r being this rank; it is empty on the others.
PACELINE_API void scatter(const at::Tensor& tensor,
                          const std::vector<at::Tensor>& scatter_list = {},
                          const ScatterOptions& options = {});
// `output` receives the reduction of every rank's inputs[r], r being this rank.
PACELINE_API void reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                                 const ReduceScatterOptions& options = {});
// The same with the inputs in one tensor, one after the other.
PACELINE_API void reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                                        const ReduceScatterOptions& options = {});
// outputs[r] receives what rank r has in its inputs for this rank. Sizes are free as long as each
// pair agrees (on gloo all are the same).
PACELINE_API void all_to_all(const std::vector<at::Tensor>& outputs,
                             const std::vector<at::Tensor>& inputs,
                             const AllToAllOptions& options = {});
// The same with the rows of one tensor.
PACELINE_API void all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                                    const AllToAllSingleOptions& options = {});
PACELINE_API void barrier(const BarrierOptions& options = {});
// A barrier that on rank 0 throws Timeout naming the ranks that did not come: the first, or all of
// them with `wait_all_ranks`. The group can be used further. If a rank has made another call
// instead, on the backend paceline, every rank throws Mismatch.
PACELINE_API void monitored_barrier(const MonitoredBarrierOptions& options = {});

// Messages between two ranks, matched by sender and tag; both sides agree on type and size.
PACELINE_API void send(const at::Tensor& tensor, int dst, const SendOptions& options = {});
// Returns who sent it.
PACELINE_API int recv(const at::Tensor& tensor, const RecvOptions& options = {});

// These return at once; operations of one group run in the order in which they were called, the
// calls above included. Messages run beside them.
PACELINE_API Work all_reduce_async(const at::Tensor& tensor, const AllReduceOptions& options = {});
PACELINE_API Work reduce_async(const at::Tensor& tensor, const ReduceOptions& options = {});
PACELINE_API Work broadcast_async(const at::Tensor& tensor, const BroadcastOptions& options = {});
PACELINE_API Work all_gather_async(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor,
                                   const AllGatherOptions& options = {});
PACELINE_API Work all_gather_into_tensor_async(const at::Tensor& output, const at::Tensor& input,
                                               const AllGatherOptions& options = {});
PACELINE_API Work gather_async(const at::Tensor& tensor,
                               const std::vector<at::Tensor>& gather_list = {},
                               const GatherOptions& options = {});
PACELINE_API Work scatter_async(const at::Tensor& tensor,
                                const std::vector<at::Tensor>& scatter_list = {},
                                const ScatterOptions& options = {});
PACELINE_API Work reduce_scatter_async(const at::Tensor& output,
                                       const std::vector<at::Tensor>& inputs,
                                       const ReduceScatterOptions& options = {});
PACELINE_API Work reduce_scatter_tensor_async(const at::Tensor& output, const at::Tensor& input,
                                              const ReduceScatterOptions& options = {});
PACELINE_API Work all_to_all_async(const std::vector<at::Tensor>& outputs,
                                   const std::vector<at::Tensor>& inputs,
                                   const AllToAllOptions& options = {});
PACELINE_API Work all_to_all_single_async(const at::Tensor& output, const at::Tensor& input,
                                          const AllToAllSingleOptions& options = {});
PACELINE_API Work barrier_async(const BarrierOptions& options = {});
PACELINE_API Work send_async(const at::Tensor& tensor, int dst, const SendOptions& options = {});
PACELINE_API Work recv_async(const at::Tensor& tensor, const RecvOptions& options = {});

// One message of a batch.
struct P2POp {
  enum class Kind { isend, irecv };
  Kind op;
  at::Tensor tensor;
  int peer;
  ProcessGroup group{};
  int tag = 0;
};
// Starts all of them, and returns a Work for each.
[[nodiscard]] PACELINE_API std::vector<Work> batch_isend_irecv(
    const std::vector<P2POp>& operations);

// Strings of any content, which may differ in length between ranks.
[[nodiscard]] PACELINE_API std::string broadcast_bytes(std::string_view bytes,
                                                       const BroadcastOptions& options = {});
[[nodiscard]] PACELINE_API std::vector<std::string> all_gather_bytes(
    std::string_view bytes, const AllGatherOptions& options = {});

}  // namespace paceline
