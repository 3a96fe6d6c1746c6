#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shm/kernels/types.h"

namespace paceline::mpi {

// What Paceline needs of MPI. A plug-in implements it: it is compiled with the mpi.h of one MPI,
// because handles and constants differ between libraries, and linked to that MPI and to nothing of
// Paceline's.
//
// As thread-safe as MPI is. A call throws std::runtime_error with MPI's own text if MPI fails.

// MPI_Requests of one operation.
using Requests = std::vector<std::uintptr_t>;

// A communicator that nobody else uses, so its messages and collectives match only ours.
class Communicator {
 public:
  static constexpr int kAnyRank = -1;
  // The most bytes of all ranks together for which a function says so: MPI counts in ints, and some
  // libraries multiply them.
  static constexpr std::size_t kMaxBytes = std::size_t{1} << 30;

  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Collective; waits until all ranks have called it.
  virtual std::unique_ptr<Communicator> duplicate() = 0;

  // These start an operation and add its requests. Memory must live until test() returns true.
  virtual void broadcast(void* data, std::size_t bytes, int root, Requests& requests) = 0;
  // `input` may be `output`. `type` must be reducible with `op`. Here avg adds up, like sum.
  virtual void all_reduce(const void* input, void* output, std::size_t count, shm::DataType type,
                          shm::ReduceOp op, Requests& requests) = 0;
  virtual void reduce(const void* input, void* output, std::size_t count, shm::DataType type,
                      shm::ReduceOp op, int root, Requests& requests) = 0;
  // `input`, of at most kMaxBytes, has a part of `count` elements for each rank. Memory does not
  // overlap.
  virtual void reduce_scatter(const void* input, void* output, std::size_t count,
                              shm::DataType type, shm::ReduceOp op, Requests& requests) = 0;
  // `bytes` of each rank; `output` has at most kMaxBytes. `input` may be this rank's part of it.
  virtual void all_gather(const void* input, void* output, std::size_t bytes,
                          Requests& requests) = 0;
  // `bytes` for each rank, at most kMaxBytes in total. Memory does not overlap.
  virtual void all_to_all(const void* input, void* output, std::size_t bytes,
                          Requests& requests) = 0;
  // The receiver expects as many bytes.
  virtual void send(const void* data, std::size_t bytes, int to, std::uint32_t tag,
                    Requests& requests) = 0;
  // `from` may be kAnyRank.
  virtual void receive(void* data, std::size_t bytes, int from, std::uint32_t tag,
                       Requests& requests) = 0;

  // Whether all requests are complete. Forgets those that are. `sender`, if it is not null, is
  // where the message of the last one came from.
  virtual bool test(Requests& requests, int* sender = nullptr) = 0;
  // Cancels receives. They are complete only once test() says so, because a message may have begun
  // to arrive.
  virtual void cancel(const Requests& receives) = 0;
};

class Library {
 public:
  // Which threads may call MPI: the program's main thread only, any one at a time, or all at the
  // same time.
  enum class Threads { one, one_at_a_time, multiple };
  // Sets inout[i] to the reduction of in[i] and inout[i].
  using Reduce = void (*)(shm::DataType type, shm::ReduceOp op, const void* in, void* inout,
                          std::size_t count);

  virtual ~Library() = default;
  // Initialises MPI unless the program has. MPI that was initialised here is finalized at exit.
  virtual void start(Reduce reduce) = 0;
  // The rest is for after start().
  virtual Threads threads() const = 0;
  // Whether the calling thread is the one that initialised MPI.
  virtual bool is_main_thread() const = 0;
  virtual bool is_finalized() const = 0;
  virtual void do_not_finalize() = 0;
  // The limit of tags.
  virtual int max_tag() const = 0;

  // This process's rank in a communicator: one of the program's, by its Fortran handle, or
  // MPI_COMM_WORLD.
  virtual int rank_in(std::optional<int> communicator) = 0;
  // Of these ranks of it, in this order. Collective over them; waits until all have called it.
  // `tag` distinguishes calls that are made at the same time.
  virtual std::unique_ptr<Communicator> form(std::optional<int> communicator,
                                             const std::vector<int>& ranks, int tag) = 0;
};

// The function that a plug-in exports, which returns its Library. Its name changes with this
// interface, so that a plug-in of another version is not taken for one of this.
inline constexpr const char* kPluginFunction = "paceline_mpi_library_2";
using PluginFunction = Library* (*)();

}  // namespace paceline::mpi
