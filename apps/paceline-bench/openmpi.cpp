// OpenMPI's all-reduce of BYTES bytes of float32, taking turns with `paceline bench collectives` as
// a guest (guest.h):  mpirun -np N paceline-bench-openmpi BYTES

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <vector>

#include "batch.h"
#include "clock.h"
#include "node/futex.h"

namespace paceline::bench {
namespace {

// How rank 0 tells the others what to do. They sleep until then: OpenMPI's own calls would keep the
// cores busy that others are measured on.
class Orders {
 public:
  Orders() {
    const MPI_Aint bytes = rank() == 0 ? sizeof(Shared) : 0;
    void* mine = nullptr;
    MPI_Win_allocate_shared(bytes, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &mine, &window_);
    MPI_Aint size = 0;
    int unit = 0;
    void* shared = nullptr;
    MPI_Win_shared_query(window_, 0, &size, &unit, &shared);
    if (rank() == 0) new (shared) Shared{};
    shared_ = static_cast<Shared*>(shared);
    MPI_Barrier(MPI_COMM_WORLD);
  }
  Orders(const Orders&) = delete;
  Orders& operator=(const Orders&) = delete;
  ~Orders() { MPI_Win_free(&window_); }

  // The number of calls to make, 0 at the end. For all ranks together.
  int next() {
    if (rank() == 0) {
      int calls = 0;
      shared_->calls = std::scanf("%d", &calls) == 1 ? calls : 0;
      shared_->number.fetch_add(1);
      node::futex_wake_all(shared_->number);
    } else {
      while (shared_->number.load() == seen_) {
        node::futex_wait(shared_->number, seen_, std::chrono::seconds(1));
      }
      ++seen_;
    }
    return shared_->calls;
  }

  static int rank() {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank;
  }

 private:
  struct Shared {
    node::Word number{0};
    std::atomic<int> calls{0};
  };

  MPI_Win window_ = MPI_WIN_NULL;
  Shared* shared_ = nullptr;
  std::uint32_t seen_ = 0;
};

void measure(std::vector<std::vector<float>>& buffers, int calls) {
  double times[2] = {0, 0};
  const int batches = std::max(1, calls / static_cast<int>(buffers.size()));
  for (int batch = 0; batch < batches; ++batch) {
    for (auto& buffer : buffers) std::fill(buffer.begin(), buffer.end(), 1.0f);
    MPI_Barrier(MPI_COMM_WORLD);
    const double cpu = now_us(CLOCK_PROCESS_CPUTIME_ID);
    const double wall = now_us(CLOCK_MONOTONIC);
    for (auto& buffer : buffers) {
      MPI_Allreduce(MPI_IN_PLACE, buffer.data(), static_cast<int>(buffer.size()), MPI_FLOAT,
                    MPI_SUM, MPI_COMM_WORLD);
    }
    times[0] += now_us(CLOCK_MONOTONIC) - wall;
    times[1] += now_us(CLOCK_PROCESS_CPUTIME_ID) - cpu;
  }
  double slowest = 0;
  double all_ranks = 0;
  MPI_Reduce(&times[0], &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  MPI_Reduce(&times[1], &all_ranks, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  if (Orders::rank() != 0) return;
  const double count = static_cast<double>(batches) * static_cast<double>(buffers.size());
  std::printf("%.6f %.6f\n", slowest / count, all_ranks / count);
  std::fflush(stdout);
}

void run(std::int64_t bytes) {
  Orders orders;
  std::vector<std::vector<float>> buffers(static_cast<std::size_t>(calls_of(bytes)),
                                          std::vector<float>(static_cast<std::size_t>(bytes / 4)));
  while (const int calls = orders.next()) measure(buffers, calls);
}

}  // namespace
}  // namespace paceline::bench

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc == 2) paceline::bench::run(std::atoll(argv[1]));
  MPI_Finalize();
  return argc == 2 ? 0 : 2;
}
