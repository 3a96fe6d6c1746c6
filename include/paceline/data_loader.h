#pragma once

/// @file
/// Iterates over a data set in batches.

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <paceline/api.h>
#include <paceline/collate.h>
#include <paceline/dataset_concepts.h>
#include <paceline/for_each_tensor.h>
#include <paceline/sampler.h>

#include <chrono>
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
  /// Whether tensors of batches are copied into pinned memory, which is faster to copy to a GPU and
  /// can be copied while the GPU computes. Without CUDA they are not, and a warning in the log says
  /// so. The tensors of a struct of the program's own are found by for_each_tensor.
  bool pin_memory = false;
  /// Whether a last batch that is not full is left out.
  bool drop_last = false;
  /// How long the thread that iterates waits for a batch of the workers; 0: without limit.
  std::chrono::milliseconds timeout{0};
  /// How many batches each worker may be ahead, at least 1; unset: 2. Only with workers.
  std::optional<int> prefetch_factor{};
  /// The random numbers of a sample depend on the seed, the epoch and the sample's index only.
  std::uint64_t seed = 0;
};

namespace detail {

using Indices = std::span<const std::int64_t>;
// The indices of the samples of each batch.
using Batches = std::vector<std::vector<std::int64_t>>;

// The generator that samples get one after the other, and its seed for one of them.
PACELINE_API at::Generator make_generator();
PACELINE_API void seed_for_sample(at::Generator& generator, std::uint64_t seed, std::int64_t epoch,
                                  std::int64_t index);

// Fetches batches on threads of its own and hands them out in order. Does not depend on the type of
// a batch.
class PACELINE_API BatchStream {
 public:
  using Batch = std::shared_ptr<void>;
  // Called by several threads at once. Once stop is requested, it should return soon; the result is
  // not used then.
  using Fetch = std::function<Batch(Indices, const std::stop_token&)>;

  // `checks_generator`: whether next() warns if LibTorch's default generator has changed when the
  // workers have made the first batch.
  BatchStream(Batches batches, const DataLoaderOptions& options, Fetch fetch,
              bool checks_generator = false);
  BatchStream(BatchStream&&) noexcept;
  BatchStream& operator=(BatchStream&&) noexcept;
  // Waits for the samples being fetched at this moment; after a timeout, leaves the threads behind.
  ~BatchStream();

  // The next batch, null after the last. Throws what its fetch threw, or Error after the timeout;
  // null from then on.
  Batch next();

 private:
  class [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

PACELINE_API void check_options(const DataLoaderOptions& options);
// Whether to pin, which needs CUDA.
PACELINE_API bool pins_memory(const DataLoaderOptions& options);
// Replaces a tensor of a batch, which must not be const, by a copy in pinned memory.
PACELINE_API void pin(const at::Tensor& tensor);
// Throws UsageError if an option is set that a batch sampler stands for.
PACELINE_API void check_options_beside_batch_sampler(const DataLoaderOptions& options);

// Call it in a handler: throws an Error that says which samples failed and why, with the exception
// being handled nested in it.
[[noreturn]] PACELINE_API void throw_sample_error(Indices indices);

// Throws an Error that says so.
[[noreturn]] void throw_timeout(Indices indices, std::chrono::milliseconds timeout);

// Where an iteration is.
struct EpochPosition {
  std::int64_t epoch = 0;
  std::int64_t samples = 0;  // that were handed out: a position of the batch sampler
};
PACELINE_API at::IValue value_of(const EpochPosition& position);
// Throws UsageError unless it is what value_of returned.
PACELINE_API EpochPosition position_of(const at::IValue& value);

// A data set of LibTorch that has batches only, such as a mapped one.
template <typename Dataset>
concept TorchBatches = requires(Dataset& dataset, c10::ArrayRef<std::size_t> indices) {
  dataset.get_batch(indices);
}
&&!requires(Dataset & dataset, std::int64_t index) {
  dataset.get(index);
};

template <typename Dataset, typename Collate>
struct BatchOf {
  using Sample = SampleOf<Dataset>;
  static_assert(std::invocable<const Collate&, std::vector<Sample>>,
                "these samples have no default collation: give the DataLoader a collate function");
  using Type = std::invoke_result_t<const Collate&, std::vector<Sample>>;
};

// Samples that take a generator are made one by one, each with its own seed.
template <typename Dataset>
concept MakesDefaultBatches = MakesBatches<Dataset> && !TakesGenerator<Dataset>;

template <MakesDefaultBatches Dataset>
struct BatchOf<Dataset, DefaultCollate> {
  using Type = std::remove_cvref_t<decltype(std::declval<Dataset&>().get_batch({}))>;
};

// Samples that LibTorch has not collated are collated here.
template <typename Collate, typename Samples>
decltype(auto) collate_samples(const Collate& collate, Samples samples) {
  if constexpr (std::invocable<const Collate&, Samples>) {
    return collate(std::move(samples));
  } else {
    return samples;
  }
}

template <TorchBatches Dataset, typename Collate>
struct BatchOf<Dataset, Collate> {
  using Samples = decltype(std::declval<Dataset&>().get_batch(c10::ArrayRef<std::size_t>()));
  static_assert(std::invocable<const Collate&, Samples> || std::same_as<Collate, DefaultCollate>,
                "the collate function does not take what get_batch of this data set returns");
  using Type = decltype(collate_samples(std::declval<const Collate&>(), std::declval<Samples>()));
};

// Makes a batch of a data set.
template <typename Dataset, typename Collate>
class BatchFetcher {
 public:
  using Batch = typename BatchOf<Dataset, Collate>::Type;

  BatchFetcher(Dataset& dataset, const DataLoaderOptions& options, Collate collate)
      : dataset_(&dataset),
        seed_(options.seed),
        pins_memory_(detail::pins_memory(options)),
        collate_(std::move(collate)) {}

  // A function for the batches of an epoch, which keeps `fetcher`.
  static BatchStream::Fetch for_epoch(std::shared_ptr<const BatchFetcher> fetcher,
                                      std::int64_t epoch) {
    return [fetcher = std::move(fetcher), epoch](Indices indices, const std::stop_token& stop) {
      auto batch = fetcher->fetch(epoch, indices, stop);
      if (batch && fetcher->pins_memory_) attempt(indices, [&] { for_each_tensor(*batch, pin); });
      return batch;
    };
  }

 private:
  static constexpr bool kMakesBatches =
      MakesDefaultBatches<Dataset> && std::same_as<Collate, DefaultCollate>;

  // Null if stop is requested.
  std::shared_ptr<Batch> fetch(std::int64_t epoch, Indices indices,
                               const std::stop_token& stop) const {
    if constexpr (kMakesBatches) {
      return attempt(indices,
                     [&] { return std::make_shared<Batch>(dataset_->get_batch(indices)); });
    } else if constexpr (TorchBatches<Dataset>) {
      const std::vector<std::size_t> request(indices.begin(), indices.end());
      return attempt(indices, [&] {
        return std::make_shared<Batch>(collate_samples(collate_, dataset_->get_batch(request)));
      });
    } else {
      std::vector<typename BatchOf<Dataset, Collate>::Sample> samples;
      samples.reserve(indices.size());
      at::Generator generator;
      if constexpr (TakesGenerator<Dataset>) generator = make_generator();
      for (std::size_t i = 0; i < indices.size() && !stop.stop_requested(); ++i) {
        attempt(indices.subspan(i, 1), [&] {
          if constexpr (TakesGenerator<Dataset>) {
            seed_for_sample(generator, seed_, epoch, indices[i]);
          }
          samples.push_back(get_sample(*dataset_, indices[i], generator));
        });
      }
      if (stop.stop_requested()) return nullptr;
      return attempt(indices,
                     [&] { return std::make_shared<Batch>(collate_(std::move(samples))); });
    }
  }

  template <typename Function>
  static auto attempt(Indices indices, Function function) {
    try {
      return function();
    } catch (...) {
      throw_sample_error(indices);
    }
  }

  Dataset* dataset_;
  std::uint64_t seed_;
  bool pins_memory_;
  Collate collate_;
};

}  // namespace detail

/// Iterates over a data set in batches:
///
///     for (auto& [x, y] : loader.epoch(epoch)) ...
///
/// A data set is any object with `get(i)`, where i is an index from the sampler. Not owned; it must
/// outlive the loader. Samples are collated by the function given, by default DefaultCollate; a
/// data set with `get_batch(std::span<const std::int64_t>)` makes the default batches itself. So
/// any stateless data set of LibTorch is one, also a mapped one, and its collation makes the
/// batches.
///
/// The generator of a data set whose get takes one (see TakesGenerator) is seeded by
/// DataLoaderOptions::seed, the epoch and the index, so its numbers do not depend on workers, ranks
/// or where the run was resumed. If get draws from LibTorch's default generator in a worker,
/// results depend on timing; a warning in the log says so.
///
/// With num_workers > 0, several threads call get, get_batch and collate at once. The threads start
/// with an iteration and end with it, also if the loop is left early. Batches come in the sampler's
/// order, and are the same for any number of workers if a sample depends on its index only. Workers
/// run PyTorch's operations on one thread each.
///
/// If get, get_batch or collate throws, the iteration throws when it comes to that batch: an Error
/// that names the sample, with the original exception nested in it. The iteration is then over; the
/// loader can be iterated again. If a batch takes longer than DataLoaderOptions::timeout, the
/// iteration throws Error that names its samples, and leaves its threads behind: the data set must
/// exist until their calls have returned.
///
/// Its state is the epoch and how much of it was handed out by the iteration that began last, not
/// what workers have fetched ahead. A job that loads it goes on there, also with another number of
/// ranks (see Sampler::indices_from and BatchSamplerBase::batches_from):
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
             std::int64_t position_step)
        : stream_(std::move(stream)),
          position_(std::move(position)),
          position_step_(position_step) {
      ++*this;
    }

    /// The current batch, valid until the next increment.
    Batch& operator*() const { return *batch_; }
    /// Goes to the next batch. Throws what making it threw.
    Iterator& operator++() {
      batch_.reset();
      batch_ = std::static_pointer_cast<Batch>(stream_.next());
      if (batch_) position_->samples += position_step_;
      return *this;
    }
    /// As ++iterator.
    void operator++(int) { ++*this; }
    /// Whether the epoch is over.
    bool operator==(std::default_sentinel_t) const { return batch_ == nullptr; }

   private:
    detail::BatchStream stream_;
    std::shared_ptr<detail::EpochPosition> position_;
    std::int64_t position_step_;
    std::shared_ptr<Batch> batch_;
  };

  /// Throws UsageError if an option is out of range.
  template <std::derived_from<Sampler> SamplerType>
  DataLoader(Dataset& dataset, SamplerType sampler, DataLoaderOptions options = {},
             Collate collate = {})
      : DataLoader(dataset,
                   std::make_unique<BatchSampler>(std::move(sampler), options.batch_size,
                                                  options.drop_last),
                   options, std::move(collate)) {}
  /// The same with the batches of a batch sampler; batch_size and drop_last must not be set.
  template <std::derived_from<BatchSamplerBase> BatchSamplerType>
  DataLoader(Dataset& dataset, BatchSamplerType batch_sampler, DataLoaderOptions options = {},
             Collate collate = {})
      : DataLoader(dataset, std::make_unique<BatchSamplerType>(std::move(batch_sampler)), options,
                   std::move(collate)) {
    detail::check_options_beside_batch_sampler(options_);
  }

  /// The number of batches in an epoch of this rank.
  std::int64_t size() const { return batch_sampler_->size(); }

  /// Sets the sampler's epoch, and returns the loader.
  DataLoader& epoch(std::int64_t epoch) {
    batch_sampler_->set_epoch(epoch);
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
    const bool is_first = !std::exchange(was_iterated_, true);
    Iterator iterator(detail::BatchStream(batch_sampler_->batches_from(position->samples), options_,
                                          Fetcher::for_epoch(fetcher_, epoch_), is_first),
                      position, batch_sampler_->position_step());
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
  using Fetcher = detail::BatchFetcher<Dataset, Collate>;

  DataLoader(Dataset& dataset, std::unique_ptr<BatchSamplerBase> batch_sampler,
             const DataLoaderOptions& options, Collate collate)
      : fetcher_(std::make_shared<Fetcher>(dataset, options, std::move(collate))),
        batch_sampler_(std::move(batch_sampler)),
        options_(options) {
    detail::check_options(options_);
  }

  std::shared_ptr<const Fetcher> fetcher_;
  std::unique_ptr<BatchSamplerBase> batch_sampler_;
  DataLoaderOptions options_;
  std::int64_t epoch_ = 0;
  std::shared_ptr<detail::EpochPosition> position_ = std::make_shared<detail::EpochPosition>();
  bool resumes_ = false;  // the next iteration may begin at position_
  bool was_iterated_ = false;
};

}  // namespace paceline::data
