#pragma once

/// @file
/// What a data set is.

#include <ATen/core/Generator.h>
#include <paceline/error.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

namespace paceline::data {

/// A data set whose samples are made with random numbers.
///
/// A data set is any object with `size()` and with one of
///
///     get(std::int64_t index)
///     get(std::int64_t index, at::Generator& generator)
///
/// which several threads may call at once. The second is for random transforms, and is preferred
/// where a data set has both. Each call gets a CPU generator of its own, seeded for this sample in
/// this epoch. If get takes its random numbers from there only, the sample does not depend on the
/// number of workers or ranks, nor on where a run was resumed. LibTorch's default generator is one
/// for all threads of a process.
template <typename Dataset>
concept TakesGenerator = requires(Dataset& dataset, std::int64_t index, at::Generator& generator) {
  dataset.get(index, generator);
};

/// A data set that makes a whole batch of samples at once, which for small samples is many times
/// faster.
template <typename Dataset>
concept MakesBatches = requires(Dataset& dataset, std::span<const std::int64_t> indices) {
  dataset.get_batch(indices);
};

namespace detail {

template <typename Dataset>
struct SampleType {
  using Type = std::remove_cvref_t<decltype(std::declval<Dataset&>().get(std::int64_t{}))>;
};

template <TakesGenerator Dataset>
struct SampleType<Dataset> {
  using Type = std::remove_cvref_t<decltype(std::declval<Dataset&>().get(
      std::int64_t{}, std::declval<at::Generator&>()))>;
};

// A data set in memory that others share: moved there, unless the program shares it already.
template <typename Dataset>
std::shared_ptr<Dataset> share_dataset(Dataset dataset) {
  return std::make_shared<Dataset>(std::move(dataset));
}
template <typename Dataset>
std::shared_ptr<Dataset> share_dataset(std::shared_ptr<Dataset> dataset) {
  if (dataset == nullptr) throw UsageError("the data set is a null pointer");
  return dataset;
}

// The sample of a data set that may or may not take a generator.
template <typename Dataset>
auto get_sample(Dataset& dataset, std::int64_t index, at::Generator& generator) {
  if constexpr (TakesGenerator<Dataset>) {
    return dataset.get(index, generator);
  } else {
    return dataset.get(index);
  }
}

}  // namespace detail

/// The type of a data set's samples.
template <typename Dataset>
using SampleOf = typename detail::SampleType<Dataset>::Type;

}  // namespace paceline::data
