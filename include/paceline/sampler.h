#pragma once

/// @file
/// Which samples a rank trains with, and in what order.

#include <cstdint>
#include <optional>
#include <vector>

#include <paceline/api.h>

namespace paceline::data {

/// Chooses the samples of an epoch and their order. Derive from it for an order of your own. Use it
/// on one thread at a time.
class PACELINE_API Sampler {
 public:
  virtual ~Sampler() = default;

  /// The number of samples in an epoch of this rank.
  virtual std::int64_t size() const = 0;
  /// The size() indices of the current epoch, the same at every call.
  virtual std::vector<std::int64_t> indices() const = 0;
  /// Chooses the epoch; before the first call it is epoch 0.
  virtual void set_epoch(std::int64_t epoch) { static_cast<void>(epoch); }

  /// How many ranks take the samples of one order in turn.
  virtual std::int64_t num_replicas() const { return 1; }
  /// What is left of indices() after the ranks have together taken the first `samples` of the
  /// order, a multiple of num_replicas(). A resumed epoch goes on with it.
  virtual std::vector<std::int64_t> indices_from(std::int64_t samples) const;

 protected:
  Sampler() = default;
  /// For derived classes.
  Sampler(const Sampler&) = default;
  /// For derived classes.
  Sampler& operator=(const Sampler&) = default;
};

/// 0, 1, 2, ... in every epoch.
class PACELINE_API SequentialSampler : public Sampler {
 public:
  /// Throws UsageError if `dataset_size` is negative.
  explicit SequentialSampler(std::int64_t dataset_size);

  std::int64_t size() const override { return size_; }
  std::vector<std::int64_t> indices() const override;

 private:
  std::int64_t size_;
};

/// Each sample once, in a new order every epoch. The order depends on seed + epoch only.
class PACELINE_API RandomSampler : public Sampler {
 public:
  /// Throws UsageError if `dataset_size` is negative.
  explicit RandomSampler(std::int64_t dataset_size, std::uint64_t seed = 0);

  std::int64_t size() const override { return size_; }
  std::vector<std::int64_t> indices() const override;
  void set_epoch(std::int64_t epoch) override { epoch_ = epoch; }

 private:
  std::int64_t size_;
  std::uint64_t seed_;
  std::int64_t epoch_ = 0;
};

/// Options of DistributedSampler.
struct DistributedSamplerOptions {
  /// The number of ranks that share the data set. Unset: get_world_size() at construction.
  std::optional<int> num_replicas = std::nullopt;
  /// This process's number among these ranks. Unset: get_rank() at construction.
  std::optional<int> rank = std::nullopt;
  /// Whether each epoch has a new order, the same on all ranks. If not: 0, 1, 2, ...
  bool shuffle = true;
  /// Must be the same on all ranks.
  std::uint64_t seed = 0;
  /// What happens if the data set's size is not a multiple of num_replicas. True: the tail of the
  /// order is dropped. False: samples from its front are repeated. In both cases all ranks have
  /// equally many samples, as training needs.
  bool drop_last = false;
  /// False, for evaluation: nothing is repeated or dropped. Each sample goes to exactly one rank,
  /// and the first ranks may have one more. Not with drop_last.
  bool pad = true;
};

/// Gives each rank its share of a data set: of the epoch's order, the positions rank,
/// rank + num_replicas, rank + 2 * num_replicas, ... These are the indices of Python's
/// torch.utils.data.DistributedSampler.
///
/// indices_from takes any number of samples, so an epoch can go on with another number of ranks:
/// what is left is dealt anew.
class PACELINE_API DistributedSampler : public Sampler {
 public:
  /// Throws UsageError if the size is negative, if the rank is not from 0 to num_replicas - 1, or
  /// for drop_last with pad = false.
  explicit DistributedSampler(std::int64_t dataset_size, DistributedSamplerOptions options = {});

  std::int64_t size() const override { return count_from(0); }
  std::vector<std::int64_t> indices() const override { return indices_from(0); }
  /// Without it, every epoch has the same order. DataLoader::epoch calls it.
  void set_epoch(std::int64_t epoch) override { epoch_ = epoch; }
  std::int64_t num_replicas() const override { return num_replicas_; }
  std::vector<std::int64_t> indices_from(std::int64_t samples) const override;

 private:
  std::int64_t count_from(std::int64_t samples) const;

  std::int64_t dataset_size_;
  DistributedSamplerOptions options_;
  std::int64_t num_replicas_;
  std::int64_t rank_;
  std::int64_t epoch_ = 0;
};

}  // namespace paceline::data
