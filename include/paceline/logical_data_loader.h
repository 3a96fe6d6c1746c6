#pragma once

/// @file
/// Iterates over a data set in the batches of logical ranks.

#include <paceline/data_loader.h>
#include <paceline/logical_ranks.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace paceline::data {
namespace detail {

// Where a LogicalDataLoader is.
struct LoaderPosition {
  std::int64_t epoch = 0;
  std::int64_t steps = 0;  // whose batches were handed out

  bool operator==(const LoaderPosition&) const = default;
};

// The position of each logical rank; it is part of the logical rank's state. All logical ranks of
// this process have the same position.
class PACELINE_API LogicalPositions {
 public:
  // Registers itself as `name`, as long as it lives. `ranks` must outlive it.
  LogicalPositions(LogicalRanks& ranks, std::string name, std::int64_t batch_size);
  LogicalPositions(const LogicalPositions&) = delete;
  LogicalPositions& operator=(const LogicalPositions&) = delete;
  ~LogicalPositions();

  // Call when an iteration begins: returns where, which is the begin of the epoch unless a state
  // says otherwise. Throws UsageError if the states differ.
  LoaderPosition begin(const LogicalRange& range);
  // The next iteration's: that which was chosen, or that of a state which was set since.
  std::int64_t epoch(const LogicalRange& range) const;
  void choose_epoch(std::int64_t epoch);
  void set(const LoaderPosition& position, const LogicalRange& range);

 private:
  struct Positions {
    std::map<int, LoaderPosition> of_rank;
    LoaderPosition taken;   // of this process, at the last step
    bool were_set = false;  // by a state, since the last step
    std::optional<std::int64_t> chosen_epoch;
  };
  LogicalRanks& ranks_;
  std::string name_;
  std::shared_ptr<Positions> positions_;  // also held by what is registered
};

// `steps`: how many the epoch has.
PACELINE_API void check_position(const LoaderPosition& position, std::int64_t steps);
[[noreturn]] PACELINE_API void throw_no_batch(int rank, const LogicalRange& range);
PACELINE_API void check_same_size(std::int64_t first, std::int64_t other, int rank);

}  // namespace detail

/// A DataLoader for each logical rank that this rank runs, in step:
///
///     data::LogicalDataLoader loader(set, model.logical_ranks(), [&](int rank) {
///       return data::DistributedSampler(set.size(), {.num_replicas = 8, .rank = rank});
///     });
///     for (auto& batches : loader.epoch(epoch)) {
///       for (const int rank : model.logical_ranks()) {
///         auto& [x, y] = batches[rank];
///         ...
///
/// Data sets, collation, workers, errors and threads are as in DataLoader. All logical ranks must
/// have equally many batches. The workers of an iteration serve all of them.
///
/// The epoch, and the number of its steps whose batches were handed out, are part of each logical
/// rank's state. The next iteration after LogicalRanks::set_state is over that epoch, unless
/// another one is chosen since. It begins after these steps, and throws UsageError if the epoch has
/// fewer. All other iterations begin with the first step. Since steps count, set_state throws
/// UsageError for a state of another batch size. An iteration goes on after LogicalRanks::assign
/// with the logical ranks that this rank runs from then on.
template <typename Dataset, typename Collate = DefaultCollate>
class LogicalDataLoader {
 public:
  /// What the collate function, or the data set's get_batch, returns.
  using Batch = typename detail::BatchOf<Dataset, Collate>::Type;

  /// The batches of a step.
  class Batches {
   public:
    /// The batch of a logical rank, valid until the next step. Throws UsageError unless this rank
    /// ran it when the step began.
    Batch& operator[](int rank) const {
      const auto index = static_cast<std::size_t>(rank - range_.first);
      if (rank < range_.first || index >= batches_.size()) detail::throw_no_batch(rank, range_);
      return *batches_[index];
    }

   private:
    friend class LogicalDataLoader;
    LogicalRange range_;
    std::vector<std::shared_ptr<Batch>> batches_;
  };

  /// An input iterator over the steps of one epoch. The loader must outlive it.
  class Iterator {
   public:
    using value_type = Batches;              ///< For std::input_iterator.
    using difference_type = std::ptrdiff_t;  ///< For std::input_iterator.

    /// Used by begin().
    explicit Iterator(LogicalDataLoader& loader) : loader_(&loader) {
      position_ = loader.positions_.begin(loader.ranks_.range());
      open();
      take();
    }

    /// The current step's batches, valid until the next increment.
    Batches& operator*() const { return batches_; }
    /// Goes to the next step. Throws what making a batch threw.
    Iterator& operator++() {
      const bool is_over = position_.steps == count_;
      if (!is_over && !(loader_->ranks_.range() == batches_.range_)) open();
      take();
      return *this;
    }
    /// As ++iterator.
    void operator++(int) { ++*this; }
    /// Whether the epoch is over.
    bool operator==(std::default_sentinel_t) const { return batches_.batches_.empty(); }

   private:
    // Opens the stream at position_.
    void open() {
      batches_.range_ = loader_->ranks_.range();
      detail::Batches all;
      std::vector<detail::Batches> of_rank;
      for (int k = 0; k < batches_.range_.count; ++k) {
        of_rank.push_back(loader_->batches_of(batches_.range_.first + k, position_.epoch));
        detail::check_same_size(static_cast<std::int64_t>(of_rank[0].size()),
                                static_cast<std::int64_t>(of_rank.back().size()),
                                batches_.range_.first + k);
      }
      count_ = static_cast<std::int64_t>(of_rank[0].size());
      detail::check_position(position_, count_);
      for (auto step = static_cast<std::size_t>(position_.steps); step < of_rank[0].size();
           ++step) {
        for (auto& batches : of_rank) all.push_back(std::move(batches[step]));
      }
      stream_.emplace(std::move(all), loader_->options_,
                      Fetcher::for_epoch(loader_->fetcher_, position_.epoch));
    }
    void take() {
      batches_.batches_.clear();
      for (int k = 0; k < batches_.range_.count; ++k) {
        auto batch = std::static_pointer_cast<Batch>(stream_->next());
        if (batch == nullptr) return;
        batches_.batches_.push_back(std::move(batch));
      }
      ++position_.steps;
      loader_->positions_.set(position_, batches_.range_);
    }

    LogicalDataLoader* loader_;
    detail::LoaderPosition position_;
    std::int64_t count_ = 0;  // of steps in the epoch
    std::optional<detail::BatchStream> stream_;
    mutable Batches batches_;
  };

  /// `make_sampler` makes the sampler of a logical rank. Throws UsageError if an option is out of
  /// range, or if `name`, which the state of logical ranks has for this loader, is in use.
  template <std::invocable<int> MakeSampler>
  LogicalDataLoader(Dataset& dataset, LogicalRanks ranks, MakeSampler make_sampler,
                    DataLoaderOptions options = {}, Collate collate = {},
                    const std::string& name = "data_loader")
      : fetcher_(std::make_shared<Fetcher>(dataset, options, std::move(collate))),
        ranks_(std::move(ranks)),
        make_batch_sampler_([make = std::move(make_sampler), options](int rank) {
          return BatchSampler(make(rank), options.batch_size, options.drop_last);
        }),
        options_(options),
        positions_(ranks_, name, options.batch_size) {
    detail::check_options(options_);
  }

  /// The number of steps in an epoch.
  std::int64_t size() const { return make_batch_sampler_(ranks_.range().first).size(); }

  /// Chooses the epoch of the next iteration, and returns the loader.
  LogicalDataLoader& epoch(std::int64_t epoch) {
    positions_.choose_epoch(epoch);
    return *this;
  }

  /// The epoch that was set last, or that a state which was set since is of; at first 0.
  std::int64_t epoch() const { return positions_.epoch(ranks_.range()); }

  /// Starts an iteration.
  Iterator begin() { return Iterator(*this); }
  /// The end of an iteration.
  std::default_sentinel_t end() const { return {}; }

 private:
  using Fetcher = detail::BatchFetcher<Dataset, Collate>;

  detail::Batches batches_of(int rank, std::int64_t epoch) const {
    BatchSampler sampler = make_batch_sampler_(rank);
    sampler.set_epoch(epoch);
    return sampler.batches();
  }

  std::shared_ptr<const Fetcher> fetcher_;
  LogicalRanks ranks_;
  std::function<BatchSampler(int)> make_batch_sampler_;
  DataLoaderOptions options_;
  detail::LogicalPositions positions_;
};

}  // namespace paceline::data
