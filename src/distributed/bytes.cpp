#include <ATen/ATen.h>

#include <paceline/collectives.h>

#include <cstring>

#include "distributed/process_state.h"

namespace paceline {

std::string broadcast_bytes(std::string_view bytes, const BroadcastOptions& options) {
  if (!options.group.is_member()) return {};
  const bool root =
      get_rank(options.group) == distributed::group_rank_of(options.group, options.src);
  const auto size = at::tensor({static_cast<std::int64_t>(root ? bytes.size() : 0)}, at::kLong);
  broadcast(size, options);
  const auto data = at::empty({size.item<std::int64_t>()}, at::kByte);
  if (root && !bytes.empty()) std::memcpy(data.data_ptr(), bytes.data(), bytes.size());
  broadcast(data, options);
  return {static_cast<const char*>(data.data_ptr()), static_cast<std::size_t>(data.numel())};
}

std::vector<std::string> all_gather_bytes(std::string_view bytes, const AllGatherOptions& options) {
  if (!options.group.is_member()) return {};
  const std::int64_t ranks = get_world_size(options.group);
  const auto sizes = at::empty({ranks}, at::kLong);
  all_gather_into_tensor(sizes, at::tensor({static_cast<std::int64_t>(bytes.size())}, at::kLong),
                         options);
  const auto longest = sizes.max().item<std::int64_t>();
  const auto mine = at::zeros({longest}, at::kByte);
  if (!bytes.empty()) std::memcpy(mine.data_ptr(), bytes.data(), bytes.size());
  const auto all = at::empty({ranks, longest}, at::kByte);
  all_gather_into_tensor(all, mine, options);

  std::vector<std::string> result;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const auto* const row = static_cast<const char*>(all.data_ptr()) + rank * longest;
    result.emplace_back(row, static_cast<std::size_t>(sizes[rank].item<std::int64_t>()));
  }
  return result;
}

}  // namespace paceline
