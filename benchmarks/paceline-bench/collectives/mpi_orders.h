#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <mpi.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <new>
#include <string>

#include "base/unique_fd.h"
#include "shm/memory/mapping.h"
#include "shm/sync/futex.h"

namespace paceline::bench::mpi {

inline int rank_in_world() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

inline int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

// How rank 0 tells the others what to do. The others sleep until then: a wait in MPI would keep
// cores busy while other peers are measured.
class Orders {
 public:
  Orders() : mapping_(base::UniqueFd(::open(path().c_str(), O_RDWR | O_CLOEXEC))) {
    if (rank_in_world() == 0) new (mapping_.data()) Shared{};
    MPI_Barrier(MPI_COMM_WORLD);
  }

  // The number of calls to make, 0 at the end. For all ranks together.
  int next() {
    auto& [number, calls] = *reinterpret_cast<Shared*>(mapping_.data());
    if (rank_in_world() == 0) {
      int read = 0;
      calls = std::scanf("%d", &read) == 1 ? read : 0;
      number.fetch_add(1);
      shm::futex_wake_all(number);
    } else {
      while (number.load() == seen_) shm::futex_wait(number, seen_, std::chrono::seconds(1));
      ++seen_;
    }
    return calls;
  }

 private:
  struct Shared {
    shm::Word number{0};
    std::atomic<int> calls{0};
  };

  // The path of memory that rank 0 makes.
  static std::string path() {
    static base::UniqueFd memory;
    std::array<int, 2> at{};
    if (rank_in_world() == 0) {
      memory = shm::Mapping::create_memory(sizeof(Shared));
      at = {::getpid(), memory.get()};
    }
    MPI_Bcast(at.data(), 2, MPI_INT, 0, MPI_COMM_WORLD);
    return fmt::format("/proc/{}/fd/{}", at[0], at[1]);
  }

  shm::Mapping mapping_;
  std::uint32_t seen_ = 0;
};

}  // namespace paceline::bench::mpi
