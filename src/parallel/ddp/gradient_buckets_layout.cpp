#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include <paceline/error.h>

#include "distributed/process_state.h"
#include "parallel/comm_hooks/hook_bucket_reducer.h"
#include "parallel/ddp/gradient_buckets.h"

// The part of GradientBuckets that places gradients in buckets.
namespace paceline::ddp {
namespace {

using distributed::BucketReducer;

constexpr double kMiB = 1024 * 1024;
constexpr double kDefaultCap = 25;
// Small, so that communication starts early.
constexpr double kDefaultFirstCap = 1;
constexpr double kUnlimited = std::numeric_limits<double>::infinity();
// Copying this much costs no more than a separate bucket.
constexpr std::size_t kDedicatedBytes = std::size_t{64} << 10;

std::vector<double> caps_in_mib(const DdpOptions& options) {
  if (!options.bucket_cap_mb_list.empty()) return options.bucket_cap_mb_list;
  if (options.bucket_cap_mb) return {*options.bucket_cap_mb};
  if (!options.all_reduce_trigger_params.empty()) return {kUnlimited};
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

// A tensor over part of `flat` that is not a view for autograd, since zero_grad cannot detach
// views.
at::Tensor alias(const at::Tensor& flat, std::int64_t offset, const at::Tensor& like) {
  const bool dense = like.is_non_overlapping_and_dense();
  at::Tensor result = at::empty({0}, flat.options());
  return result.set_(flat.storage(), flat.storage_offset() + offset, like.sizes(),
                     dense ? like.strides() : at::empty_like(like).strides());
}

}  // namespace

void GradientBuckets::make(const Indices& order, bool exchanges_usage) {
  sums_.reset();
  if (!leaves_.one_each()) {
    const auto parts = leaves_.parts(rank_);
    sums_.emplace(parameters_.size(), std::vector(parts.begin(), parts.end()));
  }
  make_plan(order);
  exchanges_usage_ = needs_exchange(exchanges_usage);
  make_bucket_reducer();
  make_views();
  for (std::size_t b = 0; b < plan_.buckets.size(); ++b) {
    recorder_.describe_bucket(b, bytes_of(b), describe(b));
  }
}

// Beside the buckets of a hook there is always one for it, and a reducer has a bucket at least.
bool GradientBuckets::needs_exchange(bool wanted) const {
  return wanted || hook_ != nullptr || plan_.buckets.empty();
}

void GradientBuckets::make_plan(const Indices& order) {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : parameters_) tensors.push_back(parameter.tensor);
  constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();
  BucketLimits limits{caps_of(options_), uses_in_place() ? kDedicatedBytes : kNever};
  const auto& triggers = options_.all_reduce_trigger_params;
  for (const auto& parameter : parameters_) {
    limits.ends.push_back(std::ranges::count(triggers, parameter.name) > 0);
  }
  order_ = order;
  plan_ = {};
  add_buckets(plan_, tensors, order_, limits);
  limits.dedicated = kNever;
  add_buckets(plan_, tensors, delayed_, limits);
}

// The same on every rank, as the plan depends on it; so are the next two.
bool GradientBuckets::can_use_in_place() const {
  if (!options_.zero_copy) return false;
  const auto device = parameters_.front().tensor.device().type();
  if (ranks_ == 1) return device == c10::DeviceType::CPU;
  return distributed::supports_in_place(options_.process_group.c10d(), device,
                                        options_.logical_ranks > ranks_);
}

bool GradientBuckets::uses_in_place() const {
  return can_use_in_place() && !hook_ && !keeps_gradients_in_place();
}

shm::LeafPlan::Parts GradientBuckets::parts_of_leaves() const {
  using Parts = shm::LeafPlan::Parts;
  return can_use_in_place() ? Parts::last_leaf_apart : Parts::fewest;
}

void GradientBuckets::make_bucket_reducer() {
  BucketReducer::Options wanted;
  for (const auto& bucket : plan_.buckets) {
    wanted.buckets.push_back({bucket.count, bucket.type, bucket.device, BucketReducer::Op::average,
                              bucket.dedicated, options_.skip_all_reduce_unused_params});
  }
  if (exchanges_usage_) {
    wanted.buckets.push_back({.count = static_cast<std::int64_t>(parameters_.size()),
                              .type = at::kLong,
                              .device = at::kCPU,
                              .op = BucketReducer::Op::max,
                              .skips = options_.skip_all_reduce_unused_params});
  }
  wanted.describe = [this](std::size_t bucket) { return describe(bucket); };
  wanted.averaged = [this](std::size_t bucket, const c10::Stream& stream) {
    recorder_.end_device_bucket(bucket, stream);
  };
  wanted.on_autograd_thread = !parameters_.front().tensor.is_cpu();
  wanted.steps = bucket_reducer_ ? bucket_reducer_->steps() : 0;
  if (options_.logical_ranks > 0) wanted.leaves = leaves_;
  wanted.sums = options_.average == Average::sum;
  for (const auto& parameter : parameters_) wanted.parameters.push_back(parameter.name);
  const auto group = options_.process_group.c10d();
  try {
    if (hook_) {
      bucket_reducer_ = std::make_unique<comm_hooks::HookBucketReducer>(
          group, hook_, wanted, [this](std::size_t bucket) {
            return comm_hooks::HookBucketReducer::Input{grad_bucket(bucket),
                                                        plan_.buckets[bucket].parameters};
          });
    } else {
      bucket_reducer_ = distributed::make_bucket_reducer(group, wanted);
    }
  } catch (const PeerError&) {
    throw;
  } catch (const Error& error) {
    // The plan has changed already, and the other ranks wait for the bucket reducer.
    if (bucket_reducer_) {
      bucket_reducer_->fail(fmt::format("rank {} cannot make new buckets: {}",
                                        distributed::global_rank_of(options_.process_group, rank_),
                                        error.what()));
    }
    throw;
  }
}

void GradientBuckets::make_views() {
  if (keeps_gradients_in_place()) return;
  const at::NoGradGuard no_grad;
  for (std::size_t b = 0; b < plan_.buckets.size(); ++b) {
    const at::Tensor& bucket = bucket_reducer_->tensor(b);
    // The padding between gradients is reduced too.
    if (!plan_.buckets[b].dedicated) {
      bucket.zero_();
      for (std::size_t p = 0; sums_ && p < leaves_.parts(rank_).size(); ++p) {
        bucket_reducer_->part(b, p).zero_();
      }
    }
    for (const std::size_t i : plan_.buckets[b].parameters) {
      const at::Tensor view = alias(bucket, plan_.places[i].offset, parameters_[i].tensor);
      views_[i] = {.in_bucket = view, .current = view};
      if (!sums_) continue;
      for (std::size_t p = 0; p < leaves_.parts(rank_).size(); ++p) {
        views_[i].parts.push_back(
            alias(bucket_reducer_->part(b, p), plan_.places[i].offset, parameters_[i].tensor));
      }
    }
  }
}

void GradientBuckets::set_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  if (hook_)
    throw UsageError("register_comm_hook: the model has a hook already, which cannot be replaced");
  if (!is_first_ || bucket_reducer_->in_step()) {
    throw UsageError("register_comm_hook: call it before the first backward");
  }
  hook_ = std::move(hook);
  make(Indices(order_), exchanges_usage_);
}

void GradientBuckets::reorder(bool exchanges_usage) {
  auto order = at::empty({static_cast<std::int64_t>(arrivals_.size())}, at::kLong);
  std::copy(arrivals_.begin(), arrivals_.end(), order.data_ptr<std::int64_t>());
  broadcast_from(0, {order}, options_.process_group);
  const auto* const numbers = order.data_ptr<std::int64_t>();
  const Indices first(numbers, numbers + order.numel());
  if (first == order_ && exchanges_usage_ == needs_exchange(exchanges_usage)) return;
  make(first, exchanges_usage);
}

std::size_t GradientBuckets::bytes_of(std::size_t bucket) const {
  if (bucket >= plan_.buckets.size()) return parameters_.size() * sizeof(std::int64_t);
  const auto& of = plan_.buckets[bucket];
  return static_cast<std::size_t>(of.count) * c10::elementSize(of.type);
}

c10d::GradBucket GradientBuckets::grad_bucket(std::size_t index) const {
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

std::string GradientBuckets::describe(std::size_t bucket) const {
  if (bucket >= plan_.buckets.size()) return "which parameters were used";
  return names_of(parameters_, plan_.buckets[bucket].parameters);
}

}  // namespace paceline::ddp
