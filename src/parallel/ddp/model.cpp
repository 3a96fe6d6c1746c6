#include "parallel/ddp/model.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/utils/tensor_flatten.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include <paceline/collectives.h>

#include "distributed/process_state.h"
#include "distributed/translate.h"

namespace paceline::ddp {
namespace {

std::string join(at::IntArrayRef numbers) {
  return fmt::format("[{}]", fmt::join(numbers.begin(), numbers.end(), ", "));
}

std::string describe(const std::string& name, const at::Tensor& tensor, const char* kind) {
  if (!tensor.defined()) return fmt::format("{}, an undefined {}", name, kind);
  std::string text = fmt::format("{}, a {} of shape {} and type {}", name, kind,
                                 join(tensor.sizes()), c10::toString(tensor.scalar_type()));
  // Gradients lie in the bucket as parameters do in memory.
  if (tensor.layout() == at::kStrided && !tensor.is_contiguous()) {
    text += " with strides " + join(tensor.strides());
  }
  return text;
}

std::vector<std::string> describe(const torch::nn::Module& module) {
  std::vector<std::string> lines;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    lines.push_back(
        describe(item.key(), tensor, tensor.requires_grad() ? "parameter" : "frozen parameter"));
  }
  for (const auto& item : module.named_buffers()) {
    lines.push_back(describe(item.key(), item.value(), "buffer"));
  }
  return lines;
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string first_difference(const std::vector<std::string>& first,
                             const std::vector<std::string>& other, std::pair<int, int> ranks) {
  const auto [a, b] = std::mismatch(first.begin(), first.end(), other.begin(), other.end());
  const auto what = [](const auto& at, const auto& lines) {
    return at == lines.end() ? std::string("nothing more") : *at;
  };
  return fmt::format(
      "the models differ: of {} parameters and buffers on rank {}, and {} on rank {}, the first "
      "that "
      "is not the same is {} on rank {} and {} on rank {}",
      first.size(), ranks.first, other.size(), ranks.second, what(a, first), ranks.first,
      what(b, other), ranks.second);
}

}  // namespace

std::vector<NamedTensor> trainable_parameters(const torch::nn::Module& module) {
  std::vector<NamedTensor> parameters;
  std::set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    if (item.value().requires_grad() && seen.insert(item.value().unsafeGetTensorImpl()).second) {
      parameters.push_back({item.key(), item.value()});
    }
  }
  return parameters;
}

void check_same_model(const torch::nn::Module& module, const ProcessGroup& group) {
  const auto texts =
      all_gather_bytes(fmt::format("{}", fmt::join(describe(module), "\n")), {.group = group});
  const auto number = [&](std::size_t rank) {
    return distributed::world_rank_of(group, static_cast<int>(rank));
  };
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    throw Mismatch(first_difference(split_lines(texts[0]), split_lines(texts[rank]),
                                    {number(0), number(rank)}),
                   {number(rank)}, "DistributedDataParallel", 0);
  }
}

void broadcast_from_first(const std::vector<at::Tensor>& tensors, const ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  std::map<at::ScalarType, std::vector<at::Tensor>> by_type;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) by_type[tensor.scalar_type()].push_back(tensor);
  }
  for (const auto& [type, same] : by_type) {
    std::vector<at::Tensor> flat{torch::utils::flatten_dense_tensors(same)};
    c10d::BroadcastOptions options;
    options.asyncOp = false;
    distributed::translate("broadcasting the model from rank 0", [&] {
      group.c10d()->getBackend(flat[0].device().type())->broadcast(flat, options)->wait();
    });
    const auto parts = torch::utils::unflatten_dense_tensors(flat[0], same);
    for (std::size_t i = 0; i < same.size(); ++i) same[i].copy_(parts[i]);
  }
}

}  // namespace paceline::ddp
