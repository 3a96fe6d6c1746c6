#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <paceline/api.h>

namespace paceline::data {

// Chooses the samples of an epoch and their order. Derive from it for an order of your own. One
// thread at a time.
class PACELINE_API Sampler {
 public:
  virtual ~Sampler() = default;

  // The number of samples in an epoch, of this rank.
  virtual std::int64_t size() const = 0;
  // The indices of the current epoch: size() of them, the same at every call.
  virtual std::vector<std::int64_t> indices() const = 0;
  // Chooses the epoch; before the first call it is epoch 0.
  virtual void set_epoch(std::int64_t epoch) { static_cast<void>(epoch); }

 protected:
  Sampler() = default;
  Sampler(const Sampler&) = default;
  Sampler& operator=(const Sampler&) = default;
};

// 0, 1, 2, ... in every epoch.
class PACELINE_API SequentialSampler : public Sampler {
 public:
  // Throws UsageError if `dataset_size` is negative.
  explicit SequentialSampler(std::int64_t dataset_size);

  std::int64_t size() const override { return size_; }
  std::vector<std::int64_t> indices() const override;

 private:
  std::int64_t size_;
};

// Each sample once, in a new order every epoch, which depends on seed + epoch only.
class PACELINE_API RandomSampler : public Sampler {
 public:
  // Throws UsageError if `dataset_size` is negative.
  explicit RandomSampler(std::int64_t dataset_size, std::uint64_t seed = 0);

  std::int64_t size() const override { return size_; }
  std::vector<std::int64_t> indices() const override;
  void set_epoch(std::int64_t epoch) override { epoch_ = epoch; }

 private:
  std::int64_t size_;
  std::uint64_t seed_;
  std::int64_t epoch_ = 0;
};

struct DistributedSamplerOptions {
  // How many ranks share the data set, and which of them this one is. Default: get_world_size()
  // and get_rank() at construction.
  std::optional<int> num_replicas = std::nullopt;
  std::optional<int> rank = std::nullopt;
  // A new order every epoch, the same on all ranks; otherwise 0, 1, 2, ...
  bool shuffle = true;
  // Must be the same on all ranks.
  std::uint64_t seed = 0;
  // When the ranks do not divide the data set: drop its tail. By default samples from the front of
  // the order are repeated instead. In both cases all ranks have equally many, as training needs.
  bool drop_last = false;
  // false: neither repeat nor drop. Each sample goes to exactly one rank, and the first ranks have
  // one more: for evaluation. Not together with drop_last.
  bool pad = true;
};

// Gives each rank its share of a data set: every num_replicas-th index of the epoch's order, from
// the rank-th on. Gives the indices of Python's torch.utils.data.DistributedSampler.
class PACELINE_API DistributedSampler : public Sampler {
 public:
  // Throws UsageError if the size is negative, the rank is not in [0, num_replicas), or drop_last
  // meets pad = false.
  explicit DistributedSampler(std::int64_t dataset_size, DistributedSamplerOptions options = {});

  std::int64_t size() const override;
  std::vector<std::int64_t> indices() const override;
  // Without it every epoch has the same order. DataLoader::epoch calls it.
  void set_epoch(std::int64_t epoch) override { epoch_ = epoch; }

 private:
  std::int64_t dataset_size_;
  DistributedSamplerOptions options_;
  std::int64_t num_replicas_;
  std::int64_t rank_;
  std::int64_t epoch_ = 0;
};

}  // namespace paceline::data
