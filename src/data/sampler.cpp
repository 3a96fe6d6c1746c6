#include <paceline/sampler.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <paceline/distributed.h>
#include <paceline/error.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <utility>

namespace paceline::data {
namespace {

std::int64_t checked_size(std::int64_t size) {
  if (size >= 0) return size;
  throw UsageError(fmt::format("the sampler's dataset_size is {}; it must not be negative", size));
}

std::vector<std::int64_t> ascending(std::int64_t size) {
  std::vector<std::int64_t> result(static_cast<std::size_t>(size));
  std::iota(result.begin(), result.end(), 0);
  return result;
}

at::Generator generator_of(std::uint64_t seed, std::int64_t epoch) {
  return at::detail::createCPUGenerator(seed + static_cast<std::uint64_t>(epoch));
}

std::vector<std::int64_t> numbers_of(const at::Tensor& tensor) {
  const auto* const begin = tensor.const_data_ptr<std::int64_t>();
  return {begin, begin + tensor.numel()};
}

// Python's samplers make their order with the same call, so the indices are equal.
std::vector<std::int64_t> shuffled(std::int64_t size, std::uint64_t seed, std::int64_t epoch) {
  return numbers_of(at::randperm(size, generator_of(seed, epoch), at::kLong));
}

}  // namespace

std::vector<std::int64_t> Sampler::indices_from(std::int64_t samples) const {
  if (samples % num_replicas() != 0) {
    throw UsageError(fmt::format(
        "this sampler cannot go on after {} samples with {} ranks: they took them in turn", samples,
        num_replicas()));
  }
  std::vector<std::int64_t> all = indices();
  const auto taken = std::min(samples / num_replicas(), static_cast<std::int64_t>(all.size()));
  all.erase(all.begin(), all.begin() + taken);
  return all;
}

SequentialSampler::SequentialSampler(std::int64_t dataset_size)
    : size_(checked_size(dataset_size)) {}

std::vector<std::int64_t> SequentialSampler::indices() const {
  return ascending(size_);
}

RandomSampler::RandomSampler(std::int64_t dataset_size, std::uint64_t seed)
    : RandomSampler(dataset_size, RandomSamplerOptions{.seed = seed}) {}

RandomSampler::RandomSampler(std::int64_t dataset_size, const RandomSamplerOptions& options)
    : dataset_size_(checked_size(dataset_size)),
      num_samples_(options.num_samples.value_or(dataset_size)),
      replacement_(options.replacement),
      seed_(options.seed) {
  if (num_samples_ < 0 || (num_samples_ > 0 && dataset_size_ == 0)) {
    throw UsageError(fmt::format("RandomSampler: num_samples is {}, of a data set of {}",
                                 num_samples_, dataset_size_));
  }
}

std::vector<std::int64_t> RandomSampler::indices() const {
  const at::Generator generator = generator_of(seed_, epoch_);
  std::vector<std::int64_t> all;
  all.reserve(static_cast<std::size_t>(num_samples_));
  while (std::ssize(all) < num_samples_) {
    const std::int64_t left = num_samples_ - std::ssize(all);
    // As many at once as Python takes, so that the numbers are the same.
    constexpr std::int64_t kAtOnce = 32;
    const at::Tensor some =
        replacement_ ? at::randint(dataset_size_, {std::min(left, kAtOnce)}, generator, at::kLong)
                     : at::randperm(dataset_size_, generator, at::kLong);
    const auto* const begin = some.const_data_ptr<std::int64_t>();
    all.insert(all.end(), begin, begin + std::min(left, some.numel()));
  }
  return all;
}

SubsetRandomSampler::SubsetRandomSampler(std::vector<std::int64_t> indices, std::uint64_t seed)
    : indices_(std::move(indices)), seed_(seed) {}

std::vector<std::int64_t> SubsetRandomSampler::indices() const {
  std::vector<std::int64_t> all = shuffled(size(), seed_, epoch_);
  for (std::int64_t& index : all) index = indices_[static_cast<std::size_t>(index)];
  return all;
}

WeightedRandomSampler::WeightedRandomSampler(std::vector<double> weights, std::int64_t num_samples,
                                             bool replacement, std::uint64_t seed)
    : weights_(std::move(weights)),
      num_samples_(num_samples),
      replacement_(replacement),
      seed_(seed) {
  std::int64_t possible = 0;
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    if (!(weights_[i] >= 0) || std::isinf(weights_[i])) {
      throw UsageError(
          fmt::format("WeightedRandomSampler: weight {} is {}; weights must be finite, "
                      "and not negative",
                      i, weights_[i]));
    }
    if (weights_[i] > 0) ++possible;
  }
  if (num_samples < 0 || (num_samples > 0 && possible == 0) ||
      (!replacement && num_samples > possible)) {
    throw UsageError(fmt::format(
        "WeightedRandomSampler: num_samples is {}{}; {} of {} weights are above 0", num_samples,
        replacement ? "" : " without replacement", possible, weights_.size()));
  }
}

std::vector<std::int64_t> WeightedRandomSampler::indices() const {
  if (num_samples_ == 0) return {};
  const at::Tensor weights = at::tensor(weights_, at::kDouble);
  return numbers_of(
      at::multinomial(weights, num_samples_, replacement_, generator_of(seed_, epoch_)));
}

DistributedSampler::DistributedSampler(std::int64_t dataset_size, DistributedSamplerOptions options)
    : dataset_size_(checked_size(dataset_size)),
      options_(std::move(options)),
      num_replicas_(options_.num_replicas ? *options_.num_replicas
                                          : get_world_size(options_.group)),
      rank_(options_.rank ? *options_.rank : get_rank(options_.group)) {
  options_.group = {};
  if (rank_ < 0 || rank_ >= num_replicas_) {
    throw UsageError(
        fmt::format("DistributedSampler: rank {} of {} replicas; the rank must be in "
                    "[0, num_replicas)",
                    rank_, num_replicas_));
  }
  if (options_.drop_last && !options_.pad) {
    throw UsageError(
        "DistributedSampler: drop_last = true drops the tail and pad = false keeps it; "
        "set one of them only");
  }
}

DistributedSampler::DistributedSampler(std::shared_ptr<Sampler> sampler,
                                       DistributedSamplerOptions options)
    : DistributedSampler(
          sampler ? sampler->size() : throw UsageError("DistributedSampler of a null sampler"),
          std::move(options)) {
  if (options_.shuffle || options_.seed != 0) {
    throw UsageError(
        "DistributedSampler of a sampler: shuffle and seed must not be set, because the sampler "
        "chooses the order");
  }
  sampler_ = std::move(sampler);
}

void DistributedSampler::set_epoch(std::int64_t epoch) {
  epoch_ = epoch;
  if (sampler_) sampler_->set_epoch(epoch);
}

std::vector<std::int64_t> DistributedSampler::order() const {
  if (sampler_) return sampler_->indices();
  if (!options_.shuffle.value_or(true)) return ascending(dataset_size_);
  return shuffled(dataset_size_, options_.seed, epoch_);
}

std::int64_t DistributedSampler::count_from(std::int64_t samples) const {
  const std::int64_t left = std::max<std::int64_t>(dataset_size_ - samples, 0);
  const std::int64_t whole = left / num_replicas_;
  const std::int64_t rest = left % num_replicas_;
  if (options_.drop_last || rest == 0) return whole;
  return options_.pad || rank_ < rest ? whole + 1 : whole;
}

std::vector<std::int64_t> DistributedSampler::indices_from(std::int64_t samples) const {
  const std::vector<std::int64_t> order = this->order();
  std::vector<std::int64_t> result(static_cast<std::size_t>(count_from(samples)));
  auto position = static_cast<std::size_t>(samples + rank_);
  for (auto& index : result) {
    index = order[position % order.size()];  // past the end only if ranks are padded
    position += static_cast<std::size_t>(num_replicas_);
  }
  return result;
}

std::vector<std::vector<std::int64_t>> BatchSamplerBase::batches_from(std::int64_t position) const {
  auto all = batches();
  all.erase(all.begin(), all.begin() + std::min<std::ptrdiff_t>(position, std::ssize(all)));
  return all;
}

BatchSampler::BatchSampler(std::shared_ptr<Sampler> sampler, std::int64_t batch_size,
                           bool drop_last)
    : sampler_(std::move(sampler)), batch_size_(batch_size), drop_last_(drop_last) {
  if (sampler_ == nullptr) throw UsageError("BatchSampler: the sampler is null");
  if (batch_size >= 1) return;
  throw UsageError(
      fmt::format("BatchSampler: batch_size is {}; it must be at least 1", batch_size));
}

std::int64_t BatchSampler::count(std::int64_t samples) const {
  const std::int64_t full = samples / batch_size_;
  return drop_last_ || samples % batch_size_ == 0 ? full : full + 1;
}

std::int64_t BatchSampler::size() const {
  return count(sampler_->size());
}

std::int64_t BatchSampler::position_step() const {
  return batch_size_ * sampler_->num_replicas();
}

std::vector<std::vector<std::int64_t>> BatchSampler::batches_from(std::int64_t position) const {
  const auto indices = sampler_->indices_from(position);
  std::vector<std::vector<std::int64_t>> batches(
      static_cast<std::size_t>(count(std::ssize(indices))));
  const auto size = static_cast<std::size_t>(batch_size_);
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const auto batch = std::span(indices).subspan(i * size);
    batches[i].assign(batch.begin(), batch.begin() + std::min(std::ssize(batch), batch_size_));
  }
  return batches;
}

}  // namespace paceline::data
