#pragma once

/// @file
/// Tensors as a data set.

#include <ATen/core/Tensor.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include <paceline/api.h>

namespace paceline::data {

namespace detail {

// Throws UsageError unless the tensors have a first dimension, of one size. Returns it.
PACELINE_API std::int64_t check_tensors(std::span<const at::Tensor> tensors);
// Both throw UsageError for an index out of range.
PACELINE_API at::Tensor select_row(const at::Tensor& tensor, std::int64_t index);
PACELINE_API at::Tensor select_rows(const at::Tensor& tensor,
                                    std::span<const std::int64_t> indices);

template <std::size_t>
using TensorAt = at::Tensor;

template <typename Sequence>
struct TensorTuple;
template <std::size_t... I>
struct TensorTuple<std::index_sequence<I...>> {
  using Type = std::tuple<TensorAt<I>...>;
};

}  // namespace detail

/// Tensors whose first dimensions are the samples, as torch.utils.data.TensorDataset:
///
///     data::TensorDataset set(images, labels);
///
/// A sample has one row of each tensor: a pair of two tensors, otherwise a tuple. Rows are views.
/// Copies of the data set share the tensors, which must not change while others read them.
template <std::size_t N>
class TensorDataset {
  static_assert(N > 0, "a TensorDataset needs a tensor");

 public:
  /// One row of each tensor.
  using Sample =
      std::conditional_t<N == 2, std::pair<at::Tensor, at::Tensor>,
                         typename detail::TensorTuple<std::make_index_sequence<N>>::Type>;
  /// Several rows of each tensor.
  using Batch = Sample;

  /// Throws UsageError unless the tensors have as many rows each.
  template <std::same_as<at::Tensor>... Tensors>
  requires(sizeof...(Tensors) == N) explicit TensorDataset(Tensors... tensors)
      : tensors_{std::move(tensors)...}, size_(detail::check_tensors(tensors_)) {}

  /// The number of samples.
  std::int64_t size() const { return size_; }
  /// The sample `index`. Throws UsageError unless 0 <= index < size().
  Sample get(std::int64_t index) const {
    return of_each([&](const at::Tensor& tensor) { return detail::select_row(tensor, index); });
  }
  /// The samples of n indices, copied into tensors whose first dimension is n. Throws UsageError as
  /// get does.
  Batch get_batch(std::span<const std::int64_t> indices) const {
    return of_each([&](const at::Tensor& tensor) { return detail::select_rows(tensor, indices); });
  }
  /// The tensors.
  const std::array<at::Tensor, N>& tensors() const { return tensors_; }

 private:
  template <typename Function>
  Sample of_each(Function function) const {
    return std::apply([&](const auto&... tensors) { return Sample(function(tensors)...); },
                      tensors_);
  }

  std::array<at::Tensor, N> tensors_;
  std::int64_t size_;
};

/// A data set of as many tensors as are given.
template <std::same_as<at::Tensor>... Tensors>
TensorDataset(Tensors... tensors) -> TensorDataset<sizeof...(Tensors)>;

}  // namespace paceline::data
