#include <paceline/sampler.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randperm.h>
#include <fmt/format.h>

#include <paceline/distributed.h>
#include <paceline/error.h>

#include <algorithm>
#include <numeric>

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

// Python's samplers make their order with the same call, so the indices are equal.
std::vector<std::int64_t> shuffled(std::int64_t size, std::uint64_t seed) {
  const at::Tensor order =
      at::randperm(size, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kLong));
  const auto* const begin = order.const_data_ptr<std::int64_t>();
  return {begin, begin + size};
}

std::uint64_t epoch_seed(std::uint64_t seed, std::int64_t epoch) {
  return seed + static_cast<std::uint64_t>(epoch);
}

}  // namespace

std::vector<std::int64_t> Sampler::indices_from(std::int64_t samples) const {
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
    : size_(checked_size(dataset_size)), seed_(seed) {}

std::vector<std::int64_t> RandomSampler::indices() const {
  return shuffled(size_, epoch_seed(seed_, epoch_));
}

DistributedSampler::DistributedSampler(std::int64_t dataset_size, DistributedSamplerOptions options)
    : dataset_size_(checked_size(dataset_size)),
      options_(options),
      num_replicas_(options.num_replicas ? *options.num_replicas : get_world_size()),
      rank_(options.rank ? *options.rank : get_rank()) {
  if (rank_ < 0 || rank_ >= num_replicas_) {
    throw UsageError(
        fmt::format("DistributedSampler: rank {} of {} replicas; the rank must be in "
                    "[0, num_replicas)",
                    rank_, num_replicas_));
  }
  if (options.drop_last && !options.pad) {
    throw UsageError(
        "DistributedSampler: drop_last = true drops the tail and pad = false keeps it; "
        "set one of them only");
  }
}

std::int64_t DistributedSampler::count_from(std::int64_t samples) const {
  const std::int64_t left = std::max<std::int64_t>(dataset_size_ - samples, 0);
  const std::int64_t whole = left / num_replicas_;
  const std::int64_t rest = left % num_replicas_;
  if (options_.drop_last || rest == 0) return whole;
  return options_.pad || rank_ < rest ? whole + 1 : whole;
}

std::vector<std::int64_t> DistributedSampler::indices_from(std::int64_t samples) const {
  const auto order = options_.shuffle ? shuffled(dataset_size_, epoch_seed(options_.seed, epoch_))
                                      : ascending(dataset_size_);
  std::vector<std::int64_t> result(static_cast<std::size_t>(count_from(samples)));
  auto position = static_cast<std::size_t>(samples + rank_);
  for (auto& index : result) {
    index = order[position % order.size()];  // past the end only if ranks are padded
    position += static_cast<std::size_t>(num_replicas_);
  }
  return result;
}

}  // namespace paceline::data
