#pragma once

/// @file
/// Which samples a rank trains with, and in what order.

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <paceline/api.h>
#include <paceline/distributed.h>

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
  /// order. A resumed epoch goes on with it. This one throws UsageError unless `samples` is a
  /// multiple of num_replicas(), which it may not be after a change of the number of ranks.
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

/// Options of RandomSampler.
struct RandomSamplerOptions {
  /// Whether a sample can come several times.
  bool replacement = false;
  /// The number of samples in an epoch. Unset: as many as the data set has.
  std::optional<std::int64_t> num_samples = std::nullopt;
  std::uint64_t seed = 0;  ///< The order depends on seed + epoch only.
};

/// Samples in a new order every epoch, by default each once. With a generator of the seed `seed` +
/// `epoch`, Python's torch.utils.data.RandomSampler has these indices.
class PACELINE_API RandomSampler : public Sampler {
 public:
  /// Throws UsageError if `dataset_size` is negative.
  explicit RandomSampler(std::int64_t dataset_size, std::uint64_t seed = 0);
  /// Throws UsageError if a number is negative, or for samples of an empty data set.
  RandomSampler(std::int64_t dataset_size, const RandomSamplerOptions& options);

  std::int64_t size() const override { return num_samples_; }
  std::vector<std::int64_t> indices() const override;
  void set_epoch(std::int64_t epoch) override { epoch_ = epoch; }

 private:
  std::int64_t dataset_size_;
  std::int64_t num_samples_;
  bool replacement_;
  std::uint64_t seed_;
  std::int64_t epoch_ = 0;
};

/// Samples of a subset, each once, in a new order every epoch, as Python's SubsetRandomSampler.
class PACELINE_API SubsetRandomSampler : public Sampler {
 public:
  /// `indices`: the samples of the subset. Their order depends on seed + epoch only.
  explicit SubsetRandomSampler(std::vector<std::int64_t> indices, std::uint64_t seed = 0);

  std::int64_t size() const override { return static_cast<std::int64_t>(indices_.size()); }
  std::vector<std::int64_t> indices() const override;
  void set_epoch(std::int64_t epoch) override { epoch_ = epoch; }

 private:
  std::vector<std::int64_t> indices_;
  std::uint64_t seed_;
  std::int64_t epoch_ = 0;
};

/// Samples with probabilities, as Python's WeightedRandomSampler: for classes of uneven sizes.
class PACELINE_API WeightedRandomSampler : public Sampler {
 public:
  /// `weights`: of each sample of the data set; they need not add up to 1. The choice depends on
  /// seed + epoch only. Throws UsageError if a weight is negative or not finite, if all are 0, or
  /// if there are too few above 0 for `num_samples` without replacement.
  WeightedRandomSampler(std::vector<double> weights, std::int64_t num_samples,
                        bool replacement = true, std::uint64_t seed = 0);

  std::int64_t size() const override { return num_samples_; }
  std::vector<std::int64_t> indices() const override;
  void set_epoch(std::int64_t epoch) override { epoch_ = epoch; }

 private:
  std::vector<double> weights_;
  std::int64_t num_samples_;
  bool replacement_;
  std::uint64_t seed_;
  std::int64_t epoch_ = 0;
};

/// Options of DistributedSampler.
struct DistributedSamplerOptions {
  /// The number of ranks that share the data set. Unset: get_world_size(group) at construction.
  std::optional<int> num_replicas = std::nullopt;
  /// This process's number among these ranks. Unset: get_rank(group) at construction.
  std::optional<int> rank = std::nullopt;
  /// Whether each epoch has a new order, the same on all ranks. If not: 0, 1, 2, ... Unset: true,
  /// or the order of the sampler that is shared.
  std::optional<bool> shuffle = std::nullopt;
  /// Must be the same on all ranks.
  std::uint64_t seed = 0;
  /// What happens if the data set's size is not a multiple of num_replicas. True: the tail of the
  /// order is dropped. False: samples from its front are repeated. In both cases all ranks have
  /// equally many samples, as training needs.
  bool drop_last = false;
  /// False, for evaluation: nothing is repeated or dropped. Each sample goes to exactly one rank,
  /// and the first ranks may have one more. Not with drop_last.
  bool pad = true;
  ProcessGroup group{};  ///< Used at construction only.
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
  /// Shares out the order of another sampler, which must have the same indices on all ranks:
  ///
  ///     data::DistributedSampler(data::WeightedRandomSampler(weights, 10000))
  ///
  /// Copies share that sampler, and so its epoch.
  /// Throws UsageError also for options that choose an order.
  template <std::derived_from<Sampler> SamplerType>
  explicit DistributedSampler(SamplerType sampler, DistributedSamplerOptions options = {})
      : DistributedSampler(std::make_shared<SamplerType>(std::move(sampler)), std::move(options)) {}
  /// The same for a sampler that others hold, too.
  DistributedSampler(std::shared_ptr<Sampler> sampler, DistributedSamplerOptions options);

  std::int64_t size() const override { return count_from(0); }
  std::vector<std::int64_t> indices() const override { return indices_from(0); }
  /// Without it, every epoch has the same order. DataLoader::epoch calls it.
  void set_epoch(std::int64_t epoch) override;
  std::int64_t num_replicas() const override { return num_replicas_; }
  std::vector<std::int64_t> indices_from(std::int64_t samples) const override;

 private:
  std::int64_t count_from(std::int64_t samples) const;
  std::vector<std::int64_t> order() const;

  std::shared_ptr<Sampler> sampler_;  // null: all of the data set
  std::int64_t dataset_size_;
  DistributedSamplerOptions options_;
  std::int64_t num_replicas_;
  std::int64_t rank_;
  std::int64_t epoch_ = 0;
};

/// Chooses the batches of an epoch. Derive from it for batches of your own, such as of samples of
/// similar lengths. Use it on one thread at a time.
class PACELINE_API BatchSamplerBase {
 public:
  virtual ~BatchSamplerBase() = default;

  /// The number of batches in an epoch of this rank.
  virtual std::int64_t size() const = 0;
  /// The indices of the samples of the size() batches of the current epoch, the same at every call.
  virtual std::vector<std::vector<std::int64_t>> batches() const = 0;
  /// Chooses the epoch; before the first call it is epoch 0.
  virtual void set_epoch(std::int64_t epoch) { static_cast<void>(epoch); }

  /// How far a batch of each rank moves the position in an epoch.
  virtual std::int64_t position_step() const { return 1; }
  /// What is left of batches() from a position on. A resumed epoch goes on with it. This one counts
  /// batches of each rank, which is right for the same number of ranks only.
  virtual std::vector<std::vector<std::int64_t>> batches_from(std::int64_t position) const;

 protected:
  BatchSamplerBase() = default;
  /// For derived classes.
  BatchSamplerBase(const BatchSamplerBase&) = default;
  /// For derived classes.
  BatchSamplerBase& operator=(const BatchSamplerBase&) = default;
};

/// The samples of a sampler in batches of equal size, as Python's torch.utils.data.BatchSampler.
/// Positions count the samples that the ranks have taken together.
class PACELINE_API BatchSampler : public BatchSamplerBase {
 public:
  /// `drop_last`: whether a last batch that is not full is left out. Throws UsageError if
  /// `batch_size` is less than 1.
  template <std::derived_from<Sampler> SamplerType>
  BatchSampler(SamplerType sampler, std::int64_t batch_size, bool drop_last = false)
      : BatchSampler(std::make_shared<SamplerType>(std::move(sampler)), batch_size, drop_last) {}
  /// The same for a sampler that others hold, too.
  BatchSampler(std::shared_ptr<Sampler> sampler, std::int64_t batch_size, bool drop_last = false);

  std::int64_t size() const override;
  std::vector<std::vector<std::int64_t>> batches() const override { return batches_from(0); }
  void set_epoch(std::int64_t epoch) override { sampler_->set_epoch(epoch); }
  std::int64_t position_step() const override;
  std::vector<std::vector<std::int64_t>> batches_from(std::int64_t position) const override;

 private:
  std::int64_t count(std::int64_t samples) const;

  std::shared_ptr<Sampler> sampler_;
  std::int64_t batch_size_;
  bool drop_last_;
};

}  // namespace paceline::data
