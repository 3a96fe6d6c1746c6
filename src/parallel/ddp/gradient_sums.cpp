#include "parallel/ddp/gradient_sums.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <array>
#include <bit>
#include <utility>

#include "distributed/data_type.h"

namespace paceline::ddp {
namespace {

// Where a sum whose last term is `last` goes: into `last`, if it has the type for it.
at::Tensor sum_for(const at::Tensor& last) {
  const auto type = at::toOpMathType(last.scalar_type());
  if (type == last.scalar_type()) return last;
  return at::empty_strided(last.sizes(), last.strides(), last.options().dtype(type));
}

}  // namespace

GradientSums::GradientSums(std::size_t parameters, std::vector<shm::LeafRange> parts)
    : parts_(std::move(parts)), sums_(parameters) {}

void GradientSums::add(std::size_t parameter, int leaf, at::Tensor gradient, double weight) {
  auto& [complete, partial] = sums_[parameter];
  const auto& [first, count] = parts_[complete.size()];
  const auto number = static_cast<unsigned>(parts_[0].first + leaf - first);
  if (weight == 0) gradient.reset();
  Node node{.values = std::move(gradient), .weight = weight};
  for (int merges = std::countr_one(number); merges > 0 && !partial.empty(); --merges) {
    node = combine(std::move(partial.back()), std::move(node));
    partial.pop_back();
  }
  if (number + 1 == static_cast<unsigned>(count)) {
    complete.push_back(std::move(node.values));
  } else {
    partial.push_back(std::move(node));
  }
}

// Applies the weight.
void GradientSums::make_sum(Node& node) {
  if (node.is_sum || !node.values.defined()) return;
  const at::Tensor sum = sum_for(node.values);
  const std::array<const void*, 1> source{node.values.const_data_ptr()};
  shm::accumulate(*distributed::data_type_of(node.values.scalar_type()), shm::ReduceOp::sum,
                  {.sources = source, .weights = {&node.weight, 1}}, sum.mutable_data_ptr(),
                  static_cast<std::size_t>(sum.numel()));
  node = {.values = sum, .weight = 1, .is_sum = true};
}

GradientSums::Node GradientSums::combine(Node left, Node right) {
  if (!left.values.defined() || !right.values.defined()) {
    Node& other = left.values.defined() ? left : right;
    make_sum(other);
    return std::move(other);
  }
  const at::Tensor sum = sum_for(right.values);
  const std::array<const void*, 2> sources{left.values.const_data_ptr(),
                                           right.values.const_data_ptr()};
  const std::array<double, 2> weights{left.weight, right.weight};
  shm::Terms terms{.sources = sources};
  if (left.weight != 1 || right.weight != 1) terms.weights = weights;
  shm::accumulate(*distributed::data_type_of(right.values.scalar_type()), shm::ReduceOp::sum, terms,
                  sum.mutable_data_ptr(), static_cast<std::size_t>(sum.numel()));
  return {.values = sum, .weight = 1, .is_sum = true};
}

std::vector<at::Tensor> GradientSums::take(std::size_t parameter) {
  return std::exchange(sums_[parameter].complete, {});
}

void GradientSums::clear() {
  for (Sums& of_parameter : sums_) of_parameter = {};
}

}  // namespace paceline::ddp
