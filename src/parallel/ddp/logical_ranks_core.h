#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <paceline/logical_ranks.h>

#include "parallel/ddp/reducer.h"

namespace paceline::detail {

// The logical ranks of a model: the loop over those of this rank, and their states. It may outlive
// the model, and throws UsageError then.
class LogicalRanksCore {
 public:
  // `logical_ranks`: as in DdpOptions. `device`: the model's. Collective, unless it is 0.
  LogicalRanksCore(ddp::Reducer& reducer, int logical_ranks, ProcessGroup group,
                   std::vector<at::Tensor> buffers, at::Device device);
  LogicalRanksCore(const LogicalRanksCore&) = delete;
  LogicalRanksCore& operator=(const LogicalRanksCore&) = delete;

  // `call` makes the collective calls that a loop begins with.
  void before_loop(std::function<void()> call) { before_loop_ = std::move(call); }
  // Call when the model is destroyed.
  void forget_model() { reducer_ = nullptr; }

  // Whether DdpOptions::logical_ranks is set. If not, there is one for each rank, and a loop
  // changes nothing.
  bool enabled() const { return enabled_; }
  bool in_loop() const { return current_ >= 0; }
  // Of any model of this process.
  static bool is_any_in_loop();

  // Returns the loop's number.
  std::uint64_t begin();
  // The current logical rank's number.
  int current() const { return range().first + current_; }
  void next();
  // Ends this loop, if it has not come to its end. `by_exception`: an exception ends it.
  void leave(std::uint64_t loop, bool by_exception) noexcept;

  int total() const { return reducer().leaves().leaves(); }
  LogicalRange range() const;
  void assign(const LogicalRange& range);
  LogicalRankState state(int rank) const;
  void set_state(int rank, const LogicalRankState& state);
  struct Registered {
    std::function<at::Tensor(int)> get;
    std::function<void(int, const at::Tensor&)> set;
  };
  void register_state(const std::string& name, Registered registered);
  void unregister_state(const std::string& name) { registered_.erase(name); }

 private:
  ddp::Reducer& reducer() const;
  std::size_t index_of(int rank) const;
  void check_outside(const char* call) const;
  void begin_loop();
  void enter(int index);
  void end_loop();
  void end_backward(int index);
  void share_buffers();
  void set_buffers(const std::vector<at::Tensor>& values);
  std::vector<at::Tensor> copy_buffers() const;
  at::Tensor first_random(int rank) const;
  std::vector<shm::LeafRange> gather_ranges(const LogicalRange& wanted) const;
  std::string pack_states() const;
  std::map<int, LogicalRankState> unpack_states(const std::vector<std::string>& packed,
                                                const LogicalRange& range) const;
  void check_state(int rank, const LogicalRankState& state) const;
  void set_registered(int rank, const LogicalRankState& state) const;
  void throw_together(const std::string& error, const char* what) const;

  ddp::Reducer* reducer_;  // null once the model is destroyed
  bool enabled_;
  ProcessGroup group_;
  std::vector<at::Tensor> buffers_;
  // The process's, of the CPU and of the model's device if that is another one.
  std::vector<at::Generator> generators_{};
  std::uint64_t seed_ = 0;          // rank 0's
  std::vector<at::Tensor> random_;  // of this rank's logical ranks
  std::map<std::string, Registered> registered_;
  std::function<void()> before_loop_;
  std::uint64_t loops_ = 0;
  bool was_broken_ = false;    // the last loop was left, but not by an exception
  int current_ = -1;           // of this rank's logical ranks, in a loop; so are the next four
  at::Tensor random_outside_;  // the process's
  std::vector<at::Tensor> initial_random_;  // random_ before the loop
  std::vector<at::Tensor> initial_buffers_;
  std::vector<at::Tensor> final_buffers_;  // logical rank 0's; on all ranks after the step
};

}  // namespace paceline::detail
