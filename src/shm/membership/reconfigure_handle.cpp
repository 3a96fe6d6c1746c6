#include "shm/membership/reconfigure_handle.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>

#include <paceline/error.h>

#include "base/parse.h"

namespace paceline::shm {
namespace {

constexpr std::string_view kBackend = "paceline";
constexpr std::size_t kLongest = 1024;

// The text as it may stand in a message.
std::string quoted(std::string_view text) {
  constexpr std::size_t kShown = 100;
  std::string shown;
  for (const char character : text.substr(0, kShown)) {
    shown += character >= ' ' && character <= '~' ? character : '?';
  }
  return fmt::format("'{}'{}", shown, text.size() > kShown ? "..." : "");
}

}  // namespace

std::string ReconfigureHandle::encode() const {
  return fmt::format("{},{},{},{},{},{}", kBackend, rank, endpoint.pid, endpoint.pids,
                     endpoint.machine, endpoint.socket);
}

ReconfigureHandle ReconfigureHandle::decode(std::string_view text) {
  const auto parts = base::split_at_commas(text.substr(0, kLongest));
  if (parts.size() == 6 && parts[0] == kBackend && text.size() <= kLongest) {
    const auto rank = base::parse_number(parts[1], 0, std::numeric_limits<int>::max());
    const auto pid = base::parse_number<pid_t>(parts[2], 1, std::numeric_limits<pid_t>::max());
    if (rank && pid && std::ranges::none_of(parts, &std::string_view::empty)) {
      return {*rank, {*pid, std::string(parts[3]), std::string(parts[4]), std::string(parts[5])}};
    }
  }
  throw UsageError(fmt::format(
      "{} is not a handle of the backend paceline: pass what get_reconfigure_handle gave each rank",
      quoted(text)));
}

}  // namespace paceline::shm
