#pragma once

/// @file
/// Collectives and messages.
///
/// **Calls.** Every rank of the group calls the same collectives in the same order. A call returns
/// when this rank's tensors are final. On ranks that are not members of the group it does nothing.
///
/// **Tensors** are on the CPU or on a CUDA device, as the group's backends allow
/// (docs/backends.md). Results are written in place. A tensor that is not contiguous goes through a
/// copy; an asynchronous call writes that back in wait(). Output memory must not overlap other
/// inputs or outputs. Exception: a rank's own contribution may already be at its final position.
///
/// **Types** on the backend paceline. The calls that only move data take every type. Reductions
/// take:
/// - SUM, PRODUCT and PREMUL_SUM: floating, integer, bool and complex tensors;
/// - MIN and MAX: floating, integer and bool tensors;
/// - AVG: floating, integer and complex tensors; averages of integers are truncated towards zero;
/// - BAND, BOR and BXOR: integers and bool.
///
/// 16-bit floats are reduced in float32 and rounded once. all_reduce adds sparse COO tensors too.
///
/// **Errors.** Every call throws Mismatch if the ranks disagree on the call, its types or its
/// sizes; PeerLost if a rank has ended; Timeout if one does not come in time; UsageError for
/// arguments that this rank finds invalid by itself. Over gloo, failures are Error and name no
/// rank, and ranks that disagree may wait, or end the process. docs/errors.md lists the cases.
///
/// In shapes, W is the number of ranks in the group and r a rank in it. Ranks in arguments (`src`,
/// `dst`) and results are global ranks: a rank's number in the world, as in PyTorch, also if the
/// group is smaller.

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <paceline/api.h>
#include <paceline/distributed.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace c10d {
class Work;
}

namespace paceline {

/// SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, or PREMUL_SUM with its factor.
using ReduceOp = c10d::ReduceOp;

/// Options of all_reduce.
struct AllReduceOptions {
  ReduceOp op = ReduceOp::SUM;  ///< How elements are combined.
  ProcessGroup group{};         ///< The ranks that take part.
};
/// Options of reduce.
struct ReduceOptions {
  int dst = 0;                  ///< The rank that gets the result.
  ReduceOp op = ReduceOp::SUM;  ///< How elements are combined.
  ProcessGroup group{};         ///< The ranks that take part.
};
/// Options of broadcast and broadcast_bytes.
struct BroadcastOptions {
  int src = 0;           ///< The rank whose values all ranks get.
  ProcessGroup group{};  ///< The ranks that take part.
};
/// Options of all_gather, all_gather_into_tensor and all_gather_bytes.
struct AllGatherOptions {
  ProcessGroup group{};  ///< The ranks that take part.
};
/// Options of gather.
struct GatherOptions {
  int dst = 0;           ///< The rank that gets the tensors.
  ProcessGroup group{};  ///< The ranks that take part.
};
/// Options of scatter.
struct ScatterOptions {
  int src = 0;           ///< The rank that gives the tensors.
  ProcessGroup group{};  ///< The ranks that take part.
};
/// Options of reduce_scatter and reduce_scatter_tensor.
struct ReduceScatterOptions {
  ReduceOp op = ReduceOp::SUM;  ///< How elements are combined.
  ProcessGroup group{};         ///< The ranks that take part.
};
/// Options of all_to_all.
struct AllToAllOptions {
  ProcessGroup group{};  ///< The ranks that take part.
};
/// Options of all_to_all_single.
struct AllToAllSingleOptions {
  /// Rows of `output` from each rank, W numbers; empty: equally many.
  std::vector<std::int64_t> output_split_sizes{};
  /// Rows of `input` for each rank, W numbers; empty: equally many.
  std::vector<std::int64_t> input_split_sizes{};
  ProcessGroup group{};  ///< The ranks that take part.
};
/// Options of barrier.
struct BarrierOptions {
  ProcessGroup group{};  ///< The ranks that take part.
};
/// Options of monitored_barrier.
struct MonitoredBarrierOptions {
  ProcessGroup group{};                                ///< The ranks that take part.
  std::optional<std::chrono::milliseconds> timeout{};  ///< Not negative. Unset: the group's.
  bool wait_all_ranks = false;  ///< Whether rank 0 names all missing ranks, not only the first.
};
/// Options of send.
struct SendOptions {
  ProcessGroup group{};  ///< A group of both ranks.
  int tag = 0;           ///< Must equal the receive's tag.
};
/// Options of recv.
struct RecvOptions {
  std::optional<int> src{};  ///< The sender. Unset: any rank; the first message counts.
  ProcessGroup group{};      ///< A group of both ranks.
  int tag = 0;               ///< Must equal the send's tag.
};

/// An operation under way. It keeps its tensors alive; do not touch them before wait() returns. If
/// it is destroyed, the operation still finishes. Move-only; a moved-from Work is complete. Use it
/// on one thread at a time.
class [[nodiscard]] PACELINE_API Work {
 public:
  /// A complete operation, as on ranks that are not members of the group.
  Work() = default;
  /// `contiguous[i]` is what the operation writes for `tensors[i]`: the same, or a contiguous copy.
  Work(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors,
       std::vector<at::Tensor> contiguous, ProcessGroup group);
  /// Leaves `other` complete.
  Work(Work&& other) noexcept = default;
  /// Leaves `other` complete. The operation that this object held still finishes.
  Work& operator=(Work&& other) noexcept = default;

  /// Returns once the operation is complete, and throws its error if it failed.
  void wait();
  /// The same, but throws Timeout if that takes longer than `timeout`. The operation goes on.
  void wait(std::chrono::milliseconds timeout);
  /// Whether wait() would return at once. Over gloo it stays false for a message until wait() has
  /// returned, so do not poll it there.
  [[nodiscard]] bool is_completed() const;
  /// The global rank of the sender of a completed recv_async; -1 on a rank that is not a member of
  /// the group. Throws for other operations.
  [[nodiscard]] int source_rank() const;

 private:
  void write_back();

  c10::intrusive_ptr<c10::intrusive_ptr_target> work_;  // a c10d::Work
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> contiguous_;
  ProcessGroup group_;
};

/// A contiguous, uninitialised tensor in registered memory of the group, if its backend has such
/// memory: all ranks map it, and calls read and write it in place instead of through staging
/// buffers. Over another backend, and on ranks that are not members, it is in this process's own
/// memory. It may outlive the group.
///
/// Throws Error with the requested size if there is no room. After a failure of the group, throws
/// that failure.
[[nodiscard]] PACELINE_API at::Tensor allocate_tensor(at::IntArrayRef sizes,
                                                      const at::TensorOptions& options = {},
                                                      const ProcessGroup& group = {});

/// Combines the ranks' tensors element by element; every rank gets the result in `tensor`. The
/// ranks' tensors have the same type and number of elements.
PACELINE_API void all_reduce(const at::Tensor& tensor, const AllReduceOptions& options = {});
/// As all_reduce, but only rank `dst` gets the result. The other ranks' tensors keep their values
/// on the backend paceline; other backends may change them.
PACELINE_API void reduce(const at::Tensor& tensor, const ReduceOptions& options = {});
/// Copies rank `src`'s `tensor` into the `tensor` of every other rank. The ranks' tensors have the
/// same type and number of elements.
PACELINE_API void broadcast(const at::Tensor& tensor, const BroadcastOptions& options = {});
/// `tensors`: W tensors. tensors[r] gets rank r's `tensor`, and has as many elements. All have one
/// type. On the backend paceline, ranks may give tensors of different sizes.
PACELINE_API void all_gather(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor,
                             const AllGatherOptions& options = {});
/// `output` gets the ranks' `input` one after the other. For an `input` of shape (N, ...), `output`
/// is (W * N, ...) or (W, N, ...). `input` has one size and type on all ranks.
PACELINE_API void all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input,
                                         const AllGatherOptions& options = {});
/// `gather_list`: W tensors on rank `dst`, empty on the other ranks. gather_list[r] gets rank r's
/// `tensor`, and has as many elements. All have one size and type.
PACELINE_API void gather(const at::Tensor& tensor, const std::vector<at::Tensor>& gather_list = {},
                         const GatherOptions& options = {});
/// `scatter_list`: W tensors on rank `src`, empty on the other ranks. Rank r's `tensor` gets
/// scatter_list[r], and has as many elements. All have one size and type.
PACELINE_API void scatter(const at::Tensor& tensor,
                          const std::vector<at::Tensor>& scatter_list = {},
                          const ScatterOptions& options = {});
/// `inputs`: W tensors. Rank r's `output` gets the reduction of all ranks' inputs[r]. All have one
/// type. On every rank, inputs[r] has as many elements as rank r's output.
PACELINE_API void reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                                 const ReduceScatterOptions& options = {});
/// The same with W inputs of one size in one tensor, one after the other: `input` has W times the
/// elements of `output`, as (W * N, ...) or (W, N, ...) for (N, ...).
PACELINE_API void reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                                        const ReduceScatterOptions& options = {});
/// `outputs` and `inputs`: W tensors each, of one type. outputs[r] on rank q receives inputs[q] of
/// rank r; these two have equal size (MPI_Alltoallv). On gloo all sizes are equal.
PACELINE_API void all_to_all(const std::vector<at::Tensor>& outputs,
                             const std::vector<at::Tensor>& inputs,
                             const AllToAllOptions& options = {});
/// The same with rows of the first dimension: `input` is (sum of input_split_sizes, ...), `output`
/// (sum of output_split_sizes, ...). Without split sizes both first dimensions are multiples of W.
PACELINE_API void all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                                    const AllToAllSingleOptions& options = {});
/// Returns once every rank has called it.
PACELINE_API void barrier(const BarrierOptions& options = {});
/// A barrier with a timeout of its own. On rank 0, Timeout names the first rank that did not come,
/// or with `wait_all_ranks` all of them; other ranks throw one too, with the same ranks. They wait
/// the timeout for rank 0 to arrive, and as long again, and a little, for what it finds. The group
/// remains usable. On the backend paceline on one node, if a rank has made another call instead,
/// every rank throws Mismatch. Over gloo it throws Error, on rank 0 with LibTorch's text that names
/// ranks, and the group is of no further use.
PACELINE_API void monitored_barrier(const MonitoredBarrierOptions& options = {});

/// Sends `tensor` to rank `dst`, whose recv has the same tag, type and number of elements. Returns
/// once `tensor` may be changed. That may be when `dst` receives it, so that two ranks which first
/// send to each other wait for ever: see batch_isend_irecv. Messages between two ranks with one tag
/// keep their order.
PACELINE_API void send(const at::Tensor& tensor, int dst, const SendOptions& options = {});
/// Receives a message into `tensor`. Returns the sender's global rank; -1 on a rank that is not a
/// member of the group.
PACELINE_API int recv(const at::Tensor& tensor, const RecvOptions& options = {});

/// @name Asynchronous calls
/// The calls above, which return at once: call Work::wait() before the tensors are used.
/// Collectives of one group run in the order of the calls, synchronous ones included. Messages run
/// beside them.
/// @{

/// all_reduce; see there.
PACELINE_API Work all_reduce_async(const at::Tensor& tensor, const AllReduceOptions& options = {});
/// reduce; see there.
PACELINE_API Work reduce_async(const at::Tensor& tensor, const ReduceOptions& options = {});
/// broadcast; see there.
PACELINE_API Work broadcast_async(const at::Tensor& tensor, const BroadcastOptions& options = {});
/// all_gather; see there.
PACELINE_API Work all_gather_async(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor,
                                   const AllGatherOptions& options = {});
/// all_gather_into_tensor; see there.
PACELINE_API Work all_gather_into_tensor_async(const at::Tensor& output, const at::Tensor& input,
                                               const AllGatherOptions& options = {});
/// gather; see there.
PACELINE_API Work gather_async(const at::Tensor& tensor,
                               const std::vector<at::Tensor>& gather_list = {},
                               const GatherOptions& options = {});
/// scatter; see there.
PACELINE_API Work scatter_async(const at::Tensor& tensor,
                                const std::vector<at::Tensor>& scatter_list = {},
                                const ScatterOptions& options = {});
/// reduce_scatter; see there.
PACELINE_API Work reduce_scatter_async(const at::Tensor& output,
                                       const std::vector<at::Tensor>& inputs,
                                       const ReduceScatterOptions& options = {});
/// reduce_scatter_tensor; see there.
PACELINE_API Work reduce_scatter_tensor_async(const at::Tensor& output, const at::Tensor& input,
                                              const ReduceScatterOptions& options = {});
/// all_to_all; see there.
PACELINE_API Work all_to_all_async(const std::vector<at::Tensor>& outputs,
                                   const std::vector<at::Tensor>& inputs,
                                   const AllToAllOptions& options = {});
/// all_to_all_single; see there.
PACELINE_API Work all_to_all_single_async(const at::Tensor& output, const at::Tensor& input,
                                          const AllToAllSingleOptions& options = {});
/// barrier; see there.
PACELINE_API Work barrier_async(const BarrierOptions& options = {});
/// send; see there.
PACELINE_API Work send_async(const at::Tensor& tensor, int dst, const SendOptions& options = {});
/// recv; see there. Work::source_rank() gives the sender.
PACELINE_API Work recv_async(const at::Tensor& tensor, const RecvOptions& options = {});

/// One message of batch_isend_irecv.
struct P2POp {
  /// Whether a message is sent or received.
  enum class Kind {
    isend,  ///< As send_async.
    irecv   ///< As recv_async.
  };
  Kind op;               ///< Whether this rank sends or receives.
  at::Tensor tensor;     ///< What is sent, or where the message is stored.
  int peer;              ///< The global rank of the receiver or sender.
  ProcessGroup group{};  ///< A group of both ranks.
  int tag = 0;           ///< Must be the same on both ranks.
};
/// Starts all of them, and returns a Work for each.
[[nodiscard]] PACELINE_API std::vector<Work> batch_isend_irecv(
    const std::vector<P2POp>& operations);
/// @}

/// Returns rank `src`'s `bytes` on every rank; they may have any content and length. `bytes` of
/// other ranks is not used. Collective. Empty on ranks that are not members.
[[nodiscard]] PACELINE_API std::string broadcast_bytes(std::string_view bytes,
                                                       const BroadcastOptions& options = {});
/// Returns W strings, the r-th from rank r. They may have any content, and different lengths.
/// Collective. Empty on ranks that are not members.
[[nodiscard]] PACELINE_API std::vector<std::string> all_gather_bytes(
    std::string_view bytes, const AllGatherOptions& options = {});

}  // namespace paceline
