#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include <paceline/error.h>

#include "parallel/comm_hooks/hook_bucket_reducer.h"
#include "parallel/ddp/model.h"
#include "parallel/ddp/reducer.h"

// The part of Reducer that says where gradients lie.
namespace paceline::ddp {
namespace {

using distributed::BucketReducer;

constexpr double kMiB = 1024 * 1024;
constexpr double kDefaultCap = 25;
// Small, so that communication starts early.
constexpr double kDefaultFirstCap = 1;
// What copying this much takes is no more than a bucket of its own costs.
constexpr std::size_t kAloneBytes = std::size_t{64} << 10;
// How many parameters an error lists before it only counts.
constexpr std::size_t kMaxNames = 10;

std::vector<double> caps_in_mib(const DdpOptions& options) {
  if (!options.bucket_cap_mb_list.empty()) return options.bucket_cap_mb_list;
  if (options.bucket_cap_mb) return {*options.bucket_cap_mb};
  return {kDefaultFirstCap, kDefaultCap};
}

std::vector<std::size_t> caps_of(const DdpOptions& options) {
  constexpr double kMost = 1ULL << 62;
  std::vector<std::size_t> caps;
  for (const double cap : caps_in_mib(options)) {
    caps.push_back(static_cast<std::size_t>(std::min(cap * kMiB, kMost)));
  }
  return caps;
}

// A tensor over part of `flat` that autograd does not take for a view, since zero_grad refuses to
// detach those.
at::Tensor alias(const at::Tensor& flat, std::int64_t offset, const at::Tensor& like) {
  const bool dense = like.is_non_overlapping_and_dense();
  at::Tensor result = at::empty({0}, flat.options());
  return result.set_(flat.storage(), flat.storage_offset() + offset, like.sizes(),
                     dense ? like.strides() : at::empty_like(like).strides());
}

}  // namespace

// `order` has all that are neither sparse nor delayed.
void Reducer::make_plan(const Indices& order) {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : parameters_) tensors.push_back(parameter.tensor);
  constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();
  BucketLimits limits{caps_of(options_), uses_in_place() ? kAloneBytes : kNever};
  order_ = order;
  plan_ = {};
  add_buckets(plan_, tensors, order_, limits);
  limits.dedicated = kNever;
  add_buckets(plan_, tensors, delayed_, limits);
}

// The same on every rank, as the plan depends on it.
bool Reducer::uses_in_place() const {
  return options_.zero_copy && !hook_ && !is_alone() &&
         distributed::supports_use_in_place(options_.process_group.c10d(), device());
}

// Whether the bucket reducer has one more bucket that tells which parameters were used on any rank.
bool Reducer::needs_bitmap() const {
  if (hook_ || plan_.buckets.empty())
    return true;  // or there would be nothing for the bucket_reducer
  if (options_.static_graph) return learning_;
  return options_.find_unused_parameters && !options_.skip_all_reduce_unused_params;
}

void Reducer::make_bucket_reducer() {
  std::vector<BucketReducer::Bucket> buckets;
  for (const auto& bucket : plan_.buckets) {
    buckets.push_back({bucket.count, bucket.type, bucket.device, BucketReducer::Op::average,
                       bucket.dedicated, options_.skip_all_reduce_unused_params});
  }
  bitmap_ = needs_bitmap();
  const BucketReducer::Bucket used{.count = static_cast<std::int64_t>(parameters_.size()),
                                   .type = at::kLong,
                                   .device = at::kCPU,
                                   .op = BucketReducer::Op::max,
                                   .skips = options_.skip_all_reduce_unused_params};
  std::vector<std::string> names;
  for (const auto& parameter : parameters_) names.push_back(parameter.name);
  const auto group = options_.process_group.c10d();
  const auto describe = [this](std::size_t bucket) { return describe_bucket(bucket); };
  const std::uint32_t steps = bucket_reducer_ ? bucket_reducer_->steps() : 0;
  try {
    if (hook_) {
      bucket_reducer_ = std::make_unique<comm_hooks::HookBucketReducer>(
          group, hook_, buckets, used, describe, steps, names,
          [this](std::size_t b) { return grad_bucket(b); });
    } else {
      if (bitmap_) buckets.push_back(used);
      bucket_reducer_ =
          distributed::make_bucket_reducer(group, device(), buckets, describe, steps, names);
    }
  } catch (const PeerError&) {
    throw;
  } catch (const Error& error) {
    // The plan is a new one, and the others wait for the bucket reducer.
    if (bucket_reducer_) {
      bucket_reducer_->fail(
          fmt::format("rank {} cannot make new buckets: {}", get_rank(), error.what()));
    }
    throw;
  }
  make_views();
  for (std::size_t b = 0; b < plan_.buckets.size(); ++b) {
    recorder_.describe_bucket(b, bucket_reducer_->tensor(b).nbytes(), describe_bucket(b));
  }
}

// In the order in which gradients were ready on rank 0 in the first step.
void Reducer::rebuild() {
  rebuild_due_ = false;
  auto order = at::empty({static_cast<std::int64_t>(arrivals_.size())}, at::kLong);
  std::copy(arrivals_.begin(), arrivals_.end(), order.data_ptr<std::int64_t>());
  broadcast_from(0, {order}, options_.process_group);
  const auto* const numbers = order.data_ptr<std::int64_t>();
  const Indices first(numbers, numbers + order.numel());
  if (first == order_ && bitmap_ == needs_bitmap()) return;
  make_plan(first);
  make_bucket_reducer();
}

void Reducer::make_views() {
  const at::NoGradGuard no_grad;
  for (std::size_t b = 0; b < plan_.buckets.size(); ++b) {
    // What lies between gradients is reduced too.
    if (!plan_.buckets[b].dedicated && !is_alone()) bucket_reducer_->tensor(b).zero_();
    for (const std::size_t i : plan_.buckets[b].parameters) {
      parameters_[i].bucket_view =
          alias(bucket_reducer_->tensor(b), plan_.places[i].offset, parameters_[i].tensor);
      parameters_[i].view = parameters_[i].bucket_view;
    }
  }
}

void Reducer::set_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  if (hook_) throw UsageError("register_comm_hook: there is one already, and it stays");
  if (!learning_ || bucket_reducer_->in_step()) {
    throw UsageError("register_comm_hook comes before the first backward");
  }
  hook_ = std::move(hook);
  make_plan(Indices(order_));
  make_bucket_reducer();
}

c10d::GradBucket Reducer::grad_bucket(std::size_t index) const {
  const auto& bucket = plan_.buckets[index];
  std::vector<std::size_t> offsets;
  std::vector<std::size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> tensors;
  for (const std::size_t i : bucket.parameters) {
    const at::Tensor& tensor = parameters_[i].tensor;
    offsets.push_back(static_cast<std::size_t>(plan_.places[i].offset));
    lengths.push_back(static_cast<std::size_t>(tensor.numel()));
    sizes.push_back(tensor.sizes());
    tensors.push_back(tensor);
  }
  return c10d::GradBucket(index, plan_.buckets.size(), bucket_reducer_->tensor(index), offsets,
                          lengths, sizes, tensors, std::nullopt);
}

std::string Reducer::describe_bucket(std::size_t bucket) const {
  if (bucket >= plan_.buckets.size()) return "which parameters were used";
  return names_of(plan_.buckets[bucket].parameters);
}

std::string Reducer::names_of(const Indices& parameters) const {
  std::string names;
  for (std::size_t k = 0; k < parameters.size() && k < kMaxNames; ++k) {
    names += (k == 0 ? "" : ", ") + parameters_[parameters[k]].name;
  }
  if (parameters.size() > kMaxNames) {
    names += fmt::format(" and {} more", parameters.size() - kMaxNames);
  }
  return names;
}

}  // namespace paceline::ddp
