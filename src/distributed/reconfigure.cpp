#include <fmt/format.h>

#include <mutex>

#include <paceline/reconfigure.h>

#include "distributed/process_state.h"
#include "distributed/translate.h"

namespace paceline {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

GroupPtr reconfigurable(const ProcessGroup& group, const char* operation) {
  if (supports_reconfigure(group)) return group.c10d();
  throw UsageError(
      fmt::format("{}: the ranks of group {} cannot change; those of a world with "
                  "InitOptions::enable_reconfigure "
                  "can",
                  operation, group.c10d()->getGroupName()));
}

}  // namespace

bool supports_reconfigure(const ProcessGroup& group) {
  return distributed::translate("supports_reconfigure", [&] {
    return group.c10d()->getDefaultBackend()->supportsReconfigure();
  });
}

std::string get_reconfigure_handle(const ProcessGroup& group) {
  const auto target = reconfigurable(group, "get_reconfigure_handle");
  return distributed::translate("get_reconfigure_handle",
                                [&] { return target->get_reconfigure_handle(); });
}

void reconfigure(std::int64_t uuid, const std::vector<std::string>& handles,
                 const ProcessGroup& group, std::optional<std::chrono::milliseconds> timeout) {
  const auto target = reconfigurable(group, "reconfigure");
  c10d::ReconfigureOptions options;
  options.uuid = uuid;
  options.handles = handles;
  options.timeout = timeout;
  distributed::translate("reconfigure", [&] { target->reconfigure(options)->wait(); });
  auto& state = distributed::ProcessState::instance();
  const std::lock_guard lock(state.mutex);
  if (!state.world || state.world->group != target) return;
  state.world->topology = std::make_shared<const distributed::Topology>(
      distributed::Topology::one_node(target->getSize()));
}

}  // namespace paceline
