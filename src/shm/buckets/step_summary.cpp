#include "shm/buckets/step_summary.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace paceline::shm {
namespace {

// The number of parameters that an error lists; it only counts the others.
constexpr std::size_t kMaxNames = 5;

// Whether the ranks that have not joined differ in a field.
bool differ_in(std::span<const StepSummary> ranks, std::uint32_t StepSummary::*field) {
  const StepSummary* first = nullptr;
  for (const StepSummary& rank : ranks) {
    if (rank.joined != 0) continue;
    if (first == nullptr) first = &rank;
    if (rank.*field != first->*field) return true;
  }
  return false;
}

// "ranks 0-62: 4; rank 63: 5"; the counts of most ranks first.
std::string list_counts(std::span<const std::string> counts, const GlobalRanks& global_ranks) {
  std::map<std::string, RankSet> ranks_by_count;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    ranks_by_count[counts[rank]].insert(static_cast<int>(rank));
  }
  std::vector<std::pair<std::string, RankSet>> sorted(ranks_by_count.begin(), ranks_by_count.end());
  std::ranges::stable_sort(sorted, std::greater{},
                           [](const auto& one) { return one.second.count(); });
  std::vector<std::string> parts;
  for (const auto& [count, ranks] : sorted) {
    if (parts.size() == kMaxListed) {
      parts.push_back("the others: other counts");
      break;
    }
    parts.push_back(fmt::format("{}: {}", global_ranks.describe(ranks), count));
  }
  return fmt::format("{}", fmt::join(parts, "; "));
}

}  // namespace

std::uint32_t fingerprint(FrozenFlags flags) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    if (flags[i] == 0) continue;
    std::uint64_t mixed = (i + 1) * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93u;
    sum += mixed ^ mixed >> 32;
  }
  return static_cast<std::uint32_t>(sum >> 32);
}

Disagreement compare_forwards(std::span<const StepSummary> ranks, const GlobalRanks& global_ranks) {
  const bool agree = !differ_in(ranks, &StepSummary::local_backwards) &&
                     std::ranges::all_of(ranks, [&](const StepSummary& rank) {
                       return rank.forwards == ranks[0].forwards;
                     });
  if (agree) return {};
  std::vector<std::string> counts;
  for (const StepSummary& rank : ranks) {
    counts.push_back(fmt::to_string(rank.forwards));
    if (rank.local_backwards != 0) {
      counts.back() += fmt::format(" and {} under no_sync", rank.local_backwards);
    }
  }
  return {
      explain_disagreement(counts, global_ranks).ranks,
      fmt::format(
          "the ranks have run different numbers of training forwards, or of backwards under "
          "no_sync ({}): some rank ran a step under no_sync, ran a second backward, or ran a "
          "forward whose backward is missing or threw before it reached the model, so gradients "
          "of different batches would be averaged. Run forwards without a backward under "
          "NoGradGuard (torch.no_grad()), under no_sync, in eval mode or on module(), or on "
          "every rank alike. An optimizer that calls a closure as often as the loss decides "
          "(LBFGS) needs the loss averaged over the ranks. With Average::samples, ranks may run "
          "different numbers of backwards under no_sync.",
          list_counts(counts, global_ranks))};
}

bool differ_in_frozen(std::span<const StepSummary> ranks) {
  return differ_in(ranks, &StepSummary::frozen);
}

// A joined rank has older parameters, so ranks compare them only in steps without one.
bool differ_in_modifications(std::span<const StepSummary> ranks) {
  return std::ranges::none_of(ranks, [](const StepSummary& rank) { return rank.joined != 0; }) &&
         differ_in(ranks, &StepSummary::modifications);
}

Disagreement compare_frozen(std::span<const FrozenFlags> flags,
                            std::span<const std::string> parameters,
                            const GlobalRanks& global_ranks) {
  std::vector<std::string> sets;  // of the ranks that count
  std::vector<int> counting;
  for (std::size_t rank = 0; rank < flags.size(); ++rank) {
    if (flags[rank].empty()) continue;
    sets.emplace_back(flags[rank].begin(), flags[rank].end());
    counting.push_back(static_cast<int>(rank));
  }
  std::string names;
  std::size_t count = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    RankSet frozen;
    for (const int rank : counting) {
      if (flags[static_cast<std::size_t>(rank)][i] != 0) frozen.insert(rank);
    }
    const auto times = static_cast<std::size_t>(frozen.count());
    if (times == 0 || times == counting.size()) continue;
    if (++count > kMaxNames) continue;
    names += fmt::format("{}{} {}on {}", count == 1 ? "" : ", ", parameters[i],
                         count == 1 ? "is frozen " : "", global_ranks.describe(frozen));
  }
  if (count == 0) return {};
  if (count > kMaxNames) names += fmt::format(" and {} more", count - kMaxNames);
  Disagreement result;
  for (const int party : explain_disagreement(sets, {}).ranks) {
    result.ranks.insert(counting[static_cast<std::size_t>(party)]);
  }
  result.text = fmt::format(
      "{} of {} parameters are frozen on some ranks and trained on others: {}. The models would "
      "diverge; call requires_grad_ on every rank alike",
      count, parameters.size(), names);
  return result;
}

}  // namespace paceline::shm
