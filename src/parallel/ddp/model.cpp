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

#include "distributed/translate.h"

namespace paceline::ddp {
namespace {

std::vector<std::string> describe(const std::vector<NamedTensor>& parameters) {
  std::vector<std::string> lines;
  for (const auto& [name, tensor] : parameters) {
    lines.push_back(fmt::format("{} of shape [{}] and type {}", name,
                                fmt::join(tensor.sizes().begin(), tensor.sizes().end(), ", "),
                                c10::toString(tensor.scalar_type())));
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
                             const std::vector<std::string>& other, int rank) {
  const auto [a, b] = std::mismatch(first.begin(), first.end(), other.begin(), other.end());
  const auto what = [](const auto& at, const auto& lines) {
    return at == lines.end() ? std::string("nothing more") : *at;
  };
  return fmt::format(
      "the models differ: rank 0 has {} parameters, rank {} has {}; as parameter {} rank 0 has {}, "
      "rank {} has {}",
      first.size(), rank, other.size(), a - first.begin(), what(a, first), rank, what(b, other));
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

void check_same_parameters(const std::vector<NamedTensor>& parameters, const ProcessGroup& group) {
  const auto texts =
      all_gather_bytes(fmt::format("{}", fmt::join(describe(parameters), "\n")), {.group = group});
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    const int number = static_cast<int>(rank);
    throw Mismatch(first_difference(split_lines(texts[0]), split_lines(texts[rank]), number),
                   {number}, "DistributedDataParallel", 0);
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
