#include "distributed/backend.h"

#include <fmt/format.h>

#include <paceline/error.h>

#include <map>
#include <thread>

#include "base/deadline.h"

namespace paceline::distributed {
namespace {

std::map<std::string, BackendKind>& registry() {
  static std::map<std::string, BackendKind> kinds;
  return kinds;
}

}  // namespace

void check_peers(c10d::ProcessGroup& group, const std::vector<int>& needed, const char* operation) {
  const auto backend = group.getDefaultBackend();
  if (auto* const ours = dynamic_cast<ExtendedBackend*>(backend.get())) {
    ours->check_peers(needed, {operation, 0});
  }
}

void abort_because(c10d::ProcessGroup& group, const std::string& text) noexcept {
  try {
    const auto backend = group.getDefaultBackend();
    if (auto* const ours = dynamic_cast<ExtendedBackend*>(backend.get())) ours->abort_because(text);
  } catch (const std::exception&) {
    // The group has ended.
  }
}

void await_loss(c10d::ProcessGroup& group, const std::vector<int>& needed) {
  const auto backend = group.getDefaultBackend();
  auto* const ours = dynamic_cast<ExtendedBackend*>(backend.get());
  const auto deadline = base::Deadline::after(shm::kVerdict);
  while (ours != nullptr && !deadline.expired()) {
    ours->check_peers(needed, {"new_group", 0});
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool register_backend(const std::string& name, BackendKind kind) {
  return registry().emplace(name, std::move(kind)).second;
}

bool is_backend_available(const std::string& name) {
  return registry().contains(name);
}

const BackendKind& find_backend(const std::string& name) {
  const auto found = registry().find(name);
  if (found != registry().end()) return found->second;
  std::string names;
  for (const auto& [known, kind] : registry()) {
    if (!kind.is_internal) names += (names.empty() ? "" : ", ") + known;
  }
  throw UsageError(
      fmt::format("backend '{}' is not in this build of Paceline, which has: {}", name, names));
}

const BackendKind* find_backend(const std::string& name, bool several_nodes) {
  const BackendKind& kind = find_backend(name);
  if (!several_nodes || !kind.one_node) return &kind;
  return is_backend_available(kind.across_nodes) ? &find_backend(kind.across_nodes) : nullptr;
}

}  // namespace paceline::distributed
