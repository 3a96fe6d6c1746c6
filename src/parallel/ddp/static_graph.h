#pragma once

#include <vector>

#include "parallel/ddp/model.h"

namespace paceline::ddp {

// How many gradients each parameter gets in a backward: one, or with static_graph as many as were
// counted in the first step.
class StaticGraph {
 public:
  // If not `enabled`: one for each parameter.
  StaticGraph(std::size_t parameters, bool enabled);

  // Whether this is the first step, in which gradients are only counted.
  bool counting() const { return counting_; }
  void begin_step();

  // A gradient is `early` if its parameter expects more, and `surplus` if it expected fewer.
  enum class Gradient { early, last, surplus };
  Gradient add(std::size_t parameter);
  int expected(std::size_t parameter) const { return expected_[parameter]; }
  int arrived(std::size_t parameter) const { return arrived_[parameter]; }

  // Call at the end of the counting step. Returns the parameters that got gradients, in the order
  // of their last gradients.
  Indices record_counts();
  // Call instead on a rank that has joined: expects one gradient for each parameter in `used`.
  void record_used(const std::vector<bool>& used);
  // Call when a step is finished: its counts hold from here on.
  void end_step() { counting_ = false; }

 private:
  bool counting_;
  std::vector<int> expected_;  // by parameter, as is the next
  std::vector<int> arrived_;   // in this step
  Indices gradients_;          // while counting: the parameter of each gradient
};

}  // namespace paceline::ddp
