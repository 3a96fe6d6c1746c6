#pragma once

/// @file
/// Iterates over a data set in batches.

#include <ATen/core/ivalue.h>
#include <paceline/api.h>
#include <paceline/collate.h>
#include <paceline/sampler.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <type_traits>
#include <utility>
#include <vector>

namespace paceline::data {

/// Options of DataLoader.
struct DataLoaderOptions {
  /// Samples in a batch of this rank, at least 1.
  std::int64_t batch_size = 1;
  /// Threads that fetch ahead. 0: the thread that iterates fetches each batch when it asks for it.
  int num_workers = 0;
  /// Whether a last batch that is not full is left out.
  bool drop_last = false;
  /// How many batches each worker may be ahead, at least 1.
  int prefetch_factor = 2;
};

namespace detail {

using Indices = std::span<const std::int64_t>;
// The indices of the samples of each batch.
using Batches = std::vector<std::vector<std::int64_t>>;

// Fetches batches on threads of its own and hands them out in order. Does not depend on the type of
// a batch.
class PACELINE_API BatchStream {
 public:
  using Batch = std::shared_ptr<void>;
  // Called by several threads at once. Once stop is requested, it should return soon; the result is
  // not used then.
  using Fetch = std::function<Batch(Indices, const std::stop_token&)>;

  BatchStream(Batches batches, const DataLoaderOptions& options, Fetch fetch);
  BatchStream(BatchStream&&) noexcept;
  BatchStream& operator=(BatchStream&&) noexcept;
  // Waits for the samples being fetched at this moment.
  ~BatchStream();

  // The next batch, null after the last. Throws what its fetch threw; null from then on.
  Batch next();

 private:
  class [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

PACELINE_API void check_options(const DataLoaderOptions& options);
PACELINE_API std::int64_t count_batches(std::int64_t samples, const DataLoaderOptions& options);
PACELINE_API Batches make_batches(const std::vector<std::int64_t>& indices,
                                  const DataLoaderOptions& options);

// Call it in a handler: throws an Error that says which samples failed and why, with the exception
// being handled nested in it.
[[noreturn]] PACELINE_API void throw_sample_error(Indices indices);

// Where an iteration is.
struct EpochPosition {
  std::int64_t epoch = 0;
  std::int64_t samples = 0;  // of the order that the ranks share, that were handed out
};
PACELINE_API at::IValue value_of(const EpochPosition& position);
// Throws UsageError unless it is what value_of returned.
PACELINE_API EpochPosition position_of(const at::IValue& value);

// A data set that makes a whole batch at once, which for small samples is many times faster.
template <typename Dataset>
concept MakesBatches = requires(Dataset& dataset, std::span<const std::int64_t> indices) {
  dataset.get_batch(indices);
};

template <typename Dataset, typename Collate>
struct BatchOf {
  using Sample = std::remove_cvref_t<decltype(std::declval<Dataset&>().get(std::int64_t{}))>;
  static_assert(std::invocable<const Collate&, std::vector<Sample>>,
                "these samples have no default collation: give the DataLoader a collate function");
  using Type = std::invoke_result_t<const Collate&, std::vector<Sample>>;
};

template <MakesBatches Dataset>
struct BatchOf<Dataset, DefaultCollate> {
  using Type = std::remove_cvref_t<decltype(std::declval<Dataset&>().get_batch({}))>;
};

// Makes a batch of a data set.
template <typename Dataset, typename Collate>
class BatchFetcher {
 public:
  using Batch = typename BatchOf<Dataset, Collate>::Type;

  BatchFetcher(Dataset& dataset, Collate collate)
      : dataset_(&dataset), collate_(std::move(collate)) {}

  // Null if stop is requested.
  std::shared_ptr<Batch> operator()(Indices indices, const std::stop_token& stop) const {
    if constexpr (kMakesBatches) {
      return attempt(indices,
                     [&] { return std::make_shared<Batch>(dataset_->get_batch(indices)); });
    } else {
      std::vector<typename BatchOf<Dataset, Collate>::Sample> samples;
      samples.reserve(indices.size());
      for (std::size_t i = 0; i < indices.size() && !stop.stop_requested(); ++i) {
        attempt(indices.subspan(i, 1), [&] { samples.push_back(dataset_->get(indices[i])); });
      }
      if (stop.stop_requested()) return nullptr;
      return attempt(indices,
                     [&] { return std::make_shared<Batch>(collate_(std::move(samples))); });
    }
  }

 private:
  static constexpr bool kMakesBatches =
      MakesBatches<Dataset> && std::same_as<Collate, DefaultCollate>;

  template <typename Function>
  static auto attempt(Indices indices, Function function) {
    try {
      return function();
    } catch (...) {
      throw_sample_error(indices);
    }
  }

  Dataset* dataset_;
  Collate collate_;
};

}  // namespace detail

/// Iterates over a data set in batches:
///
///     for (auto& [x, y] : loader.epoch(epoch)) ...
///
/// A data set is any object with `get(i)`, where i is an index from the sampler. Not owned; it must
/// outlive the loader. Samples are collated by the function given, by default DefaultCollate; a
/// data set with `get_batch(std::span<const std::int64_t>)` makes the default batches itself.
///
/// With num_workers > 0, several threads call get, get_batch and collate at once. The threads start
/// with an iteration and end with it, also if the loop is left early. Batches come in the sampler's
/// order, and are the same for any number of workers if a sample depends on its index only. Workers
/// run PyTorch's operations on one thread each.
///
/// If get, get_batch or collate throws, the iteration throws when it comes to that batch: an Error
/// that names the sample, with the original exception nested in it. The iteration is then over; the
/// loader can be iterated again.
///
/// Its state is the epoch and how much of it was handed out by the iteration that began last, not
/// what workers have fetched ahead. A job that loads it goes on there, also with another number of
/// ranks (see Sampler::indices_from):
///
///     for (auto epoch = loader.epoch(); epoch < epochs; ++epoch) {
///       for (auto& [x, y] : loader.epoch(epoch)) ...
///
/// Use it on one thread at a time. Iterations may overlap.
template <typename Dataset, typename Collate = DefaultCollate>
class DataLoader {
 public:
  /// What the collate function, or the data set's get_batch, returns.
  using Batch = typename detail::BatchOf<Dataset, Collate>::Type;

  /// An input iterator over the batches of one epoch. Owns its threads, and ends them when it is
  /// destroyed. The loader and the data set must outlive it.
  class Iterator {
   public:
    using value_type = Batch;                ///< For std::input_iterator.
    using difference_type = std::ptrdiff_t;  ///< For std::input_iterator.

    /// Used by begin().
    Iterator(detail::BatchStream stream, std::shared_ptr<detail::EpochPosition> position,
             std::int64_t samples_per_batch)
        : stream_(std::move(stream)),
          position_(std::move(position)),
          samples_per_batch_(samples_per_batch) {
      ++*this;
    }

    /// The current batch, valid until the next increment.
    Batch& operator*() const { return *batch_; }
    /// Goes to the next batch. Throws what making it threw.
    Iterator& operator++() {
      batch_.reset();
      batch_ = std::static_pointer_cast<Batch>(stream_.next());
      if (batch_) position_->samples += samples_per_batch_;
      return *this;
    }
    /// As ++iterator.
    void operator++(int) { ++*this; }
    /// Whether the epoch is over.
    bool operator==(std::default_sentinel_t) const { return batch_ == nullptr; }

   private:
    detail::BatchStream stream_;
    std::shared_ptr<detail::EpochPosition> position_;
    std::int64_t samples_per_batch_;
    std::shared_ptr<Batch> batch_;
  };

  /// Throws UsageError if an option is out of range.
  template <std::derived_from<Sampler> SamplerType>
  DataLoader(Dataset& dataset, SamplerType sampler, DataLoaderOptions options = {},
             Collate collate = {})
      : fetch_(dataset, std::move(collate)),
        sampler_(std::make_unique<SamplerType>(std::move(sampler))),
        options_(options) {
    detail::check_options(options_);
  }

  /// The number of batches in an epoch of this rank.
  std::int64_t size() const { return detail::count_batches(sampler_->size(), options_); }

  /// Sets the sampler's epoch, and returns the loader.
  DataLoader& epoch(std::int64_t epoch) {
    sampler_->set_epoch(epoch);
    epoch_ = epoch;
    return *this;
  }
  /// The epoch that was set last, or that the state which was loaded last is of; at first 0.
  std::int64_t epoch() const { return epoch_; }

  /// Starts an iteration over the sampler's present epoch; a later epoch() does not change it. The
  /// first iteration after load_state_dict, if it is over that state's epoch, begins where the
  /// state was taken.
  Iterator begin() {
    const bool goes_on = resumes_ && position_->epoch == epoch_;
    auto position = std::make_shared<detail::EpochPosition>(
        detail::EpochPosition{epoch_, goes_on ? position_->samples : 0});
    Iterator iterator(detail::BatchStream(
                          detail::make_batches(sampler_->indices_from(position->samples), options_),
                          options_, std::cref(fetch_)),
                      position, options_.batch_size * sampler_->num_replicas());
    position_ = std::move(position);
    resumes_ = false;
    return iterator;
  }
  /// The end of an iteration.
  std::default_sentinel_t end() const { return {}; }

  /// See the class.
  at::IValue state_dict() const { return detail::value_of(*position_); }
  /// Sets the epoch, and where its next iteration begins. Throws UsageError for another state.
  void load_state_dict(const at::IValue& state) {
    position_ = std::make_shared<detail::EpochPosition>(detail::position_of(state));
    resumes_ = true;
    epoch(position_->epoch);
  }

 private:
  detail::BatchFetcher<Dataset, Collate> fetch_;
  std::unique_ptr<Sampler> sampler_;
  DataLoaderOptions options_;
  std::int64_t epoch_ = 0;
  std::shared_ptr<detail::EpochPosition> position_ = std::make_shared<detail::EpochPosition>();
  bool resumes_ = false;  // the next iteration may begin at position_
};

}  // namespace paceline::data
