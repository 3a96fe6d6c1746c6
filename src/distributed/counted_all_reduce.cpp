#include "distributed/counted_all_reduce.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include <paceline/error.h>

#include "shm/collectives/fingerprint.h"
#include "shm/kernels/kernels.h"

namespace paceline::distributed {
namespace {

constexpr int kMessageTag = 32767;  // the last that every MPI has

// Messages do not compare enough: a rank with an empty chunk sends none, so its neighbour would
// wait, and Gloo ends a process whose receive is smaller than the message.
void check_same_call(const std::string& operation, const std::string& call,
                     const ProcessGroup& group) {
  const std::vector<std::string> calls = all_gather_bytes(call, {.group = group});
  if (std::ranges::all_of(calls, [&](const std::string& one) { return one == call; })) return;
  std::vector<int> members;
  for (std::size_t rank = 0; rank < calls.size(); ++rank) {
    members.push_back(global_rank_of(group, static_cast<int>(rank)));
  }
  const shm::GlobalRanks global_ranks(members);
  const shm::Disagreement found = shm::explain_disagreement(calls, global_ranks);
  throw Mismatch(found.text, global_ranks.of(found.ranks).list(), operation, 0);
}

void check_dense(const char* operation, const at::Tensor& tensor) {
  device_of(tensor, operation);
  if (tensor.device().is_cpu() && tensor.layout() == at::kStrided) return;
  throw UsageError(fmt::format("{} of a {} tensor on {}: it takes dense tensors on the CPU",
                               operation, c10::str(tensor.layout()), tensor.device().str()));
}

}  // namespace

CountedAllReduce::CountedAllReduce(const char* operation, const at::Tensor& tensor,
                                   const AllReduceOptions& options, const std::string& details)
    : tensor_(tensor),
      group_(options.group),
      rank_(get_rank(group_)),
      size_(get_world_size(group_)) {
  check_dense(operation, tensor);
  check_no_overlap(tensor, operation);
  how_ = reduction(options.op, tensor, operation);
  const std::string op =
      how_.op == shm::ReduceOp::sum ? "" : fmt::format(" with {}", shm::name(how_.op));
  check_same_call(
      operation,
      fmt::format("{} of {} {}{}{}", operation, tensor.numel(), shm::name(how_.type), op, details),
      group_);
  const at::NoGradGuard no_grad;
  flat_ = premultiplied(tensor, options.op)
              .resolve_conj()
              .resolve_neg()
              .contiguous()
              .detach()
              .view({-1});
}

Work CountedAllReduce::send(const at::Tensor& part, int to) {
  if (part.numel() == 0) return {};
  traffic_.bytes_sent += static_cast<std::int64_t>(part.nbytes());
  ++traffic_.messages_sent;
  return send_async(part, global_rank_of(group_, to), {.group = group_, .tag = kMessageTag});
}

Work CountedAllReduce::receive(const at::Tensor& part, int from) {
  if (part.numel() == 0) return {};
  traffic_.bytes_received += static_cast<std::int64_t>(part.nbytes());
  ++traffic_.messages_received;
  return recv_async(part,
                    {.src = global_rank_of(group_, from), .group = group_, .tag = kMessageTag});
}

void CountedAllReduce::add(const at::Tensor& part, const at::Tensor& sum) const {
  const auto op = how_.op == shm::ReduceOp::avg ? shm::ReduceOp::sum : how_.op;
  reduce(op, std::array<const void*, 2>{sum.data_ptr(), part.data_ptr()}, sum);
}

void CountedAllReduce::divide_if_average(const at::Tensor& sum) const {
  if (how_.op != shm::ReduceOp::avg) return;
  reduce(how_.op, std::array<const void*, 1>{sum.data_ptr()}, sum);
}

Traffic CountedAllReduce::finish() {
  const at::NoGradGuard no_grad;
  if (flat_.data_ptr() != tensor_.data_ptr()) tensor_.copy_(flat_.view_as(tensor_));
  return traffic_;
}

void CountedAllReduce::reduce(shm::ReduceOp op, std::span<const void* const> sources,
                              const at::Tensor& to) const {
  void* const destination = to.data_ptr();
  shm::reduce(how_.type, op, {.sources = sources}, size_, std::span(&destination, 1),
              static_cast<std::size_t>(to.numel()));
}

}  // namespace paceline::distributed
