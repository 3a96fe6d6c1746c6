#include "support/torch_ranks.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <cstdlib>

namespace paceline::test {

namespace {

// As a launcher does that started the ranks on two nodes.
void pretend_nodes(int rank, int size) {
  const int first = (size + 1) / 2;  // on node 0
  const bool second = rank >= first;
  const auto set = [](const char* name, int value) {
    ::setenv(name, std::to_string(value).c_str(), 1);
  };
  set("RANK", rank);
  set("WORLD_SIZE", size);
  set("GROUP_RANK", second ? 1 : 0);
  set("LOCAL_RANK", second ? rank - first : rank);
  set("LOCAL_WORLD_SIZE", second ? size - first : first);
}

}  // namespace

std::vector<std::string> backends() {
  return is_gloo_available() ? std::vector<std::string>{"paceline", "gloo"}
                             : std::vector<std::string>{"paceline"};
}

std::vector<RankEnd> run_torch_ranks(int size, const std::string& backend,
                                     const std::function<std::string(const RankContext&)>& body) {
  const base::UniqueFd memory(::memfd_create("store", MFD_CLOEXEC));
  const std::string path = fmt::format("/proc/self/fd/{}", memory.get());
  const bool nodes = backend == kAcrossNodes;
  return run_process_ranks(size, [&](int rank, shm::BootstrapSockets links) {
    links.clear();
    at::set_num_threads(1);
    if (nodes) pretend_nodes(rank, size);
    return body({rank, size,
                 InitOptions{.backend = nodes ? "paceline" : backend,
                             .timeout = std::chrono::seconds(60),
                             .world_size = size,
                             .rank = rank,
                             .store = c10::make_intrusive<c10d::FileStore>(path, size)}});
  });
}

void expect_torch_ranks(int size, const std::string& backend,
                        const std::function<void(int, int)>& body) {
  const auto ends = run_torch_ranks(size, backend, [&](const RankContext& context) {
    const World world = init_process_group(context.init);
    body(context.rank, context.size);
    return std::string();
  });
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    EXPECT_TRUE(ends[rank].exited_cleanly())
        << "rank " << rank << " of " << size << " on " << backend << ": " << ends[rank].report;
  }
}

}  // namespace paceline::test
