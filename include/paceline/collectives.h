#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <paceline/distributed.h>

#include <string>
#include <string_view>
#include <vector>

namespace paceline {

// Every rank of the group must make the same calls in the same order. The calls return when this
// rank's tensors are final, and throw on failure: Mismatch if the ranks do not agree, PeerLost,
// Timeout, UsageError for arguments that cannot work. Tensors are modified in place; those that are
// not contiguous through a copy, which for asynchronous calls is written back by wait().
//
// On the backend paceline: reductions take float32, float64, bfloat16 and int64 with SUM, AVG (not
// int64), MIN and MAX; the calls that only move data take every type. Tensors live on the CPU.

using ReduceOp = c10d::ReduceOp;

struct AllReduceOptions {
  ReduceOp op = ReduceOp::SUM;
  ProcessGroup group{};
};
struct BroadcastOptions {
  int src = 0;  // rank in the world, as in PyTorch, also when `group` is smaller
  ProcessGroup group{};
};
struct GatherOptions {
  ProcessGroup group{};
};
struct ReduceScatterOptions {
  ReduceOp op = ReduceOp::SUM;
  ProcessGroup group{};
};
struct BarrierOptions {
  ProcessGroup group{};
};

// An operation under way. It keeps its tensors alive; they must not be touched before wait()
// returns. Dropping it lets the operation finish by itself. Used by one thread at a time.
class [[nodiscard]] Work {
 public:
  // Of a call on a group that this rank is no member of: complete.
  Work() = default;
  // `dense[i]` is what the operation works on for `tensors[i]`: the same, or a contiguous copy.
  Work(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors,
       std::vector<at::Tensor> dense);

  // Returns once the operation is complete and throws its error if it failed. With a timeout,
  // throws Timeout if it takes longer; the operation itself goes on.
  void wait();
  void wait(std::chrono::milliseconds timeout);
  bool is_completed() const;

 private:
  void write_back();

  c10::intrusive_ptr<c10d::Work> work_;
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> dense_;
};

void all_reduce(const at::Tensor& tensor, const AllReduceOptions& options = {});
void broadcast(const at::Tensor& tensor, const BroadcastOptions& options = {});
// tensors[r] receives rank r's `tensor`; all have the same shape and type.
void all_gather(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor,
                const GatherOptions& options = {});
// `output` is the concatenation of every rank's `input`: get_world_size(group) times its elements.
void all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input,
                            const GatherOptions& options = {});
// `output` receives the reduction of every rank's inputs[r], r being this rank.
void reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                    const ReduceScatterOptions& options = {});
// The same with the inputs in one tensor, one after the other.
void reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                           const ReduceScatterOptions& options = {});
void barrier(const BarrierOptions& options = {});

// These return at once; operations of one group run in the order in which they were called, the
// calls above included.
Work all_reduce_async(const at::Tensor& tensor, const AllReduceOptions& options = {});
Work broadcast_async(const at::Tensor& tensor, const BroadcastOptions& options = {});
Work all_gather_async(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor,
                      const GatherOptions& options = {});
Work all_gather_into_tensor_async(const at::Tensor& output, const at::Tensor& input,
                                  const GatherOptions& options = {});
Work reduce_scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                          const ReduceScatterOptions& options = {});
Work reduce_scatter_tensor_async(const at::Tensor& output, const at::Tensor& input,
                                 const ReduceScatterOptions& options = {});
Work barrier_async(const BarrierOptions& options = {});

// Strings of any content, which may differ in length between ranks.
std::string broadcast_bytes(std::string_view bytes, const BroadcastOptions& options = {});
std::vector<std::string> all_gather_bytes(std::string_view bytes,
                                          const GatherOptions& options = {});

}  // namespace paceline
