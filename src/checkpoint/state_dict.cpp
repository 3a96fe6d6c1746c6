#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include <paceline/checkpoint.h>
#include <paceline/error.h>

namespace paceline {
namespace {

// Python's order: of each module its parameters, its buffers, and then its children.
void collect(const torch::nn::Module& module, const std::string& prefix, StateDict& state) {
  for (const auto& one : module.named_parameters(/*recurse=*/false)) {
    if (one.value().defined()) state.insert(prefix + one.key(), one.value().detach());
  }
  for (const auto& one : module.named_buffers(/*recurse=*/false)) {
    if (one.value().defined()) state.insert(prefix + one.key(), one.value().detach());
  }
  for (const auto& child : module.named_children()) {
    collect(*child.value(), prefix + child.key() + ".", state);
  }
}

// "a, b, c and 4 more".
std::string list(const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 10;
  if (names.size() <= kMost) return fmt::format("{}", fmt::join(names, ", "));
  return fmt::format("{} and {} more", fmt::join(names.begin(), names.begin() + kMost, ", "),
                     names.size() - kMost);
}

}  // namespace

StateDict state_dict(const torch::nn::Module& module) {
  StateDict state;
  collect(module, "", state);
  return state;
}

void load_state_dict(torch::nn::Module& module, const StateDict& state, bool strict) {
  const StateDict own = state_dict(module);
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  std::vector<std::string> different;
  for (const auto& one : own) {
    const at::Tensor* const given = state.find(one.key());
    if (given == nullptr) {
      missing.push_back(one.key());
    } else if (given->sizes() != one.value().sizes()) {
      different.push_back(fmt::format("{} ({} in place of {})", one.key(),
                                      fmt::join(given->sizes(), "x"),
                                      fmt::join(one.value().sizes(), "x")));
    }
  }
  for (const auto& one : state) {
    if (!own.contains(one.key())) unexpected.push_back(one.key());
  }
  std::string problems;
  const auto add = [&](const char* what, const std::vector<std::string>& names) {
    if (names.empty()) return;
    problems += fmt::format("{}{}: {}", problems.empty() ? "" : "; ", what, list(names));
  };
  if (strict) add("missing", missing);
  if (strict) add("not of this module", unexpected);
  add("of another shape", different);
  if (!problems.empty()) {
    throw Error(fmt::format("load_state_dict: the tensors do not fit the module {}: {}",
                            module.name(), problems));
  }
  const at::NoGradGuard no_grad;
  for (const auto& one : own) {
    if (const at::Tensor* const given = state.find(one.key())) {
      at::Tensor(one.value()).copy_(*given);
    }
  }
}

}  // namespace paceline
