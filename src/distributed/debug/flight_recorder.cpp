#include "distributed/debug/flight_recorder.h"

#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>
#include <torch/csrc/distributed/c10d/hooks/FlightRecorderHook.hpp>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string_view>
#include <utility>

namespace paceline::distributed {
namespace {

using c10d::HookOpName;

// The first variable that is set counts, as in PyTorch.
bool is_wanted() {
  for (const char* const name : {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}) {
    const char* const value = std::getenv(name);
    if (value != nullptr && *value != '\0') return std::strtol(value, nullptr, 10) > 0;
  }
  return false;
}

HookOpName name_of(std::string_view operation) {
  static const std::map<std::string_view, HookOpName> names{
      {"broadcast", HookOpName::BROADCAST},
      {"all_gather", HookOpName::ALLGATHER},
      {"all_gather_into_tensor", HookOpName::ALLGATHER_BASE},
      {"gather", HookOpName::GATHER},
      {"scatter", HookOpName::SCATTER},
      {"all_to_all", HookOpName::ALLTOALL},
      {"all_to_all_single", HookOpName::ALLTOALL_BASE},
      {"send", HookOpName::SEND},
      {"recv", HookOpName::RECV},
      {"all_reduce", HookOpName::ALLREDUCE},
      {"reduce", HookOpName::REDUCE},
      {"reduce_scatter", HookOpName::REDUCE_SCATTER},
      {"reduce_scatter_tensor", HookOpName::REDUCE_SCATTER_BASE},
      {"barrier", HookOpName::BARRIER}};
  const auto found = names.find(operation);
  return found == names.end() ? HookOpName::UNKNOWN : found->second;
}

struct Recorders {
  std::mutex mutex;
  std::map<const c10d::ProcessGroup*, std::shared_ptr<c10d::FlightRecorderHook>> by_group;
};

Recorders& recorders() {
  static auto* const instance = new Recorders;  // never destroyed: groups may be static objects
  return *instance;
}

}  // namespace

void attach_flight_recorder(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                            const std::vector<int>& global_ranks) {
  if (!is_wanted() || c10d::recordsFlightRecorderNatively(group->getBackendName())) return;
  std::vector<std::uint64_t> ranks(global_ranks.begin(), global_ranks.end());
  if (ranks.empty()) {
    ranks.resize(static_cast<std::size_t>(group->getSize()));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  auto hook = c10d::FlightRecorderHook::attach(group, std::move(ranks));
  const std::lock_guard lock(recorders().mutex);
  recorders().by_group[group.get()] = std::move(hook);
  any_flight_recorder = true;
}

void detach_flight_recorder(c10d::ProcessGroup& group) noexcept {
  // Declared first, so that it ends without the lock.
  std::shared_ptr<c10d::FlightRecorderHook> ending;
  const std::lock_guard lock(recorders().mutex);
  const auto found = recorders().by_group.find(&group);
  if (found == recorders().by_group.end()) return;
  ending = std::move(found->second);
  recorders().by_group.erase(found);
}

RecordedCall::RecordedCall(c10::intrusive_ptr<c10d::ProcessGroup> group, const char* operation,
                           const Tensors& inputs, const Tensors& outputs)
    : group_(std::move(group)),
      name_(name_of(operation)),
      id_(group_->firePreHook(name_, false, -1, inputs, outputs)) {}

void RecordedCall::issued(const c10::intrusive_ptr<c10d::Work>& work) {
  group_->firePostHook(name_, false, id_, work);
}

}  // namespace paceline::distributed
