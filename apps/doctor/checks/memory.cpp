#include <fmt/format.h>

#include <algorithm>

#include "checks/checks.h"
#include "checks/units.h"

namespace paceline::doctor {
namespace {

// What a rank with LibTorch uses before it has a model.
constexpr std::uint64_t kRank = std::uint64_t{128} << 20;

std::uint64_t usable(const MemoryFacts& facts) {
  if (!facts.limit) return facts.available;
  const std::uint64_t left = *facts.limit - std::min(*facts.limit, facts.used_of_limit);
  return std::min(facts.available, left);
}

Check check_free(const MemoryFacts& facts, int ranks) {
  const std::uint64_t free = usable(facts);
  const std::string swap = facts.swap_total == 0
                               ? "no swap"
                               : fmt::format("{} of {} swap free", size_text(facts.swap_free),
                                             size_text(facts.swap_total));
  Check check{.name = "free",
              .text = fmt::format("{} of {} available, {}", size_text(facts.available),
                                  size_text(facts.total), swap),
              .values = {{"total_bytes", facts.total},
                         {"available_bytes", facts.available},
                         {"swap_total_bytes", facts.swap_total},
                         {"swap_free_bytes", facts.swap_free}}};
  if (facts.total == 0) {
    check.status = Status::note;
    check.text = "not known: /proc/meminfo cannot be read";
  } else if (free < kRank * static_cast<std::uint64_t>(ranks)) {
    check.status = Status::warning;
    check.text = fmt::format("{} can be used, but {} need {} before they have a model",
                             size_text(free), plural(ranks, "rank", "ranks"),
                             size_text(kRank * static_cast<std::uint64_t>(ranks)));
    check.advice = "free memory, raise the limit, or start fewer ranks";
  }
  return check;
}

Check check_control_group(const MemoryFacts& facts) {
  return {
      .name = "control_group",
      .status = Status::note,
      .text = fmt::format("{} of at most {} used; beyond that the kernel kills a rank (SIGKILL)",
                          size_text(facts.used_of_limit), size_text(*facts.limit)),
      .values = {{"limit_bytes", *facts.limit}, {"used_bytes", facts.used_of_limit}}};
}

nlohmann::ordered_json value_of(const std::optional<std::uint64_t>& limit) {
  return limit ? nlohmann::ordered_json(*limit) : nlohmann::ordered_json(nullptr);
}

// Shared memory is mapped whole, and uses memory only where it is touched. It is never locked, so
// RLIMIT_MEMLOCK does not matter to it.
Check check_shared_memory(const MemoryFacts& facts, const Limits& limits) {
  const std::uint64_t space = facts.region + facts.mapped;
  Check check{.name = "shared_memory",
              .text = fmt::format("a group maps {} of address space, which no limit prevents",
                                  size_text(facts.region)),
              .values = {{"region_bytes", facts.region},
                         {"needed_address_space_bytes", space},
                         {"address_space_limit_bytes", value_of(limits.address_space)},
                         {"file_size_limit_bytes", value_of(limits.file_size)},
                         {"locked_memory_limit_bytes", value_of(limits.locked_memory)}}};
  const auto refuse = [&](const char* limit, const char* option, std::uint64_t value,
                          std::uint64_t needed) {
    check.status = Status::error;
    check.text = fmt::format("{} is {}, but a rank needs {}: the backend paceline cannot start",
                             limit, size_text(value), size_text(needed));
    check.advice = fmt::format("raise it: ulimit {} unlimited", option);
  };
  if (limits.address_space && *limits.address_space < space) {
    refuse("RLIMIT_AS", "-v", *limits.address_space, space);
  } else if (limits.file_size && *limits.file_size < facts.region) {
    refuse("RLIMIT_FSIZE", "-f", *limits.file_size, facts.region);
  }
  return check;
}

}  // namespace

Group check_memory(const MemoryFacts& facts, const Limits& limits, int ranks) {
  Group group{"memory", {check_free(facts, ranks)}};
  if (facts.limit) group.checks.push_back(check_control_group(facts));
  group.checks.push_back(check_shared_memory(facts, limits));
  return group;
}

}  // namespace paceline::doctor
