#pragma once

/// @file
/// Makes batches of samples.

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <paceline/api.h>

namespace paceline::data {

namespace detail {

PACELINE_API at::Tensor stack(const std::vector<at::Tensor>& tensors);
PACELINE_API at::Tensor empty_vector(std::int64_t size, at::ScalarType type);

template <typename T>
concept Number = std::is_arithmetic_v<T>;

// What torch::data's datasets return: torch::data::Example and its like.
template <typename T>
concept Example = requires(T sample) {
  sample.data;
  sample.target;
};

template <typename T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

// As Python's default_collate: every integer becomes an int64, bool and floating types stay.
template <Number T>
using TensorElement =
    std::conditional_t<std::same_as<T, bool> || std::floating_point<T>, T, std::int64_t>;

// The values of one member of all samples.
template <typename Sample, typename Get>
auto column(std::vector<Sample>& samples, Get get) {
  std::vector<std::remove_cvref_t<decltype(get(samples.front()))>> values;
  values.reserve(samples.size());
  for (auto& sample : samples) values.push_back(std::move(get(sample)));
  return values;
}

}  // namespace detail

/// Makes a batch of samples as Python's default_collate does. Tensors of one shape are stacked
/// along a new first dimension, numbers become a tensor. Pairs, tuples, arrays, and structs with
/// the members `data` and `target` (torch::data::Example) are collated member by member.
struct DefaultCollate {
  /// n tensors of shape S: one of shape (n, S). Throws c10::Error if their shapes differ.
  at::Tensor operator()(const std::vector<at::Tensor>& samples) const {
    return detail::stack(samples);
  }

  /// n numbers: a tensor of shape (n); int64 for integers, otherwise of the numbers' type.
  template <detail::Number T>
  at::Tensor operator()(const std::vector<T>& samples) const {
    using Element = detail::TensorElement<T>;
    at::Tensor batch = detail::empty_vector(static_cast<std::int64_t>(samples.size()),
                                            c10::CppTypeToScalarType<Element>::value);
    std::copy(samples.begin(), samples.end(), batch.mutable_data_ptr<Element>());
    return batch;
  }

  /// A pair of the batches of `data` and `target`.
  template <detail::Example T>
  auto operator()(std::vector<T> samples) const {
    auto data = (*this)(detail::column(
        samples, [](T & s) -> auto& { return s.data; }));
    auto target = (*this)(detail::column(
        samples, [](T & s) -> auto& { return s.target; }));
    return std::pair(std::move(data), std::move(target));
  }

  /// A pair for pairs; a tuple for tuples and arrays.
  template <detail::TupleLike T>
  auto operator()(std::vector<T> samples) const {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      const auto member = [&]<std::size_t J>() {
        return (*this)(detail::column(
            samples, [](T & s) -> auto& { return std::get<J>(s); }));
      };
      if constexpr (sizeof...(I) == 2) {
        return std::pair(member.template operator()<I>()...);
      } else {
        return std::tuple(member.template operator()<I>()...);
      }
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  }
};

}  // namespace paceline::data
