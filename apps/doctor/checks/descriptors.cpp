#include <fmt/format.h>

#include "checks/checks.h"
#include "checks/units.h"

namespace paceline::doctor {
namespace {

// For the files and sockets of the program itself, and for further groups.
constexpr int kHeadroom = 100;

std::string number(const std::optional<std::uint64_t>& limit) {
  return limit ? std::to_string(*limit) : "unlimited";
}

}  // namespace

// For each rank, what the supervisor has while it starts the ranks: both ends of two pipes and of a
// pair of sockets, the memory for its error and its pidfd. Beside them standard streams, and a few
// more.
int needed_descriptors(int ranks) {
  return 8 * ranks + 16;
}

Group check_descriptors(const Limits& limits, int ranks) {
  const auto needed = static_cast<std::uint64_t>(needed_descriptors(ranks));
  Check check{
      .name = "limit",
      .text = fmt::format("{} (at most {}); {} need {}", number(limits.descriptors),
                          number(limits.descriptors_hard), plural(ranks, "rank", "ranks"), needed),
      .values = {{"soft", nullptr}, {"hard", nullptr}, {"ranks", ranks}, {"needed", needed}}};
  if (limits.descriptors_hard) check.values["hard"] = *limits.descriptors_hard;
  if (limits.descriptors) {
    check.values["soft"] = *limits.descriptors;
    const std::uint64_t wanted = needed + kHeadroom;
    if (*limits.descriptors < needed) {
      check.status = Status::error;
    } else if (*limits.descriptors < wanted) {
      check.status = Status::warning;
      check.text += ", which leaves few to the program";
    }
    const bool may_raise = !limits.descriptors_hard || *limits.descriptors_hard >= wanted;
    if (check.status != Status::ok) {
      check.advice = may_raise
                         ? fmt::format("raise it: ulimit -n {}", number(limits.descriptors_hard))
                         : "ask the administrator for more (ulimit -Hn)";
    }
  }
  return {"descriptors", {check}};
}

}  // namespace paceline::doctor
