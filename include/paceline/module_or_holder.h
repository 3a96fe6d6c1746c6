#pragma once

/// @file
/// What wrappers of modules can be made of.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <string>

#include <paceline/error.h>

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

// The module of a TORCH_MODULE's holder; null if the holder was made of nullptr, for which ptr()
// throws c10::Error.
template <typename M>
std::shared_ptr<M> module_of(const torch::nn::ModuleHolder<M>& holder) {
  return holder.is_empty() ? nullptr : holder.ptr();
}

// The module; throws UsageError in the name of `user` if there is none.
inline torch::nn::Module& checked_module(const std::shared_ptr<torch::nn::Module>& module,
                                         const char* user) {
  if (module != nullptr) return *module;
  throw UsageError(std::string(user) + ": the module is null; make it first");
}

}  // namespace paceline::detail
