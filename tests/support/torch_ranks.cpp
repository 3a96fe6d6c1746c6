#include "support/torch_ranks.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <cstdlib>
#include <stdexcept>

namespace paceline::test {

namespace {

constexpr std::chrono::seconds kCallTimeout{60};

// This process's number as mpirun or the launcher counts.
int launched_rank() {
  for (const char* const name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK"}) {
    if (const char* const rank = std::getenv(name)) return std::stoi(rank);
  }
  return 0;
}

// As a program that calls MPI_Init, after which only its main thread may call MPI. The plug-in is
// for the symbols of its MPI.
void initialise_mpi(const char* plugin) {
  if (::dlopen(plugin, RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(::dlerror());
  const auto init = reinterpret_cast<int (*)(int*, char***)>(::dlsym(RTLD_DEFAULT, "MPI_Init"));
  static const auto finalize = reinterpret_cast<int (*)()>(::dlsym(RTLD_DEFAULT, "MPI_Finalize"));
  init(nullptr, nullptr);
  std::atexit([] { finalize(); });
}

RankContext rank_in(const WorldCase& world) {
  static const int rank = [] {
    if (const char* const plugin = std::getenv("PACELINE_TEST_MPI_INIT")) initialise_mpi(plugin);
    return launched_rank();
  }();
  if (world.backend == kLaunched) return {rank, world.size, {.timeout = kCallTimeout}};
  InitOptions init{.backend = kMpi, .timeout = kCallTimeout};
  if (world.backend == kMpiAcrossNodes) {
    pretend_nodes(rank, world.size);
    static int worlds = 0;
    const auto path = fmt::format("/tmp/paceline_test_{}_{}", ::getppid(), ++worlds);
    init.backend = "paceline";
    init.backend_options = PacelineOptions{.engine = kMpi};
    init.rank = rank;
    init.world_size = world.size;
    init.store = c10::make_intrusive<c10d::FileStore>(path, world.size);
  }
  return {rank, world.size, init};
}

}  // namespace

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

std::optional<WorldCase> launched_world() {
  if (std::getenv("PACELINE_TEST_LAUNCHED") != nullptr) {
    return WorldCase{kLaunched, std::stoi(std::getenv("WORLD_SIZE"))};
  }
  const char* const backend = std::getenv("PACELINE_TEST_MPI");
  const char* const ranks = std::getenv("PACELINE_TEST_MPI_RANKS");
  if (backend == nullptr || ranks == nullptr) return std::nullopt;
  return WorldCase{backend, std::stoi(ranks)};
}

std::vector<std::string> backends() {
  return is_gloo_available() ? std::vector<std::string>{"paceline", "gloo"}
                             : std::vector<std::string>{"paceline"};
}

std::vector<RankEnd> run_torch_ranks(int size, const std::string& backend,
                                     const std::function<std::string(const RankContext&)>& body) {
  if (const auto world = launched_world()) {
    at::set_num_threads(1);
    const std::string report = body(rank_in(*world));
    return {static_cast<std::size_t>(size), RankEnd{0, report}};
  }
  const base::UniqueFd memory(::memfd_create("store", MFD_CLOEXEC));
  const std::string path = fmt::format("/proc/self/fd/{}", memory.get());
  const bool nodes = backend == kAcrossNodes;
  return run_process_ranks(size, [&](int rank, shm::BootstrapSockets links) {
    links.clear();
    at::set_num_threads(1);
    if (nodes) pretend_nodes(rank, size);
    return body({rank, size,
                 InitOptions{.backend = nodes ? "paceline" : backend,
                             .timeout = kCallTimeout,
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
