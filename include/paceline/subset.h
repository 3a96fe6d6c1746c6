#pragma once

/// @file
/// Parts of a data set, and several as one.

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <paceline/api.h>
#include <paceline/dataset_concepts.h>

namespace paceline::data {

namespace detail {

// Throws UsageError unless each is from 0 to size - 1.
PACELINE_API void check_indices(std::span<const std::int64_t> indices, std::int64_t size);
// Throws UsageError unless 0 <= index < indices.size().
PACELINE_API std::int64_t index_at(std::span<const std::int64_t> indices, std::int64_t index);
PACELINE_API std::vector<std::int64_t> indices_at(std::span<const std::int64_t> indices,
                                                  std::span<const std::int64_t> positions);
// The indices of each part. Throws UsageError unless `lengths` add up to `size`, or fractions to 1.
PACELINE_API std::vector<std::vector<std::int64_t>> split_indices(
    std::int64_t size, std::span<const std::int64_t> lengths, std::uint64_t seed);
PACELINE_API std::vector<std::vector<std::int64_t>> split_indices(std::int64_t size,
                                                                  std::span<const double> fractions,
                                                                  std::uint64_t seed);
// For an index of a ConcatDataset. Throws UsageError.
PACELINE_API void check_concat_index(std::int64_t index, std::int64_t size);

}  // namespace detail

/// The samples of a data set at some indices, as torch.utils.data.Subset. It has what the data set
/// has: get with a generator or without, and get_batch.
///
/// Owns the data set, which is moved or copied into it; copies of a Subset share it. Given a
/// std::shared_ptr, it shares it with the program.
template <typename Dataset>
class Subset {
 public:
  /// Throws UsageError if an index is out of range.
  Subset(Dataset dataset, std::vector<std::int64_t> indices)
      : Subset(std::make_shared<Dataset>(std::move(dataset)), std::move(indices)) {}
  /// The same for a data set that others use, too. Throws UsageError if it is null.
  Subset(std::shared_ptr<Dataset> dataset, std::vector<std::int64_t> indices)
      : dataset_(detail::share_dataset(std::move(dataset))),
        indices_(std::make_shared<const std::vector<std::int64_t>>(std::move(indices))) {
    detail::check_indices(*indices_, dataset_->size());
  }

  /// The number of indices.
  std::int64_t size() const { return static_cast<std::int64_t>(indices_->size()); }
  /// The data set's sample at the index at `position`. Throws UsageError unless 0 <= position <
  /// size().
  SampleOf<Dataset> get(std::int64_t position) const requires(!TakesGenerator<Dataset>) {
    return dataset_->get(detail::index_at(*indices_, position));
  }
  /// The same for a data set whose samples are random.
  SampleOf<Dataset> get(std::int64_t position,
                        at::Generator& generator) const requires TakesGenerator<Dataset> {
    return dataset_->get(detail::index_at(*indices_, position), generator);
  }
  /// The data set's batch of the indices at `positions`.
  auto get_batch(std::span<const std::int64_t> positions) const
      requires(MakesBatches<Dataset> && !TakesGenerator<Dataset>) {
    return dataset_->get_batch(detail::indices_at(*indices_, positions));
  }

  /// The indices, in the data set.
  const std::vector<std::int64_t>& indices() const { return *indices_; }
  /// The whole data set.
  Dataset& dataset() const { return *dataset_; }

 private:
  std::shared_ptr<Dataset> dataset_;
  std::shared_ptr<const std::vector<std::int64_t>> indices_;
};

/// Splits a data set at random into parts without common samples, as torch.utils.data.random_split
/// with a generator of the same seed:
///
///     auto parts = data::random_split(set, {50000, 10000}, /*seed=*/1);
///     auto parts = data::random_split(set, {0.9, 0.1}, /*seed=*/1);
///
/// Fractions are rounded down, and what is left goes to the parts in turn. The parts share the data
/// set, which is moved or copied, or a std::shared_ptr. Throws UsageError if that is null, and
/// unless lengths add up to the data set's size, and fractions to 1.
template <typename Dataset, typename Number>
requires std::is_arithmetic_v<Number>
auto random_split(Dataset dataset, const std::vector<Number>& lengths, std::uint64_t seed = 0) {
  static_assert(!std::is_same_v<Number, float>,
                "random_split takes fractions as double: a float's rounding gives other lengths");
  using Length = std::conditional_t<std::is_floating_point_v<Number>, double, std::int64_t>;
  const auto shared = detail::share_dataset(std::move(dataset));
  const std::vector<Length> converted(lengths.begin(), lengths.end());
  std::vector<Subset<typename std::remove_cvref_t<decltype(shared)>::element_type>> parts;
  for (auto& indices :
       detail::split_indices(shared->size(), std::span<const Length>(converted), seed)) {
    parts.emplace_back(shared, std::move(indices));
  }
  return parts;
}

/// The same for lengths in braces.
template <typename Dataset, typename Number>
requires std::is_arithmetic_v<Number>
auto random_split(Dataset dataset, std::initializer_list<Number> lengths, std::uint64_t seed = 0) {
  return random_split(std::move(dataset), std::vector<Number>(lengths), seed);
}

/// Data sets one after the other, as torch.utils.data.ConcatDataset:
///
///     data::ConcatDataset set(first, second);
///
/// Their types may differ, but their samples have one type. Owns the data sets, which copies share.
/// Takes a generator if one of them does.
template <typename First, typename... Others>
class ConcatDataset {
  static_assert((std::is_same_v<SampleOf<First>, SampleOf<Others>> && ...),
                "the data sets of a ConcatDataset must have samples of one type");
  static constexpr bool kTakesGenerator = (TakesGenerator<First> || ... || TakesGenerator<Others>);

 public:
  /// A sample of any of them.
  using Sample = SampleOf<First>;

  /// Moves or copies the data sets.
  explicit ConcatDataset(First first, Others... others)
      : datasets_(std::make_shared<std::tuple<First, Others...>>(std::move(first),
                                                                 std::move(others)...)) {}

  /// The number of samples of all.
  std::int64_t size() const {
    return std::apply([](auto&... sets) { return (std::int64_t{0} + ... + sets.size()); },
                      *datasets_);
  }
  /// The sample `index`, counted from the first data set's beginning. Throws UsageError unless 0 <=
  /// index < size().
  Sample get(std::int64_t index) const requires(!kTakesGenerator) {
    detail::check_concat_index(index, size());
    return find<0>(index, [](auto& set, std::int64_t i) { return set.get(i); });
  }
  /// The same if samples are random.
  Sample get(std::int64_t index, at::Generator& generator) const requires(kTakesGenerator) {
    detail::check_concat_index(index, size());
    return find<0>(
        index, [&](auto& set, std::int64_t i) { return detail::get_sample(set, i, generator); });
  }

 private:
  template <std::size_t I, typename Function>
  Sample find(std::int64_t index, Function function) const {
    auto& set = std::get<I>(*datasets_);
    if constexpr (I < sizeof...(Others)) {
      if (index >= set.size()) return find<I + 1>(index - set.size(), function);
    }
    return function(set, index);
  }

  std::shared_ptr<std::tuple<First, Others...>> datasets_;
};

}  // namespace paceline::data
