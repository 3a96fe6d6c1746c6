// OpenMPI's collectives on float32, as an ExternalPeer of `paceline bench collectives`: they take
// turns with its collectives, on buffers of the same sizes.
//
//     mpirun -np N paceline-bench-openmpi NAME BYTES

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "collectives/batch.h"
#include "measure/clock.h"
#include "shm/sync/futex.h"

namespace paceline::bench {
namespace {

// How rank 0 tells the others what to do. The others sleep until then: a wait in OpenMPI would keep
// cores busy while other peers are measured.
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
      shm::futex_wake_all(shared_->number);
    } else {
      while (shared_->number.load() == seen_) {
        shm::futex_wait(shared_->number, seen_, std::chrono::seconds(1));
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
    shm::Word number{0};
    std::atomic<int> calls{0};
  };

  MPI_Win window_ = MPI_WIN_NULL;
  Shared* shared_ = nullptr;
  std::uint32_t seen_ = 0;
};

// See Buffers in collective.cpp.
struct Buffers {
  int elements;  // of a part
  std::vector<float> whole;
  std::vector<float> part;
  std::vector<float> other;

  Buffers(int ranks, std::int64_t bytes)
      : elements(static_cast<int>(std::max<std::int64_t>(bytes / 4 / ranks, 1))),
        whole(static_cast<std::size_t>(std::max(bytes / 4, std::int64_t{elements} * ranks))),
        part(static_cast<std::size_t>(elements)),
        other(whole.size()) {}
  void refill() {
    for (auto* const one : {&whole, &part, &other}) std::fill(one->begin(), one->end(), 1.0f);
  }
  int count() const { return static_cast<int>(whole.size()); }
};

using Call = void (*)(Buffers&, int rank, int size);
const std::map<std::string, Call>& all_calls() {
  static const std::map<std::string, Call> calls{
      {"all_reduce",
       [](Buffers& x, int, int) {
         MPI_Allreduce(MPI_IN_PLACE, x.whole.data(), x.count(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
       }},
      {"reduce",
       [](Buffers& x, int rank, int) {
         MPI_Reduce(rank == 0 ? MPI_IN_PLACE : x.whole.data(), x.whole.data(), x.count(), MPI_FLOAT,
                    MPI_SUM, 0, MPI_COMM_WORLD);
       }},
      {"broadcast",
       [](Buffers& x, int, int) {
         MPI_Bcast(x.whole.data(), x.count(), MPI_FLOAT, 0, MPI_COMM_WORLD);
       }},
      {"all_gather",
       [](Buffers& x, int, int) {
         MPI_Allgather(x.part.data(), x.elements, MPI_FLOAT, x.whole.data(), x.elements, MPI_FLOAT,
                       MPI_COMM_WORLD);
       }},
      {"reduce_scatter",
       [](Buffers& x, int, int) {
         MPI_Reduce_scatter_block(x.whole.data(), x.part.data(), x.elements, MPI_FLOAT, MPI_SUM,
                                  MPI_COMM_WORLD);
       }},
      {"gather",
       [](Buffers& x, int, int) {
         MPI_Gather(x.part.data(), x.elements, MPI_FLOAT, x.whole.data(), x.elements, MPI_FLOAT, 0,
                    MPI_COMM_WORLD);
       }},
      {"scatter",
       [](Buffers& x, int, int) {
         MPI_Scatter(x.whole.data(), x.elements, MPI_FLOAT, x.part.data(), x.elements, MPI_FLOAT, 0,
                     MPI_COMM_WORLD);
       }},
      {"all_to_all",
       [](Buffers& x, int, int) {
         MPI_Alltoall(x.whole.data(), x.elements, MPI_FLOAT, x.other.data(), x.elements, MPI_FLOAT,
                      MPI_COMM_WORLD);
       }},
      {"send_recv",
       [](Buffers& x, int rank, int size) {
         MPI_Sendrecv(x.whole.data(), x.count(), MPI_FLOAT, (rank + 1) % size, 0, x.other.data(),
                      x.count(), MPI_FLOAT, (rank + size - 1) % size, 0, MPI_COMM_WORLD,
                      MPI_STATUS_IGNORE);
       }},
      {"barrier", [](Buffers&, int, int) { MPI_Barrier(MPI_COMM_WORLD); }}};
  return calls;
}

void measure(std::vector<Buffers>& buffers, Call call, int calls) {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  double times[2] = {0, 0};
  const int batches = std::max(1, calls / static_cast<int>(buffers.size()));
  for (int batch = 0; batch < batches; ++batch) {
    for (Buffers& one : buffers) one.refill();
    MPI_Barrier(MPI_COMM_WORLD);
    const double cpu = now_us(CLOCK_PROCESS_CPUTIME_ID);
    const double wall = now_us(CLOCK_MONOTONIC);
    for (Buffers& one : buffers) call(one, Orders::rank(), size);
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

void run(Call call, std::int64_t bytes) {
  Orders orders;
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  std::vector<Buffers> buffers(static_cast<std::size_t>(calls_of(bytes)), Buffers(size, bytes));
  while (const int calls = orders.next()) measure(buffers, call, calls);
}

}  // namespace
}  // namespace paceline::bench

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const auto& calls = paceline::bench::all_calls();
  const auto call = argc == 3 ? calls.find(argv[1]) : calls.end();
  if (call != calls.end()) paceline::bench::run(call->second, std::atoll(argv[2]));
  MPI_Finalize();
  return call != calls.end() ? 0 : 2;
}
