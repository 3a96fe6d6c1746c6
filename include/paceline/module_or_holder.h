#pragma once

/// @file
/// What wrappers of modules can be made of.

#include <torch/nn/module.h>

#include <concepts>
#include <memory>

namespace paceline::detail {

// A module, a shared pointer to one, or a TORCH_MODULE's holder.
template <typename T>
inline constexpr bool kIsModuleOrHolder = std::derived_from<T, torch::nn::Module>;
template <std::derived_from<torch::nn::Module> M>
inline constexpr bool kIsModuleOrHolder<std::shared_ptr<M>> = true;
template <typename T>
requires requires {
  typename T::ContainedType;
}
inline constexpr bool kIsModuleOrHolder<T> = true;

}  // namespace paceline::detail
