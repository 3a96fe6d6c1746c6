#pragma once

/// @file
/// Samplers of Paceline in LibTorch's own data loader.

#include <ATen/core/ivalue.h>
#include <torch/data/samplers/base.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <paceline/api.h>
#include <paceline/data_loader.h>
#include <paceline/sampler.h>

namespace paceline::data {

/// A sampler for torch::data::make_data_loader, which deals samples as a sampler of Paceline does:
///
///     auto sampler = paceline::data::distributed(*set.size());
///     auto loader = torch::data::make_data_loader(set, sampler, 64);
///     for (int epoch = 0; epoch < epochs; ++epoch)
///       for (auto& batch : *loader) ...
///
/// Each iteration over the loader is the next epoch. (LibTorch's own distributed samplers repeat
/// epoch 0, since the loader takes a copy, on which nobody calls set_epoch.) Copies are the same
/// sampler, so the program's `sampler` is that of the loader.
///
/// Use it in one loader, on the thread that iterates.
class PACELINE_API TorchSampler : public torch::data::samplers::Sampler<> {
 public:
  /// Deals samples as `sampler` does.
  template <std::derived_from<data::Sampler> SamplerType>
  explicit TorchSampler(SamplerType sampler)
      : TorchSampler(std::make_shared<SamplerType>(std::move(sampler))) {}
  /// The same for a sampler that others hold, too.
  explicit TorchSampler(std::shared_ptr<data::Sampler> sampler);

  /// The epoch of the iteration that began last, or that is set for the next one; at first 0.
  std::int64_t epoch() const;
  /// Sets the epoch of the next iteration.
  void set_epoch(std::int64_t epoch);

  /// The epoch, and how much of it `loader` has handed out, of the loader with this sampler that
  /// make_data_loader returned; in the form of DataLoader::state_dict. Throws UsageError if the
  /// loader's workers hand out batches in any order (`enforce_ordering(false)`).
  template <typename Loader>
  at::IValue state_dict(const Loader& loader) const {
    const auto& options = loader.options();
    return state_of({.batch_size = options.batch_size,
                     .workers = options.workers,
                     .jobs = options.max_jobs,
                     .in_order = options.enforce_ordering,
                     .drop_last = options.drop_last});
  }
  /// The next iteration goes on where the state was taken, also with another number of ranks.
  /// Throws UsageError for another state.
  void load_state_dict(const at::IValue& state);

  /// For the loader: begins the next epoch. Throws UsageError for a size other than the sampler's.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// For the loader: the next samples, at most `batch_size`.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;
  /// As LibTorch's samplers, counts what the loader has asked for, not what it has handed out:
  /// prefer state_dict.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Reads what save has written.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct LoaderFacts {
    std::size_t batch_size;
    std::size_t workers;
    std::size_t jobs;  // batches that the workers are asked for in advance
    bool in_order;
    bool drop_last;
  };
  struct [[gnu::visibility("hidden")]] State;

  at::IValue state_of(const LoaderFacts& loader) const;
  void go_to(const detail::EpochPosition& position);

  std::shared_ptr<State> state_;
};

/// A TorchSampler that gives each rank its share: see DistributedSampler. All ranks together see
/// the batches that one process with their joint batch size sees.
[[nodiscard]] PACELINE_API TorchSampler distributed(std::size_t dataset_size,
                                                    DistributedSamplerOptions options = {});

}  // namespace paceline::data
