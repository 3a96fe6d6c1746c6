#include "launch/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "base/errno_error.h"
#include "base/printable.h"
#include "launch/clip.h"
#include "launch/signal_names.h"
#include "launch/tail_buffer.h"

namespace paceline::launch {
namespace {

using base::printable;

constexpr std::size_t kMaxMessage = 4000;
constexpr std::size_t kMaxSummary = 300;

// Each line of `text` after the first moved below the first's start.
std::string indent(std::string_view text, std::string_view space) {
  std::string result;
  for (const char c : text) {
    result += c;
    if (c == '\n') result += space;
  }
  return result;
}

// Without the empty lines before it.
std::string_view first_line(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of("\r\n "), text.size()));
  return text.substr(0, text.find('\n'));
}

std::string_view without_trailing_newlines(std::string_view text) {
  return text.substr(0, text.find_last_not_of("\r\n ") + 1);
}

// Ended by one of the signals that the launcher sends, rather than by itself after one.
bool was_stopped(const RankResult& rank) {
  if (!rank.stopped || !WIFSIGNALED(rank.status)) return false;
  const int signal = WTERMSIG(rank.status);
  return signal == SIGTERM || signal == SIGKILL || signal == SIGINT || signal == SIGHUP;
}

// "node 1 (host)", or "host" of the only node; empty if that is not to be named.
std::string name_node(const JobResult& result, int rank) {
  const auto node = result.node_of(rank);
  if (!node) return printable(result.host);
  return fmt::format("node {} ({})", *node,
                     printable(result.nodes[static_cast<std::size_t>(*node)].host));
}

std::string describe_other(const JobResult& result, int number, int first_number) {
  const RankResult& rank = result.ranks[static_cast<std::size_t>(number)];
  const RankResult& first = result.ranks[static_cast<std::size_t>(first_number)];
  const auto node = result.node_of(number);
  const bool node_is_lost = node && !result.nodes[static_cast<std::size_t>(*node)].problem.empty();
  if (rank.lost || (rank.tolerated && node_is_lost)) {
    return "lost with " + name_node(result, number);
  }
  std::string text;
  if (was_stopped(rank)) {
    text = fmt::format("stopped by {}", signal_name(WTERMSIG(rank.status)));
  } else {
    text = describe_end(rank.status);
    if (rank.stopped) text += " when asked to stop";
  }
  if (rank.error) {
    const bool same = first.error && rank.error->message == first.error->message;
    text += same
                ? ": the same error"
                : ": " + clip(printable(first_line(without_trailing_newlines(rank.error->message))),
                              kMaxSummary);
  }
  return text;
}

// Whether the last lines are only the error, which is reported anyway; `record` writes it like
// this, and a long line is clipped.
bool repeats_error(const RankResult& rank) {
  if (!rank.error || rank.last_lines.size() != 1) return false;
  const std::string line = "paceline error: " + rank.error->message;
  return rank.last_lines.front() == clip(line, TailBuffer::kMaxBytes);
}

// In the order in which they ended; ranks that follow each other with the same end share a line.
std::string describe_others(const JobResult& result, int first) {
  std::vector<int> ranks(result.ranks.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto at = [&](int rank) -> const RankResult& {
    return result.ranks[static_cast<std::size_t>(rank)];
  };
  std::sort(ranks.begin(), ranks.end(), [&](int a, int b) { return at(a).ended < at(b).ended; });

  std::vector<std::pair<std::vector<int>, std::string>> groups;
  for (const int rank : ranks) {
    if (rank == first) continue;
    std::string end = describe_other(result, rank, first);
    if (groups.empty() || groups.back().second != end)
      groups.emplace_back(std::vector<int>(), std::move(end));
    groups.back().first.push_back(rank);
  }
  // Those of a lost node that is the first have its end.
  if (at(first).lost) {
    std::erase_if(groups, [&](const auto& group) {
      return at(group.first.front()).lost &&
             result.node_of(group.first.front()) == result.node_of(first);
    });
  }
  std::string text;
  for (auto& [members, end] : groups) {
    std::sort(members.begin(), members.end());
    text += fmt::format("  {} {}: {}\n", members.size() == 1 ? "rank" : "ranks",
                        fmt::join(members, ", "), end);
  }
  return text;
}

}  // namespace

std::string name_ranks(int first, int count) {
  if (count == 1) return fmt::format("rank {}", first);
  return fmt::format("ranks {} to {}", first, first + count - 1);
}

std::string describe_end(int status) {
  if (!WIFSIGNALED(status)) return fmt::format("exited with code {}", WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  const auto meaning = signal_meaning(signal);
  return fmt::format("killed by {}{}", signal_name(signal),
                     meaning.empty() ? "" : fmt::format(" ({})", meaning));
}

namespace {

// The line that says what ended the job.
std::string describe_first(const JobResult& result, int first) {
  const RankResult& rank = result.ranks[static_cast<std::size_t>(first)];
  const auto node = result.node_of(first);
  if (rank.lost && node) {
    const NodeResult& lost = result.nodes[static_cast<std::size_t>(*node)];
    return fmt::format("{}, {}: {}\n", name_node(result, first),
                       name_ranks(lost.first_rank, lost.processes), printable(lost.problem));
  }
  const std::string place = name_node(result, first);
  const std::string name =
      place.empty() ? fmt::format("rank {}", first) : fmt::format("rank {} on {}", first, place);
  if (!rank.lost && !is_failure(rank.status)) {
    return fmt::format("{} ended early: {} while other ranks needed it\n", name,
                       describe_end(rank.status));
  }
  return fmt::format("{}{} {}\n", name, result.ranks.size() > 1 ? " failed first:" : "",
                     describe_end(rank.status));
}

std::string describe_error(const RankResult& rank) {
  if (!rank.error) return "";
  const auto message = clip(printable(without_trailing_newlines(rank.error->message)), kMaxMessage);
  return fmt::format("  error: {}\n", indent(message, "         "));
}

}  // namespace

std::string describe_failure(const JobResult& result, int first) {
  const RankResult& rank = result.ranks[static_cast<std::size_t>(first)];
  std::string text = describe_first(result, first) + describe_error(rank);
  if (!rank.last_lines.empty() && !repeats_error(rank)) {
    text += fmt::format("  last lines of rank {}:\n", first);
    for (const std::string& line : rank.last_lines) text += fmt::format("    | {}\n", line);
  }
  return text + describe_others(result, first);
}

std::string describe_loss(int rank, const RankResult& end, int replacement, int most, int error) {
  if (error != 0) {
    const std::string what = fmt::format("paceline: rank {} cannot be started again", rank);
    return base::errno_error(what, error).what() + std::string("\n");
  }
  const std::string outcome =
      replacement > 0 ? fmt::format("started again, replacement {} of {}", replacement, most)
                      : "the others go on without it";
  const std::string what =
      end.late_for
          ? fmt::format("was killed, since rank {} timed out waiting for it", *end.late_for)
          : describe_end(end.status);
  return fmt::format("paceline: rank {} {}; {}\n{}", rank, what, outcome, describe_error(end));
}

namespace {

// One line; empty if no rank was lost.
std::string describe_tolerated(const JobResult& result) {
  std::vector<std::size_t> lost;
  for (std::size_t rank = 0; rank < result.ranks.size(); ++rank) {
    if (result.ranks[rank].tolerated) lost.push_back(rank);
  }
  if (lost.empty()) return "";
  std::string text = fmt::format("paceline: ended without {} of {} ranks, which failed: {}\n",
                                 lost.size(), result.ranks.size(), fmt::join(lost, ", "));
  // On one node each loss was reported here when it happened.
  for (const std::size_t rank : lost) {
    if (result.nodes.empty()) break;
    const int number = static_cast<int>(rank);
    const std::string& problem =
        result.nodes[static_cast<std::size_t>(*result.node_of(number))].problem;
    text +=
        fmt::format("  rank {} on {}: {}\n", rank, name_node(result, number),
                    problem.empty() ? describe_end(result.ranks[rank].status) : printable(problem));
  }
  return text;
}

}  // namespace

std::string failure_report(const JobResult& result) {
  const auto first = result.first_failed();
  if (first) return "paceline: " + describe_failure(result, *first);
  if (result.preempted()) {
    return fmt::format(
        "paceline: preempted: the processes have ended with code {}, to go on when "
        "they are started again\n",
        kPreemptedCode);
  }
  if (result.signal != 0) {
    return fmt::format("paceline: stopped by {}\n", signal_name(result.signal));
  }
  return describe_tolerated(result);
}

}  // namespace paceline::launch
