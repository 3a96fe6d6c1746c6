#pragma once

/// @file
/// Replaces the tensors in nested values.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace paceline {

/// May replace the tensor that it gets.
using TensorVisitor = std::function<void(at::Tensor&)>;

namespace detail {

template <typename T>
concept TensorLike = std::is_convertible_v<T&, at::Tensor&>;
template <typename T>
concept OptionalLike = requires(T& value) {
  value.has_value();
  *value;
};
template <typename T>
concept RangeLike = requires(T& value) {
  value.begin();
  value.end();
};
template <typename T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};
template <typename T>
concept Nest = TensorLike<T> || OptionalLike<T> || RangeLike<T> || TupleLike<T>;

// A struct with an apply_to_tensors of its own, which only argument-dependent lookup finds here.
template <typename T>
concept OwnNest = !Nest<T> && requires(T & value, const TensorVisitor& visitor) {
  apply_to_tensors(value, visitor);
};

template <RangeLike T>
using ElementOf = std::remove_cvref_t<decltype(*std::declval<T&>().begin())>;

// What a nested value consists of; the keys of a map do not count.
struct LeafTypes {
  bool tensors = false;
  bool others = false;
  constexpr LeafTypes operator|(LeafTypes more) const {
    return {tensors || more.tensors, others || more.others};
  }
};

template <typename T>
constexpr LeafTypes leaf_types();

template <typename Tuple, std::size_t... indices>
constexpr LeafTypes leaf_types_of_tuple(std::index_sequence<indices...> /*indices*/) {
  return (LeafTypes() | ... |
          leaf_types<std::remove_cvref_t<std::tuple_element_t<indices, Tuple>>>());
}

template <typename T>
constexpr LeafTypes leaf_types() {
  if constexpr (TensorLike<T> || OwnNest<T>) {
    return {.tensors = true};
  } else if constexpr (OptionalLike<T>) {
    return leaf_types<std::remove_cvref_t<decltype(*std::declval<T&>())>>();
  } else if constexpr (requires { typename T::mapped_type; }) {
    return leaf_types<typename T::mapped_type>();
  } else if constexpr (RangeLike<T>) {
    // Elements of some ranges, such as paths, are ranges of the same type.
    if constexpr (!std::is_same_v<ElementOf<T>, T>) return leaf_types<ElementOf<T>>();
    return {.others = true};
  } else if constexpr (TupleLike<T>) {
    return leaf_types_of_tuple<T>(std::make_index_sequence<std::tuple_size_v<T>>());
  } else {
    return {.others = true};
  }
}

template <typename T>
inline constexpr bool kHoldsTensors = leaf_types<T>().tensors;

}  // namespace detail

/// Calls `visitor` with each tensor in `value`, also undefined ones, always in the same order: a
/// tensor; an optional, a vector, an array, a map, a tuple or a pair of such values. Values of
/// other types, and keys, stay as they are.
///
/// For a struct of your own, write next to it
///
///     void apply_to_tensors(Batch& batch, const paceline::TensorVisitor& visitor) {
///       visitor(batch.images);
///       paceline::apply_to_tensors(batch.masks, visitor);  // a vector of tensors
///     }
template <detail::Nest T>
void apply_to_tensors(T& value, const TensorVisitor& visitor) {
  const auto apply_to_part = [&](auto& part) {
    if constexpr (detail::kHoldsTensors<std::remove_cvref_t<decltype(part)>>) {
      apply_to_tensors(part, visitor);
    }
  };
  if constexpr (detail::TensorLike<T>) {
    visitor(value);
  } else if constexpr (detail::OptionalLike<T>) {
    if (value) apply_to_part(*value);
  } else if constexpr (detail::RangeLike<T>) {
    if constexpr (detail::kHoldsTensors<T>) {
      for (auto& part : value) apply_to_part(part);
    }
  } else {
    std::apply([&](auto&... parts) { (apply_to_part(parts), ...); }, value);
  }
}

namespace detail {

// The tensors of `value` in the order of apply_to_tensors.
template <Nest T>
std::vector<at::Tensor> tensors_of(T value) {
  std::vector<at::Tensor> tensors;
  apply_to_tensors(value, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

// Gives `value` other tensors, as many as it has, in the same order.
template <Nest T>
void replace_tensors(T& value, const std::vector<at::Tensor>& tensors) {
  auto next = tensors.begin();
  apply_to_tensors(value, [&](at::Tensor& tensor) { tensor = *next++; });
}

// Whether tensors of two values that were visited alike correspond.
template <typename T>
bool is_same_nest(const T& a, const T& b) {
  if constexpr (TensorLike<T> || OwnNest<T>) {
    return true;
  } else if constexpr (OptionalLike<T>) {
    return a.has_value() == b.has_value() && (!a.has_value() || is_same_nest(*a, *b));
  } else if constexpr (RangeLike<T> && kHoldsTensors<T>) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), is_same_nest<ElementOf<T>>);
  } else if constexpr (TupleLike<T>) {
    return [&]<std::size_t... indices>(std::index_sequence<indices...> /*indices*/) {
      return (is_same_nest(std::get<indices>(a), std::get<indices>(b)) && ...);
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  } else {
    return a == b;
  }
}

}  // namespace detail
}  // namespace paceline
