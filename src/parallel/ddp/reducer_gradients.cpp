#include <ATen/ATen.h>

#include <cstring>

#include "parallel/ddp/reducer.h"

// The part of Reducer that moves gradients into the buckets and out of them.
namespace paceline::ddp {
namespace {

// Whether the elements of both have the same bytes at the same places.
bool lies_like(const at::Tensor& grad, const at::Tensor& view) {
  return grad.layout() == at::kStrided && !grad.is_conj() && !grad.is_neg() &&
         grad.scalar_type() == view.scalar_type() && grad.strides() == view.strides() &&
         grad.is_non_overlapping_and_dense();
}

// Whether no tensor but .grad sees its memory, other than `incoming`, of which autograd made it,
// and what that is a view of. Other branches of the graph, or hooks of the program's, may read
// theirs later: AccumulateGrad takes over tensors that nobody else has, whoever has their memory.
bool is_sole_view(const at::Tensor& grad, const at::Tensor& incoming) {
  std::size_t known = 1;
  if (incoming.defined() && incoming.layout() == at::kStrided &&
      incoming.storage().is_alias_of(grad.storage())) {
    ++known;
    if (incoming.is_view()) {
      if (incoming._base().use_count() > 1) return false;
      ++known;
    }
  }
  return grad.storage().use_count() <= known;
}

}  // namespace

bool Reducer::is_view(const Parameter& parameter) const {
  const at::Tensor& grad = parameter.tensor.grad();
  return grad.defined() && grad.layout() == at::kStrided && parameter.view.defined() &&
         grad.data_ptr() == parameter.view.data_ptr();
}

// Gives the view the value that .grad has; makes it .grad, unless that is not wanted.
void Reducer::take_gradient(std::size_t index) {
  Parameter& parameter = parameters_[index];
  if (is_alone() || is_view(parameter) || use_gradient_in_place(index)) return;
  const at::NoGradGuard no_grad;
  at::Tensor& grad = parameter.tensor.mutable_grad();
  if (!grad.defined()) {
    parameter.view.zero_();
  } else if (lies_like(grad, parameter.view)) {
    std::memcpy(parameter.view.data_ptr(), grad.data_ptr(), grad.nbytes());
    recorder_.add_copy(grad.nbytes());
  } else {
    parameter.view.copy_(grad.is_sparse() ? grad.to_dense() : grad);
    recorder_.add_copy(parameter.view.nbytes());
  }
  if (options_.gradient_as_bucket_view) grad = parameter.view;
}

// Has a large gradient reduced where autograd has put it, if that is in memory that all ranks see.
bool Reducer::use_gradient_in_place(std::size_t index) {
  Parameter& parameter = parameters_[index];
  const std::size_t bucket = plan_.places[index].bucket;
  const at::Tensor& grad = parameter.tensor.grad();
  // One that did not come in this step may have to stay as it is.
  if (!plan_.buckets[bucket].dedicated || parameter.arrived == 0 || !grad.defined()) return false;
  if (!lies_like(grad, parameter.bucket_view) || !is_sole_view(grad, incoming_)) return false;
  if (!bucket_reducer_->use_in_place(bucket, grad)) return false;
  parameter.view = grad;
  in_place_.push_back(index);
  return true;
}

void Reducer::return_in_place() {
  for (const std::size_t i : in_place_) parameters_[i].view = parameters_[i].bucket_view;
  in_place_.clear();
}

// For those who want gradients of their own.
void Reducer::put_back() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    if (parameter.sparse || !used_[i] || is_view(parameter)) continue;
    at::Tensor& grad = parameter.tensor.mutable_grad();
    if (grad.defined() && !grad.is_sparse()) {
      grad.copy_(parameter.view);
    } else {
      grad = parameter.view.clone();
    }
  }
}

// Those of a step that was given up: each rank has others of them.
void Reducer::forget_gradients() {
  const at::NoGradGuard no_grad;
  for (auto& parameter : parameters_) {
    parameter.used = false;
    at::Tensor& grad = parameter.tensor.mutable_grad();
    if (!grad.defined()) continue;
    if (grad.layout() == at::kStrided) {
      grad.zero_();
    } else {
      grad.reset();
    }
  }
}

// A rank that wakes up late may still write into the buckets.
void Reducer::detach_from_failed() {
  if (bucket_reducer_->failed()) detach_gradients();
}

void Reducer::detach_gradients() {
  const at::NoGradGuard no_grad;
  for (auto& parameter : parameters_) {
    if (is_view(parameter)) parameter.tensor.mutable_grad() = parameter.view.clone();
  }
}

}  // namespace paceline::ddp
