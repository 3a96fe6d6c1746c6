#include "shm/collectives/staging.h"

namespace paceline::shm {

Group::Staging::Staging(Group& group, std::span<const Input> parts)
    : group_(group), parts_(parts), common_(traits(group.call_.operation).common_part) {
  const std::size_t sections = common_ ? 1 : group.calls_.size();
  section_ = group.region_->memory().buffer_bytes() / sections / kCacheLine * kCacheLine;
  for (std::size_t to = 0; to < parts.size(); ++to) {
    if (!common_ && static_cast<int>(to) == group.rank()) continue;
    largest_ = std::max(largest_, parts[to].count * group.element());
  }
}

void Group::Staging::put(std::size_t chunk) const {
  std::byte* const buffer = group_.next_staging();
  for (std::size_t to = 0; to < parts_.size(); ++to) {
    if (!common_ && static_cast<int>(to) == group_.rank()) continue;
    const Input& part = parts_[to];
    copy_bytes(buffer + to * section_, advance(part.data, begin_of(chunk)),
               size_of(chunk, part.count * group_.element()));
  }
}

}  // namespace paceline::shm
