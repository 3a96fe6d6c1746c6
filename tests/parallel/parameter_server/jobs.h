#pragma once

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <paceline/parameter_server.h>

#include "distributed/rendezvous/memory_store.h"
#include "support/process_ranks.h"
#include "support/torch_ranks.h"

namespace paceline::test {

// A process of a job with a parameter server.
struct JobContext {
  int process;  // one that comes in place of another has that one's rank, but a number of its own
  int rank;
  ParameterServerOptions options;
  // For what the processes of a test say to each other.
  c10::intrusive_ptr<c10d::Store> store;
};

struct JobShape {
  int servers = 1;
  int workers = 1;
  std::optional<std::int64_t> staleness = 0;
  std::vector<int> replaced{};  // the ranks of further processes
  bool two_nodes = false;
  std::chrono::milliseconds timeout = std::chrono::seconds(60);

  int size() const { return servers + workers; }
};

// Runs `body` in each process, whose store outlives killed ones, as the launcher's does.
inline std::vector<RankEnd> run_job(const JobShape& shape,
                                    const std::function<std::string(const JobContext&)>& body) {
  const base::UniqueFd memory(::memfd_create("store", MFD_CLOEXEC));
  const std::string path = fmt::format("/proc/self/fd/{}", memory.get());
  const int processes = shape.size() + static_cast<int>(shape.replaced.size());
  return run_process_ranks(processes, [&](int process, shm::BootstrapSockets sockets) {
    sockets.clear();
    at::set_num_threads(1);
    const int rank = process < shape.size()
                         ? process
                         : shape.replaced.at(static_cast<std::size_t>(process - shape.size()));
    if (shape.two_nodes) pretend_nodes(rank, shape.size());
    auto store = c10::make_intrusive<distributed::MemoryStore>(path, "the store");
    return body({process,
                 rank,
                 {.servers = shape.servers,
                  .staleness = shape.staleness,
                  .init = {.timeout = shape.timeout,
                           .world_size = shape.size(),
                           .rank = rank,
                           .store = store}},
                 c10::make_intrusive<c10d::PrefixStore>("test", store)});
  });
}

inline void expect_clean(const std::vector<RankEnd>& ends) {
  for (std::size_t i = 0; i < ends.size(); ++i) {
    EXPECT_TRUE(ends[i].exited_cleanly()) << "process " << i << ": " << ends[i].report;
  }
}

inline ParameterServer::MakeOptimizer sgd(double lr, double momentum = 0) {
  return [=](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                               torch::optim::SGDOptions(lr).momentum(momentum));
  };
}

}  // namespace paceline::test
