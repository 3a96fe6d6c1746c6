#include <paceline/all_reduce_algorithms.h>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <optional>
#include <vector>

#include <paceline/error.h>

#include "distributed/counted_all_reduce.h"
#include "distributed/ring_schedule.h"

namespace paceline {

using distributed::CountedAllReduce;
using distributed::Tensors;

namespace {

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

// The steps from `begin` to before `end`. Their receives are all started first: a backend that
// tells the sender that it may begin would otherwise often do so behind this rank's own data.
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
    throw UsageError(
        fmt::format("parameter_server_all_reduce: servers is {}; it must be from 1 to the size of "
                    "the group, {}",
                    servers, size));
  }
  return reduce_by_servers({"parameter_server_all_reduce", tensor, options,
                            fmt::format(" over {} server{}", servers, servers == 1 ? "" : "s")},
                           servers);
}

}  // namespace paceline
