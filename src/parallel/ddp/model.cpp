#include "parallel/ddp/model.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/utils/tensor_flatten.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include <paceline/collectives.h>

#include "distributed/process_state.h"
#include "distributed/reported_wait.h"
#include "distributed/translate.h"
#include "parallel/gather.h"
#include "shm/collectives/fingerprint.h"

namespace paceline::ddp {
namespace {

// How many tensors an error lists before it only counts.
constexpr std::size_t kMaxNames = 10;

// Not cryptographic; two different inputs collide with a probability of 2^-64.
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

void broadcast_from(int root, const std::vector<at::Tensor>& tensors, const ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>> groups;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) groups[{tensor.device().str(), tensor.scalar_type()}].push_back(tensor);
  }
  for (const auto& [kind, same] : groups) {
    std::vector<at::Tensor> flat{torch::utils::flatten_dense_tensors(same)};
    c10d::BroadcastOptions options;
    options.asyncOp = false;
    options.rootRank = root;
    const c10::DeviceType device = flat[0].device().type();
    distributed::translate_on(device, *group.c10d(), "broadcasting the model", [&] {
      const auto backend = group.c10d()->getBackend(device);
      // NCCL returns no Work then: the current stream has the call.
      const auto work = backend->broadcast(flat, options);
      if (work) distributed::wait_and_report(*work, group);
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
  const at::Tensor all = parallel::gather(mine, group);
  const auto of = all.accessor<std::int64_t, 2>();
  for (std::int64_t i = 0; i < count; ++i) {
    std::vector<std::string> values;
    std::vector<int> members;
    for (int rank = 0; rank < size; ++rank) {
      values.push_back(std::to_string(of[rank][i]));
      members.push_back(distributed::global_rank_of(group, rank));
    }
    const shm::GlobalRanks global_ranks(members);
    const shm::RankSet differing = shm::explain_disagreement(values, global_ranks).ranks;
    if (differing.empty()) continue;
    // Without a majority, compares the others with rank 0.
    int reference = 0;
    while (reference < size && differing.contains(reference)) ++reference;
    if (reference == size) reference = 0;
    shm::RankSet others;
    for (int rank = 0; rank < size; ++rank) {
      if (of[rank][i] != of[reference][i]) others.insert(rank);
    }
    throw Mismatch(
        fmt::format("the models have diverged: in step {}, {} on {} differs from rank {}'s; it is "
                    "the first of {} compared tensors that differs",
                    step, tensors[static_cast<std::size_t>(i)].name,
                    shm::describe_ranks(global_ranks.of(others)), global_ranks.of(reference),
                    count),
        global_ranks.of(differing).list(), "check_sync", step);
  }
}

}  // namespace paceline::ddp
