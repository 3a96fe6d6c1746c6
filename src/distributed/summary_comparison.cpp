#include "distributed/summary_comparison.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include <paceline/error.h>

#include "distributed/process_state.h"
#include "distributed/reported_wait.h"
#include "distributed/translate.h"

namespace paceline::distributed {

SummaryComparison::SummaryComparison(ProcessGroup group, c10::intrusive_ptr<c10d::Backend> backend,
                                     at::Device device, std::vector<std::string> parameters)
    : group_(std::move(group)),
      backend_(std::move(backend)),
      device_(device),
      parameters_(std::move(parameters)) {}

void SummaryComparison::compare(std::span<const shm::StepSummary> all, shm::FrozenFlags frozen,
                                std::uint32_t step) {
  modifications_differ_ = shm::differ_in_modifications(all);
  if (std::ranges::all_of(all, [&](const auto& one) { return one == all[0]; })) return;
  std::vector<int> members;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    members.push_back(global_rank_of(group_, static_cast<int>(rank)));
  }
  const shm::GlobalRanks global_ranks(members);
  shm::Disagreement found = shm::compare_forwards(all, global_ranks);
  if (found.ranks.empty() && shm::differ_in_frozen(all)) {
    found = compare_frozen(all, frozen, global_ranks);
  }
  if (found.ranks.empty()) return;
  throw Mismatch(fmt::format("in step {} {}", step, found.text),
                 global_ranks.of(found.ranks).list(), "backward", step);
}

shm::Disagreement SummaryComparison::compare_frozen(std::span<const shm::StepSummary> all,
                                                    shm::FrozenFlags frozen,
                                                    const shm::GlobalRanks& global_ranks) const {
  const auto count = static_cast<std::int64_t>(parameters_.size());
  const auto options = at::device(device_).dtype(at::kByte);
  std::vector<at::Tensor> own{at::empty({count}, at::kByte)};
  std::ranges::copy(frozen, own[0].data_ptr<std::uint8_t>());
  own[0] = own[0].to(options);
  std::vector<std::vector<at::Tensor>> flags(1);
  while (flags[0].size() < all.size()) flags[0].push_back(at::empty({count}, options));
  translate("backward", [&] { wait_and_report(*backend_->allgather(flags, own), group_); });
  std::vector<shm::FrozenFlags> by_rank;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    flags[0][rank] = flags[0][rank].cpu();
    by_rank.emplace_back(flags[0][rank].data_ptr<std::uint8_t>(),
                         all[rank].joined != 0 ? 0 : parameters_.size());
  }
  return shm::compare_frozen(by_rank, parameters_, global_ranks);
}

}  // namespace paceline::distributed
