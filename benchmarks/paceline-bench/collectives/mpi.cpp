// MPI's collectives on float32, as an ExternalPeer of `paceline bench collectives`: they take turns
// with its collectives, on buffers of the same sizes. Built twice: on the standard's ABI, for MPICH
// and Intel MPI, and for OpenMPI, whose ABI is its own.
//
//     mpiexec -n N paceline-bench-mpi NAME BYTES

#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include <paceline/error.h>

#include "collectives/batch.h"
#include "collectives/mpi_orders.h"
#include "measure/clock.h"
#include "measure/pinned_thread.h"

namespace paceline::bench::mpi {
namespace {

// Aligned as at::empty aligns tensors.
class Floats {
 public:
  explicit Floats(std::int64_t size)
      : size_(size), data_(static_cast<float*>(::operator new(bytes(), kAlignment))) {}
  float* data() { return data_.get(); }
  int size() const { return static_cast<int>(size_); }
  void refill() { std::fill_n(data(), size_, 1.0f); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(float* data) const { ::operator delete(data, kAlignment); }
  };

  std::size_t bytes() const { return static_cast<std::size_t>(size_) * sizeof(float); }

  std::int64_t size_;
  std::unique_ptr<float, Delete> data_;
};

// See Buffers in collective.cpp.
struct Buffers {
  int elements;  // of a part
  Floats whole;
  Floats part;
  Floats other;

  Buffers(int ranks, std::int64_t bytes)
      : elements(static_cast<int>(std::max<std::int64_t>(bytes / 4 / ranks, 1))),
        whole(std::max(bytes / 4, std::int64_t{elements} * ranks)),
        part(elements),
        other(whole.size()) {}
  void refill() {
    for (Floats* const one : {&whole, &part, &other}) one->refill();
  }
};

using Call = void (*)(Buffers&, int rank, int size);
const std::map<std::string, Call>& all_calls() {
  static const std::map<std::string, Call> calls{
      {"all_reduce",
       [](Buffers& x, int, int) {
         MPI_Allreduce(MPI_IN_PLACE, x.whole.data(), x.whole.size(), MPI_FLOAT, MPI_SUM,
                       MPI_COMM_WORLD);
       }},
      {"reduce",
       [](Buffers& x, int rank, int) {
         MPI_Reduce(rank == 0 ? MPI_IN_PLACE : x.whole.data(), x.whole.data(), x.whole.size(),
                    MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
       }},
      {"broadcast",
       [](Buffers& x, int, int) {
         MPI_Bcast(x.whole.data(), x.whole.size(), MPI_FLOAT, 0, MPI_COMM_WORLD);
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
         MPI_Sendrecv(x.whole.data(), x.whole.size(), MPI_FLOAT, (rank + 1) % size, 0,
                      x.other.data(), x.whole.size(), MPI_FLOAT, (rank + size - 1) % size, 0,
                      MPI_COMM_WORLD, MPI_STATUS_IGNORE);
       }},
      {"barrier", [](Buffers&, int, int) { MPI_Barrier(MPI_COMM_WORLD); }}};
  return calls;
}

// As measure_once and measure_round of rounds.cpp do it.
void measure(std::vector<Buffers>& buffers, Call call, int calls) {
  const int rank = rank_in_world();
  const int size = world_size();
  std::array<double, 2> times{};
  const int batches = std::max(1, calls / static_cast<int>(buffers.size()));
  for (int batch = -1; batch < batches; ++batch) {
    for (Buffers& one : buffers) one.refill();
    MPI_Barrier(MPI_COMM_WORLD);
    const double cpu = now_us(CLOCK_PROCESS_CPUTIME_ID);
    const double wall = now_us(CLOCK_MONOTONIC);
    for (Buffers& one : buffers) call(one, rank, size);
    const double wall_end = now_us(CLOCK_MONOTONIC);
    const double cpu_end = now_us(CLOCK_PROCESS_CPUTIME_ID);
    MPI_Barrier(MPI_COMM_WORLD);
    if (batch < 0) continue;
    times[0] += wall_end - wall;
    times[1] += cpu_end - cpu;
  }
  double slowest = 0;
  double all_ranks = 0;
  MPI_Reduce(&times[0], &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  MPI_Reduce(&times[1], &all_ranks, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  if (rank != 0) return;
  const double count = static_cast<double>(batches) * static_cast<double>(buffers.size());
  std::printf("%.6f %.6f\n", slowest / count, all_ranks / count);
  std::fflush(stdout);
}

void run(Call call, std::int64_t bytes) {
  const PinnedThread pinned(rank_in_world(), world_size());
  Orders orders;
  std::vector<Buffers> buffers;
  for (int i = 0; i < calls_of(bytes); ++i) buffers.emplace_back(world_size(), bytes);
  while (const int calls = orders.next()) measure(buffers, call, calls);
}

void main_or_throw(int argc, char** argv) {
  const auto call = argc == 3 ? all_calls().find(argv[1]) : all_calls().end();
  if (call == all_calls().end()) {
    throw UsageError("expected the name of a collective and a number of bytes");
  }
  run(call->second, std::atoll(argv[2]));
}

}  // namespace
}  // namespace paceline::bench::mpi

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  try {
    paceline::bench::mpi::main_or_throw(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  return MPI_Finalize();
}
