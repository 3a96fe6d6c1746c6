#include "parallel/ddp/static_graph.h"

#include <utility>

namespace paceline::ddp {

StaticGraph::StaticGraph(std::size_t parameters, bool enabled)
    : counting_(enabled), expected_(parameters, 1), arrived_(parameters, 0) {}

void StaticGraph::begin_step() {
  arrived_.assign(arrived_.size(), 0);
  gradients_.clear();
}

StaticGraph::Gradient StaticGraph::add(std::size_t parameter) {
  const int arrived = ++arrived_[parameter];
  if (counting_) {
    gradients_.push_back(parameter);
    return Gradient::early;
  }
  if (arrived > expected_[parameter]) return Gradient::surplus;
  return arrived == expected_[parameter] ? Gradient::last : Gradient::early;
}

Indices StaticGraph::record_counts() {
  expected_ = arrived_;
  std::vector<int> seen(expected_.size());
  Indices order;
  for (const std::size_t i : std::exchange(gradients_, {})) {
    if (++seen[i] == expected_[i]) order.push_back(i);
  }
  return order;
}

void StaticGraph::record_used(const std::vector<bool>& used) {
  for (std::size_t i = 0; i < expected_.size(); ++i) expected_[i] = used[i] ? 1 : 0;
}

}  // namespace paceline::ddp
