#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <paceline/all_reduce_algorithms.h>
#include <paceline/error.h>

#include "distributed/reduction.h"
#include "distributed/ring_schedule.h"
#include "distributed/start.h"
#include "shm/collectives/fingerprint.h"
#include "shm/kernels/kernels.h"

namespace paceline {
namespace {

using distributed::Tensors;

constexpr int kMessageTag = 32767;  // the last that every MPI has

// Messages do not compare enough: a rank with an empty chunk sends none, so its neighbour would
// wait, and Gloo ends a process whose receive is smaller than the message.
void check_same_call(const std::string& operation, const std::string& call,
                     const ProcessGroup& group) {
  const std::vector<std::string> calls = all_gather_bytes(call, {.group = group});
  if (std::ranges::all_of(calls, [&](const std::string& one) { return one == call; })) return;
  std::vector<int> members;
  for (std::size_t rank = 0; rank < calls.size(); ++rank) {
    members.push_back(distributed::global_rank_of(group, static_cast<int>(rank)));
  }
  const shm::GlobalRanks global_ranks(members);
  const shm::Disagreement found = shm::explain_disagreement(calls, global_ranks);
  throw Mismatch(found.text, global_ranks.of(found.ranks).list(), operation, 0);
}

// One call on a rank that is a member of the group.
class CountedAllReduce {
 public:
  // `details` ends the description of the call that the ranks compare.
  CountedAllReduce(const char* operation, const at::Tensor& tensor, const AllReduceOptions& options,
                   const std::string& details = "")
      : tensor_(tensor),
        group_(options.group),
        rank_(get_rank(group_)),
        size_(get_world_size(group_)) {
    check_dense(operation, tensor);
    distributed::check_no_overlap(tensor, operation);
    how_ = distributed::reduction(options.op, tensor, operation);
    check_same_call(operation,
                    fmt::format("{} of {} {}{}{}", operation, tensor.numel(), shm::name(how_.type),
                                op_in_words(), details),
                    group_);
    const at::NoGradGuard no_grad;
    flat_ = distributed::premultiplied(tensor, options.op)
                .resolve_conj()
                .resolve_neg()
                .contiguous()
                .detach()
                .view({-1});
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Parts of the tensor, whose sizes differ by one element at most; the first ones are larger.
  Tensors cut(int parts) const { return flat_.tensor_split(parts); }

  Work send(const at::Tensor& part, int to) {
    if (part.numel() == 0) return {};
    traffic_.bytes_sent += static_cast<std::int64_t>(part.nbytes());
    ++traffic_.messages_sent;
    return send_async(part, distributed::global_rank_of(group_, to),
                      {.group = group_, .tag = kMessageTag});
  }
  Work receive(const at::Tensor& part, int from) {
    if (part.numel() == 0) return {};
    traffic_.bytes_received += static_cast<std::int64_t>(part.nbytes());
    ++traffic_.messages_received;
    return recv_async(
        part,
        {.src = distributed::global_rank_of(group_, from), .group = group_, .tag = kMessageTag});
  }

  void add(const at::Tensor& part, const at::Tensor& sum) const {
    const auto op = how_.op == shm::ReduceOp::avg ? shm::ReduceOp::sum : how_.op;
    reduce(op, std::array<const void*, 2>{sum.data_ptr(), part.data_ptr()}, sum);
  }
  // Of a part that all ranks have added up.
  void divide_if_average(const at::Tensor& sum) const {
    if (how_.op == shm::ReduceOp::avg) {
      reduce(how_.op, std::array<const void*, 1>{sum.data_ptr()}, sum);
    }
  }

  Traffic finish() {
    const at::NoGradGuard no_grad;
    if (flat_.data_ptr() != tensor_.data_ptr()) tensor_.copy_(flat_.view_as(tensor_));
    return traffic_;
  }

 private:
  static void check_dense(const char* operation, const at::Tensor& tensor) {
    distributed::device_of(tensor, operation);
    if (tensor.device().is_cpu() && tensor.layout() == at::kStrided) return;
    throw UsageError(fmt::format("{} of a {} tensor on {}: it takes dense tensors on the CPU",
                                 operation, c10::str(tensor.layout()), tensor.device().str()));
  }
  std::string op_in_words() const {
    return how_.op == shm::ReduceOp::sum ? "" : fmt::format(" with {}", shm::name(how_.op));
  }
  void reduce(shm::ReduceOp op, std::span<const void* const> sources, const at::Tensor& to) const {
    void* const destination = to.data_ptr();
    shm::reduce(how_.type, op, {.sources = sources}, size_, std::span(&destination, 1),
                static_cast<std::size_t>(to.numel()));
  }

  at::Tensor tensor_;
  ProcessGroup group_;
  int rank_;
  int size_;
  distributed::Reduction how_{};
  at::Tensor flat_;
  Traffic traffic_;
};

std::size_t to_index(int number) {
  return static_cast<std::size_t>(number);
}

void wait_for_all(std::vector<Work>& works) {
  for (Work& work : works) work.wait();
}

// The parts of a server's shard that the other ranks push, as they arrive.
class PushedParts {
 public:
  PushedParts(CountedAllReduce& call, const at::Tensor& shard) {
    for (int rank = 0; rank < call.size(); ++rank) {
      if (rank == call.rank()) continue;
      parts_.push_back(at::empty_like(shard));
      receives_.push_back(call.receive(parts_.back(), rank));
    }
  }
  void add_to(const CountedAllReduce& call, const at::Tensor& shard) {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      receives_[i].wait();
      call.add(parts_[i], shard);
    }
    call.divide_if_average(shard);
  }

 private:
  Tensors parts_;
  std::vector<Work> receives_;
};

Traffic reduce_by_servers(CountedAllReduce call, int servers) {
  const Tensors shards = call.cut(servers);
  const int own = call.rank();
  std::optional<PushedParts> parts;  // before this rank's sends, as in a ring
  if (own < servers) parts.emplace(call, shards[to_index(own)]);
  std::vector<Work> pushes;
  for (int server = 0; server < servers; ++server) {
    if (server != own) pushes.push_back(call.send(shards[to_index(server)], server));
  }
  wait_for_all(pushes);  // a pull writes what a push reads
  std::vector<Work> pulls;
  for (int server = 0; server < servers; ++server) {
    if (server != own) pulls.push_back(call.receive(shards[to_index(server)], server));
  }
  if (parts) parts->add_to(call, shards[to_index(own)]);
  for (int rank = 0; parts && rank < call.size(); ++rank) {
    if (rank != own) pulls.push_back(call.send(shards[to_index(own)], rank));
  }
  wait_for_all(pulls);
  return call.finish();
}

// The steps from `begin` to before `end`. Their receives are all started first. Otherwise what a
// backend sends to ask for a message would often be behind this rank's own data on its link.
void run_half_of_ring(CountedAllReduce& call, const Tensors& chunks, int begin, int end) {
  const int size = call.size();
  const int next = (call.rank() + 1) % size;
  const int previous = (call.rank() + size - 1) % size;
  const auto of_step = [&](auto choose, int step) {
    return chunks[to_index(choose(call.rank(), step, size))];
  };
  Tensors incoming;
  std::vector<Work> receives;
  for (int step = begin; step < end; ++step) {
    const at::Tensor mine = of_step(distributed::chunk_received_in_ring, step);
    incoming.push_back(distributed::adds_in_ring(step, size) ? at::empty_like(mine) : mine);
    receives.push_back(call.receive(incoming.back(), previous));
  }
  for (int step = begin; step < end; ++step) {
    const std::size_t i = to_index(step - begin);
    Work sending = call.send(of_step(distributed::chunk_sent_in_ring, step), next);
    receives[i].wait();
    if (distributed::adds_in_ring(step, size)) {
      call.add(incoming[i], of_step(distributed::chunk_received_in_ring, step));
    }
    sending.wait();
  }
}

}  // namespace

Traffic ring_all_reduce(const at::Tensor& tensor, const AllReduceOptions& options) {
  if (!options.group.is_member()) return {};
  CountedAllReduce call("ring_all_reduce", tensor, options);
  const Tensors chunks = call.cut(call.size());
  const int middle = distributed::ring_steps(call.size()) / 2;
  run_half_of_ring(call, chunks, 0, middle);
  if (middle > 0) {
    const int received = distributed::chunk_received_in_ring(call.rank(), middle - 1, call.size());
    call.divide_if_average(chunks[to_index(received)]);
  }
  run_half_of_ring(call, chunks, middle, 2 * middle);
  return call.finish();
}

Traffic naive_all_reduce(const at::Tensor& tensor, const AllReduceOptions& options) {
  if (!options.group.is_member()) return {};
  return reduce_by_servers({"naive_all_reduce", tensor, options}, 1);
}

Traffic parameter_server_all_reduce(const at::Tensor& tensor, int servers,
                                    const AllReduceOptions& options) {
  if (!options.group.is_member()) return {};
  const int size = get_world_size(options.group);
  if (servers < 1 || servers > size) {
    throw UsageError(fmt::format(
        "parameter_server_all_reduce with {} servers in a group of {} ranks: 1 to {} are possible",
        servers, size, size));
  }
  return reduce_by_servers({"parameter_server_all_reduce", tensor, options,
                            fmt::format(" over {} server{}", servers, servers == 1 ? "" : "s")},
                           servers);
}

}  // namespace paceline
