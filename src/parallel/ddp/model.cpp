#include "parallel/ddp/model.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/utils/tensor_flatten.h>
#include <torch/nn/modules/embedding.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <sstream>

#include <paceline/collectives.h>

#include "distributed/process_state.h"
#include "distributed/translate.h"
#include "shm/collectives/fingerprint.h"

namespace paceline::ddp {
namespace {

// How many tensors an error lists before it only counts.
constexpr std::size_t kMaxNames = 10;

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

// The weights of embeddings that were told to have sparse gradients.
std::set<const void*> sparse_weights(const torch::nn::Module& module) {
  std::set<const void*> weights;
  for (const auto& part : const_cast<torch::nn::Module&>(module).modules()) {
    const auto add = [&](const auto* embedding) {
      if (embedding != nullptr && embedding->options.sparse()) {
        weights.insert(embedding->weight.unsafeGetTensorImpl());
      }
    };
    add(dynamic_cast<const torch::nn::EmbeddingImpl*>(part.get()));
    add(dynamic_cast<const torch::nn::EmbeddingBagImpl*>(part.get()));
  }
  return weights;
}

// Not cryptographic; any difference changes it but for one case in 2^64.
std::int64_t fingerprint(const at::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  const at::Tensor dense = tensor.detach().cpu().contiguous();
  const auto* const bytes = static_cast<const char*>(dense.data_ptr());
  constexpr std::size_t kLanes = 4;  // so that multiplications overlap
  std::array<std::uint64_t, kLanes> hash{1, 2, 3, 4};
  std::array<std::uint64_t, kLanes> words;
  for (std::size_t at = 0; at < dense.nbytes(); at += sizeof(words)) {
    words.fill(0);
    std::memcpy(words.data(), bytes + at, std::min(sizeof(words), dense.nbytes() - at));
    for (std::size_t i = 0; i < kLanes; ++i) {
      hash[i] = (hash[i] ^ words[i]) * 0x9e3779b97f4a7c15u;
      hash[i] ^= hash[i] >> 32;
    }
  }
  for (std::size_t i = 1; i < kLanes; ++i) hash[0] = (hash[0] ^ hash[i]) * 0x9e3779b97f4a7c15u;
  return static_cast<std::int64_t>(hash[0] ^ hash[0] >> 32);
}

}  // namespace

std::string names_of(const std::vector<NamedTensor>& tensors, const Indices& indices) {
  std::string names;
  for (std::size_t k = 0; k < indices.size() && k < kMaxNames; ++k) {
    names += (k == 0 ? "" : ", ") + tensors[indices[k]].name;
  }
  if (indices.size() > kMaxNames) names += fmt::format(" and {} more", indices.size() - kMaxNames);
  return names;
}

std::vector<NamedTensor> trainable_parameters(const torch::nn::Module& module) {
  const auto sparse = sparse_weights(module);
  std::vector<NamedTensor> parameters;
  std::set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    const void* const tensor = item.value().unsafeGetTensorImpl();
    if (!item.value().is_leaf()) {
      throw UsageError(fmt::format(
          "parameter {} was computed from a tensor that requires a gradient, so it gets "
          "none of its own: register the result of detach() instead",
          item.key()));
    }
    if (item.value().requires_grad() && seen.insert(tensor).second) {
      parameters.push_back({item.key(), item.value(), sparse.count(tensor) > 0});
    }
  }
  return parameters;
}

std::vector<NamedTensor> frozen_parameters(const torch::nn::Module& module) {
  std::vector<NamedTensor> parameters;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (tensor.defined() && !tensor.requires_grad()) parameters.push_back({item.key(), tensor});
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

void broadcast_from(int root, const std::vector<at::Tensor>& tensors, const ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  std::map<at::ScalarType, std::vector<at::Tensor>> by_type;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) by_type[tensor.scalar_type()].push_back(tensor);
  }
  for (const auto& [type, same] : by_type) {
    std::vector<at::Tensor> flat{torch::utils::flatten_dense_tensors(same)};
    c10d::BroadcastOptions options;
    options.asyncOp = false;
    options.rootRank = root;
    distributed::translate("broadcasting the model", [&] {
      group.c10d()->getBackend(flat[0].device().type())->broadcast(flat, options)->wait();
    });
    const auto parts = torch::utils::unflatten_dense_tensors(flat[0], same);
    for (std::size_t i = 0; i < same.size(); ++i) same[i].copy_(parts[i]);
  }
}

void check_same_values(const std::vector<NamedTensor>& tensors, const ProcessGroup& group,
                       std::uint64_t step) {
  const auto count = static_cast<std::int64_t>(tensors.size());
  const int size = get_world_size(group);
  const at::Tensor mine = at::empty({count}, at::kLong);
  std::transform(tensors.begin(), tensors.end(), mine.data_ptr<std::int64_t>(),
                 [](const NamedTensor& one) { return fingerprint(one.tensor); });
  const at::Tensor all = at::empty({size, count}, at::kLong);
  all_gather_into_tensor(all, mine, {.group = group});
  const auto of = all.accessor<std::int64_t, 2>();
  for (std::int64_t i = 0; i < count; ++i) {
    std::vector<std::string> values;
    std::vector<int> numbers;
    for (int rank = 0; rank < size; ++rank) {
      values.push_back(std::to_string(of[rank][i]));
      numbers.push_back(distributed::world_rank_of(group, rank));
    }
    const shm::GlobalRanks named(numbers);
    const shm::RankSet apart = shm::explain_disagreement(values, named).ranks;
    if (apart.empty()) continue;
    // With no majority, rank 0 is what the others are compared with.
    int reference = 0;
    while (reference < size && apart.contains(reference)) ++reference;
    if (reference == size) reference = 0;
    shm::RankSet others;
    for (int rank = 0; rank < size; ++rank) {
      if (of[rank][i] != of[reference][i]) others.insert(rank);
    }
    throw Mismatch(
        fmt::format("the models have come apart: in step {} {} is not on {} what it is on rank {}; "
                    "it is the first such of the {} parameters and buffers compared",
                    step, tensors[static_cast<std::size_t>(i)].name,
                    shm::describe_ranks(named.of(others)), named.of(reference), count),
        named.of(apart).list(), "check_sync", step);
  }
}

}  // namespace paceline::ddp
