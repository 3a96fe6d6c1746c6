#pragma once

/// @file
/// Finds the tensors in what a forward returns.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include <paceline/error.h>

namespace paceline {

/// Calls `visit` for each defined tensor in `value`: a tensor; an optional, a pointer, a tuple, a
/// pair or a range (vector, array, map) of such values; an IValue, as TorchScript returns it; an
/// Example of torch::data. Numbers, strings and enumerations have none.
///
/// For a struct of your own, write next to it
///
///     template <typename Visit>
///     void for_each_tensor(const Outputs& outputs, Visit&& visit) { visit(outputs.logits); ... }
///
/// Throws UsageError for any other type. A `visit` with a member type VisitsUndefined is called for
/// undefined tensors, too.
template <typename T, typename Visit>
void for_each_tensor(const T& value, Visit&& visit) {
  if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    constexpr bool kAll = requires {
      typename std::remove_cvref_t<Visit>::VisitsUndefined;
    };
    const at::Tensor& tensor = value;
    if (kAll || tensor.defined()) visit(tensor);
  } else if constexpr (std::is_same_v<T, c10::IValue>) {
    value.visit([&](const c10::IValue& part) {
      if (part.isTensor()) for_each_tensor(part.toTensor(), visit);
      return false;
    });
  } else if constexpr (requires {
                         *value;
                         static_cast<bool>(value);
                       }) {
    if (value) for_each_tensor(*value, visit);
  } else if constexpr (requires {
                         value.data;
                         value.target;
                       }) {
    for_each_tensor(value.data, visit);
    for_each_tensor(value.target, visit);
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&](const auto&... parts) { (for_each_tensor(parts, visit), ...); }, value);
  } else if constexpr (requires {
                         value.begin();
                         value.end();
                       }) {
    for (const auto& part : value) for_each_tensor(part, visit);
  } else if constexpr (!std::is_arithmetic_v<T> && !std::is_enum_v<T>) {
    throw UsageError(
        "the tensors in a struct of the program's own cannot be found, which static_graph and a "
        "Pipeline need for what a forward returns, and pin_memory for batches: write a function "
        "for_each_tensor for it (see paceline/for_each_tensor.h)");
  }
}

}  // namespace paceline
