#include "parallel/ddp/gradient_buckets.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include <paceline/error.h>

namespace paceline::ddp {
namespace {

// Whether a copy of the bytes copies each element to its place.
bool has_layout_of(const at::Tensor& grad, const at::Tensor& view) {
  return grad.layout() == at::kStrided && !grad.is_conj() && !grad.is_neg() &&
         grad.scalar_type() == view.scalar_type() && grad.strides() == view.strides() &&
         grad.is_non_overlapping_and_dense();
}

void copy_values(const at::Tensor& from, const at::Tensor& to) {
  if (from.is_cpu() && has_layout_of(from, to)) {
    std::memcpy(to.data_ptr(), from.data_ptr(), to.nbytes());
  } else {
    to.copy_(from);
  }
}

// Whether only .grad uses its memory, apart from `incoming`, from which autograd made it, and the
// base of that view. AccumulateGrad takes over a tensor that nobody else holds, even if its storage
// is shared; then other branches of the graph, or the program's hooks, may read the memory later.
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

GradientBuckets::GradientBuckets(const std::vector<NamedTensor>& parameters,
                                 const DdpOptions& options, const std::vector<bool>& delayed,
                                 bool exchanges_usage, StepRecorder& recorder)
    : parameters_(parameters),
      options_(options),
      ranks_(get_world_size(options.process_group)),
      rank_(get_rank(options.process_group)),
      recorder_(recorder),
      leaves_(options.logical_ranks == 0
                  ? shm::LeafPlan(ranks_)
                  : shm::LeafPlan::even(options.logical_ranks, ranks_, parts_of_leaves())),
      views_(parameters.size()) {
  Indices order;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].sparse) (delayed[i] ? delayed_ : order).push_back(i);
  }
  // Gradients become ready in roughly the reverse of the order in which layers were registered.
  std::ranges::reverse(order);
  make(order, exchanges_usage);
}

void GradientBuckets::begin_step(const shm::StepSummary& summary, Weights weights,
                                 shm::FrozenFlags frozen) {
  bucket_reducer_->begin_step(summary, weights, frozen);
  outstanding_.clear();
  for (const auto& bucket : plan_.buckets) outstanding_.push_back(bucket.parameters.size());
  if (is_first_) arrivals_.clear();
}

void GradientBuckets::add(std::size_t parameter, bool arrived, const at::Tensor& incoming) {
  if (sums_) add_to_sum(parameter, incoming);
  if (!is_last_leaf()) return;
  const bool is_delayed = std::ranges::find(delayed_, parameter) != delayed_.end();
  if (is_first_ && !is_delayed) arrivals_.push_back(parameter);
  sums_ ? take_sums(parameter) : take_gradient(parameter, arrived, incoming);
  count_down(plan_.places[parameter].bucket);
}

void GradientBuckets::leave_out(std::size_t parameter) {
  if (!is_last_leaf()) return;
  if (count_leaves() > 1) parameters_[parameter].tensor.mutable_grad() = initial_[parameter];
  count_down(plan_.places[parameter].bucket);
}

std::vector<bool> GradientBuckets::skip(std::vector<bool> buckets) {
  if (!exchanges_usage_ && !buckets.empty()) buckets.back() = false;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    if (buckets[b]) bucket_reducer_->skip(b);
  }
  return buckets;
}

void GradientBuckets::add_zeros() {
  for (std::size_t b = 0; b < plan_.buckets.size(); ++b) {
    bucket_reducer_->tensor(b).zero_();
    bucket_reducer_->publish(b);
    bucket_reducer_->try_progress();
  }
  if (is_first_) arrivals_ = order_;
}

std::optional<std::vector<bool>> GradientBuckets::finish(const std::vector<bool>& used) {
  if (!exchanges_usage_) {
    bucket_reducer_->finish();
    return {};
  }
  const std::size_t bucket = plan_.buckets.size();
  auto* const flags = bucket_reducer_->tensor(bucket).data_ptr<std::int64_t>();
  std::copy(used.begin(), used.end(), flags);
  publish(bucket);
  bucket_reducer_->finish();
  return std::vector<bool>(flags, flags + used.size());
}

void GradientBuckets::end_step() {
  reset_in_place();
  is_first_ = false;
  initial_.clear();
}

void GradientBuckets::count_down(std::size_t bucket) {
  if (--outstanding_[bucket] == 0) publish(bucket);
  bucket_reducer_->try_progress();
  recorder_.record_reduced_buckets(*bucket_reducer_);
}

void GradientBuckets::publish(std::size_t bucket) {
  recorder_.add_bucket(bucket, bytes_of(bucket));
  bucket_reducer_->publish(bucket);
}

bool GradientBuckets::is_view(std::size_t parameter) const {
  const at::Tensor& grad = parameters_[parameter].tensor.grad();
  const at::Tensor& view = views_[parameter].current;
  return view.defined() && grad.defined() && grad.layout() == at::kStrided &&
         grad.data_ptr() == view.data_ptr();
}

// Copies .grad into the view, and makes the view .grad if that is wanted.
void GradientBuckets::take_gradient(std::size_t parameter, bool arrived,
                                    const at::Tensor& incoming) {
  if (keeps_gradients_in_place() || is_view(parameter)) return;
  // A gradient without an update in this step may have to keep its value.
  if (arrived && use_in_place(parameter, incoming)) return;
  const at::NoGradGuard no_grad;
  const at::Tensor& view = views_[parameter].current;
  at::Tensor& grad = parameters_[parameter].tensor.mutable_grad();
  if (!grad.defined()) {
    view.zero_();
  } else {
    copy_values(grad.is_sparse() ? grad.to_dense() : grad, view);
    recorder_.add_copy(view.nbytes());
  }
  if (options_.gradient_as_bucket_view) grad = view;
}

// Reduces a large gradient where autograd allocated it, if that is registered memory.
bool GradientBuckets::use_in_place(std::size_t parameter, const at::Tensor& incoming) {
  const std::size_t bucket = plan_.places[parameter].bucket;
  auto* const in_place = bucket_reducer_->in_place();
  const at::Tensor& grad = parameters_[parameter].tensor.grad();
  if (in_place == nullptr || !plan_.buckets[bucket].dedicated || !grad.defined()) return false;
  if (!has_layout_of(grad, views_[parameter].in_bucket) || !is_sole_view(grad, incoming))
    return false;
  if (!in_place->use(bucket, 0, grad)) return false;
  views_[parameter].current = grad;
  in_place_.push_back(parameter);
  return true;
}

void GradientBuckets::reset_in_place() {
  for (const std::size_t i : in_place_) views_[i].current = views_[i].in_bucket;
  in_place_.clear();
  held_.clear();
}

void GradientBuckets::begin_leaves() {
  leaf_ = 0;
  initial_.clear();
  if (sums_) sums_->clear();
  for (const NamedTensor& parameter : parameters_) initial_.push_back(parameter.tensor.grad());
}

void GradientBuckets::leave_leaves() {
  for (std::size_t i = 0; i < initial_.size(); ++i) {
    parameters_[i].tensor.mutable_grad() = initial_[i];
  }
}

void GradientBuckets::begin_leaf(int leaf) {
  const at::NoGradGuard no_grad;
  leaf_ = leaf;
  leaf_weight_ = 1;
  if (count_leaves() == 1) return;
  // An average of the sum of an earlier step is that sum, but it must count only once in a sum.
  const bool counts = options_.average != Average::sum ||
                      leaves_.range(get_rank(options_.process_group)).first + leaf == 0;
  for (std::size_t i = 0; i < initial_.size(); ++i) {
    parameters_[i].tensor.mutable_grad() =
        counts && initial_[i].defined() ? initial_[i].clone() : at::Tensor();
  }
}

// Takes .grad away; a parameter without one counts as zero.
void GradientBuckets::add_to_sum(std::size_t parameter, const at::Tensor& incoming) {
  const at::NoGradGuard no_grad;
  const at::Tensor& view = views_[parameter].in_bucket;
  at::Tensor grad = std::exchange(parameters_[parameter].tensor.mutable_grad(), {});
  const bool is_ours = grad.defined() && grad.use_count() == 1 && has_layout_of(grad, view) &&
                       is_sole_view(grad, incoming);
  if (!is_ours) {
    const at::Tensor own = at::empty_strided(view.sizes(), view.strides(), view.options());
    if (!grad.defined()) {
      own.zero_();
    } else {
      own.copy_(grad.is_sparse() ? grad.to_dense() : grad);
    }
    grad = own;
  }
  sums_->add(parameter, leaf_, std::move(grad), leaf_weight_);
}

// Puts the sums into the parts of the bucket, and makes the bucket .grad if that is wanted.
void GradientBuckets::take_sums(std::size_t parameter) {
  const at::NoGradGuard no_grad;
  const std::size_t bucket = plan_.places[parameter].bucket;
  auto* const in_place = bucket_reducer_->in_place();
  Views& views = views_[parameter];
  const std::vector<at::Tensor> sums = sums_->take(parameter);
  for (std::size_t p = 0; p < sums.size(); ++p) {
    const at::Tensor& part = views.parts[p];
    if (!sums[p].defined()) continue;
    if (plan_.buckets[bucket].dedicated && sums[p].scalar_type() == part.scalar_type() &&
        in_place->use(bucket, p, sums[p])) {
      held_.push_back(sums[p]);
      if (!part.is_alias_of(views.in_bucket)) continue;
      views.current = sums[p];
      in_place_.push_back(parameter);
    } else {
      copy_values(sums[p], part);
      recorder_.add_copy(part.nbytes());
    }
  }
  const bool is_in_place = !views.current.is_alias_of(views.in_bucket);
  if (is_in_place || options_.gradient_as_bucket_view) {
    parameters_[parameter].tensor.mutable_grad() = views.current;
  }
}

void GradientBuckets::set_leaves(std::vector<shm::LeafRange> ranges) {
  leaves_ = shm::LeafPlan(std::move(ranges), parts_of_leaves());
  leaf_ = 0;
  detach();
  make(Indices(order_), exchanges_usage_);
}

void GradientBuckets::put_back(const std::vector<bool>& used) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& view = views_[i].current;
    at::Tensor& grad = parameters_[i].tensor.mutable_grad();
    // The program's tensor.
    if (view.defined() && used[i] && !initial_.empty() && initial_[i].defined()) grad = initial_[i];
    if (!view.defined() || !used[i] || is_view(i)) continue;
    if (grad.defined() && !grad.is_sparse()) {
      grad.copy_(view);
    } else {
      grad = view.clone();
    }
  }
}

void GradientBuckets::forget_gradients() {
  const at::NoGradGuard no_grad;
  if (sums_) sums_->clear();
  for (const NamedTensor& parameter : parameters_) {
    at::Tensor& grad = parameter.tensor.mutable_grad();
    if (!grad.defined()) continue;
    if (grad.layout() == at::kStrided) {
      grad.zero_();
    } else {
      grad.reset();
    }
  }
}

at::Tensor GradientBuckets::kept_gradient(std::size_t parameter) const {
  const at::Tensor& grad = parameters_[parameter].tensor.grad();
  if (is_view(parameter)) return grad.clone();
  const bool has_copy = count_leaves() > 1 && !options_.gradient_as_bucket_view;
  return has_copy ? initial_[parameter] : grad;
}

void GradientBuckets::detach() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (is_view(i)) parameters_[i].tensor.mutable_grad() = views_[i].current.clone();
  }
}

void GradientBuckets::detach_from_failed() {
  if (bucket_reducer_->failed()) detach();
}

}  // namespace paceline::ddp
