#pragma once

#include <vector>

#include "parallel/ddp/model.h"

namespace paceline::ddp {

// How many gradients each parameter gets in a backward: one, or with static_graph as many as in the
// first, which is learnt by counting.
class StaticGraph {
 public:
  // Not `enabled`: one for each parameter.
  StaticGraph(std::size_t parameters, bool enabled);

  // Whether gradients are only counted, as this step has to teach how many there are.
  bool learns() const { return learns_; }
  void begin_step();

  // What a gradient that has just come is to its parameter.
  enum class Gradient { early, last, surplus };
  Gradient add(std::size_t parameter);
  int expected(std::size_t parameter) const { return expected_[parameter]; }
  int arrived(std::size_t parameter) const { return arrived_[parameter]; }

  // At the end of a step that learns: the parameters that got gradients, in the order of their last
  // ones.
  Indices learn();
  // On a rank that has joined, which gets no gradients: expects one for each parameter in `used`.
  void learn_from(const std::vector<bool>& used);
  // Of a step that was finished: what it taught holds from here on.
  void end_step() { learns_ = false; }

 private:
  bool learns_;
  std::vector<int> expected_;  // by parameter, as is the next
  std::vector<int> arrived_;   // in this step
  Indices gradients_;          // while learning: whose they were
};

}  // namespace paceline::ddp
