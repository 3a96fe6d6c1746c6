#pragma once

/// @file
/// Transforms of a data set's samples.

#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include <paceline/dataset_concepts.h>

namespace paceline::data {

/// A data set whose samples are a function's results for another's samples; see map.
template <typename Dataset, typename Function>
class MappedDataset {
  using Input = SampleOf<Dataset>;
  static constexpr bool kIsRandom = std::is_invocable_v<const Function&, Input, at::Generator&>;
  static_assert(kIsRandom || std::is_invocable_v<const Function&, Input>,
                "the function must take a sample, or a sample and an at::Generator&, and must be "
                "callable as a const object");
  static constexpr bool kTakesGenerator = kIsRandom || TakesGenerator<Dataset>;

 public:
  /// See map.
  MappedDataset(std::shared_ptr<Dataset> dataset, Function function)
      : dataset_(std::move(dataset)), function_(std::move(function)) {}

  /// The number of samples.
  std::int64_t size() const { return dataset_->size(); }
  /// The function's result for the sample `index`.
  auto get(std::int64_t index) const requires(!kTakesGenerator) {
    return std::invoke(function_, dataset_->get(index));
  }
  /// The same if the function or the data set takes a generator. If both do, it is the same one,
  /// and the data set uses it first.
  auto get(std::int64_t index, at::Generator& generator) const requires(kTakesGenerator) {
    Input sample = detail::get_sample(*dataset_, index, generator);
    if constexpr (kIsRandom) {
      return std::invoke(function_, std::move(sample), generator);
    } else {
      return std::invoke(function_, std::move(sample));
    }
  }

 private:
  std::shared_ptr<Dataset> dataset_;
  Function function_;
};

/// Applies a function to each sample when it is asked for:
///
///     auto set = data::map(data::Cifar10(), [](auto sample, at::Generator& generator) {
///       sample.first = data::transforms::random_crop(sample.first, 32, 4, generator);
///       return sample;
///     });
///
/// The function takes a sample, or a sample and a generator, which a random transform must use; the
/// result then has `get(index, generator)` (see TakesGenerator). Several threads call it at once.
/// Its result may have any type. Maps can be nested.
///
/// Owns the data set and the function, which are moved or copied; copies of the result share the
/// data set and copy the function. Given a std::shared_ptr, the result shares the data set with the
/// program. Throws UsageError if that is null.
template <typename Dataset, typename Function>
auto map(Dataset dataset, Function function) {
  auto shared = detail::share_dataset(std::move(dataset));
  using Shared = typename decltype(shared)::element_type;
  return MappedDataset<Shared, Function>(std::move(shared), std::move(function));
}

}  // namespace paceline::data
