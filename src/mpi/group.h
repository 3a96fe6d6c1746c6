#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "mpi/runtime.h"
#include "shm/collectives/collectives.h"
#include "shm/collectives/fingerprint.h"
#include "shm/region.h"

namespace paceline::mpi {

// The collectives of MPI. Before MPI moves anything for a call, the ranks compare their calls by a
// small all-reduce, so differing calls throw Mismatch on every rank. A rank that does not come is
// found there too, within the timeout. Once all ranks have come, a call has no time limit, because
// MPI cannot take it back. A rank that comes after another one has timed out is such a case: it
// waits until the launcher ends the job.
//
// float16 and bfloat16 are rounded after each addition; the order of additions is MPI's.
class Group final : public shm::Collectives {
 public:
  // Where ranks that wait for long note it, since MPI does not say which rank is late.
  class Arrivals {
   public:
    virtual ~Arrivals() = default;
    // This rank is in the call.
    virtual void note(std::uint64_t call) = 0;
    // The ranks of the group that have not noted it.
    virtual shm::RankSet missing(std::uint64_t call) = 0;
  };

  // `region`: of this rank alone; it keeps the group's failure. `ranks`: the group's global ranks.
  Group(std::shared_ptr<shm::Region> region, shm::GlobalRanks ranks, Runtime& runtime,
        std::unique_ptr<Communicator> communicator, std::unique_ptr<Arrivals> arrivals);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  // Leaks the communicator if a comparison is unfinished.
  ~Group() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const shm::GlobalRanks& global_ranks() const override { return global_ranks_; }

  void barrier() override;
  void broadcast(void* data, std::size_t count, shm::DataType type, int root) override;
  void all_reduce(const void* input, void* output, std::size_t count, shm::DataType type,
                  shm::ReduceOp op) override;
  void reduce(const void* input, void* output, std::size_t count, shm::DataType type,
              shm::ReduceOp op, int root) override;
  void gather(shm::Input input, std::span<const shm::Output> outputs, shm::DataType type,
              int root) override;
  void scatter(std::span<const shm::Input> inputs, shm::Output output, shm::DataType type,
               int root) override;
  void all_gather(shm::Input input, std::span<const shm::Output> outputs,
                  shm::DataType type) override;
  void reduce_scatter(std::span<const shm::Input> inputs, shm::Output output, shm::DataType type,
                      shm::ReduceOp op) override;
  void all_to_all(std::span<const shm::Input> inputs, std::span<const shm::Output> outputs,
                  shm::DataType type) override;
  [[noreturn]] void fail(const shm::RankSet& ranks, const std::string& text) override;

 private:
  class Wait;
  // Operations that compare calls. They may go on after an error, in this memory.
  struct Comparison {
    std::vector<std::int64_t> own;
    std::vector<std::int64_t> all;
    Requests requests{};
  };

  void begin(shm::CollectiveFingerprint call);
  void compare_calls();
  // Of calls whose parts may differ in size: one of `to` for each rank, or one for all. Returns
  // whether all parts of all ranks are equally large.
  bool compare_splits(std::span<const shm::Input> to, std::span<const shm::Output> from);
  bool test(Requests& requests);
  // Starts operations on a comparison's memory, and waits for them.
  template <typename Start>
  void run(const std::shared_ptr<Comparison>& comparison, Start start);
  // The same on a call's memory.
  template <typename Start>
  void run(Start start);
  // Sends inputs[r] to rank r, and receives outputs[r] from it. Parts without elements are not
  // sent.
  void exchange(std::span<const shm::Input> inputs, std::span<const shm::Output> outputs,
                std::size_t element);
  bool is_large(std::size_t bytes) const;
  void divide(void* sum, std::size_t count, shm::DataType type) const;
  [[noreturn]] void fail_in_mpi(const char* why);
  std::string describe_call() const;
  shm::OpContext context() const {
    return {call_.sequence == 0 ? "connect" : name(call_.operation), call_.sequence};
  }

  const std::shared_ptr<shm::Region> region_;
  const shm::GlobalRanks global_ranks_;
  Runtime& runtime_;
  std::unique_ptr<Communicator> communicator_;
  const std::unique_ptr<Arrivals> arrivals_;
  const int rank_;
  const int size_;
  shm::CollectiveFingerprint call_;                      // the current one
  shm::Word compared_ = 0;                               // comparisons that are complete
  std::vector<std::shared_ptr<Comparison>> unfinished_;  // after an error
};

}  // namespace paceline::mpi
