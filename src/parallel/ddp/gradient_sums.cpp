#include "parallel/ddp/gradient_sums.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <algorithm>
#include <array>
#include <bit>
#include <span>
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

at::Tensor components(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

// On an accelerator: a term times its weight, by component, in the type of sums.
at::Tensor weighted(const at::Tensor& term, double weight) {
  const at::Tensor wide = components(term.to(at::toOpMathType(term.scalar_type())));
  return weight == 1 ? wide : wide.mul(weight);
}

// Writes the weighted sum of one or two terms to `sum`, with the same bits on every device.
void add_up(std::span<const at::Tensor> terms, std::span<const double> weights,
            const at::Tensor& sum) {
  if (!sum.is_cpu()) {
    at::Tensor result = components(sum);
    if (terms.size() == 1) {
      result.copy_(weighted(terms[0], weights[0]));
    } else {  // not by a multiply-add, which would round once
      at::add_out(result, weighted(terms[0], weights[0]), weighted(terms[1], weights[1]));
    }
    return;
  }
  std::vector<const void*> sources;
  for (const at::Tensor& term : terms) sources.push_back(term.const_data_ptr());
  shm::Terms weighted_terms{.sources = sources};
  if (std::ranges::any_of(weights, [](double weight) { return weight != 1; })) {
    weighted_terms.weights = weights;
  }
  shm::accumulate(*distributed::data_type_of(terms[0].scalar_type()), shm::ReduceOp::sum,
                  weighted_terms, sum.mutable_data_ptr(), static_cast<std::size_t>(sum.numel()));
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
  add_up({&node.values, 1}, {&node.weight, 1}, sum);
  node = {.values = sum, .weight = 1, .is_sum = true};
}

GradientSums::Node GradientSums::combine(Node left, Node right) {
  if (!left.values.defined() || !right.values.defined()) {
    Node& other = left.values.defined() ? left : right;
    make_sum(other);
    return std::move(other);
  }
  const at::Tensor sum = sum_for(right.values);
  add_up(std::array{left.values, right.values}, std::array{left.weight, right.weight}, sum);
  return {.values = sum, .weight = 1, .is_sum = true};
}

std::vector<at::Tensor> GradientSums::take(std::size_t parameter) {
  return std::exchange(sums_[parameter].complete, {});
}

void GradientSums::clear() {
  for (Sums& of_parameter : sums_) of_parameter = {};
}

}  // namespace paceline::ddp
