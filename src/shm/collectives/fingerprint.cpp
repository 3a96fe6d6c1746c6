#include "shm/collectives/fingerprint.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace paceline::shm {
namespace {

bool same(const CollectiveFingerprint& a, const CollectiveFingerprint& b) {
  return a.operation == b.operation && a.type == b.type && a.op == b.op && a.uneven == b.uneven &&
         a.root == b.root && a.count == b.count && a.sequence == b.sequence;
}

}  // namespace

std::string describe(const CollectiveFingerprint& call, const GlobalRanks& global_ranks) {
  const OperationTraits operation = traits(call.operation);
  std::string text = operation.name;
  if (!operation.has_data) return text;
  text += call.uneven ? fmt::format(" of uneven parts of {}", name(call.type))
                      : fmt::format(" of {} {}", call.count, name(call.type));
  if (operation.root != RootRole::none) {
    text += fmt::format(" {} rank {}", operation.root == RootRole::source ? "from" : "to",
                        call.across_nodes ? call.root : global_ranks.of(call.root));
  }
  if (operation.reduces && call.op != ReduceOp::sum) {
    text += fmt::format(" with {}", name(call.op));
  }
  return text;
}

bool agree(std::span<const CollectiveFingerprint> calls) {
  return std::all_of(calls.begin() + 1, calls.end(),
                     [&](const CollectiveFingerprint& call) { return same(call, calls[0]); });
}

Disagreement explain_disagreement(std::span<const CollectiveFingerprint> calls,
                                  const GlobalRanks& global_ranks) {
  const bool in_step = std::all_of(
      calls.begin(), calls.end(),
      [&](const CollectiveFingerprint& call) { return call.sequence == calls[0].sequence; });
  std::vector<std::string> made;
  for (const CollectiveFingerprint& call : calls) {
    made.push_back(describe(call, global_ranks));
    if (!in_step) made.back() += fmt::format(" as its call {}", call.sequence);
  }
  return explain_disagreement(made, global_ranks);
}

Disagreement explain_disagreement(std::span<const std::string> calls,
                                  const GlobalRanks& global_ranks) {
  // In the order of the first rank that made each call.
  std::vector<std::pair<std::string, RankSet>> parties;
  for (std::size_t rank = 0; rank < calls.size(); ++rank) {
    auto party = std::find_if(parties.begin(), parties.end(),
                              [&](const auto& one) { return one.first == calls[rank]; });
    if (party == parties.end()) party = parties.emplace(party, calls[rank], RankSet());
    party->second.insert(static_cast<int>(rank));
  }
  Disagreement result;
  RankSet all;
  RankSet largest;
  for (const auto& [made, ranks] : parties) {
    result.text += fmt::format("{}{}{} {}", result.text.empty() ? "" : ", ",
                               describe_ranks(global_ranks.of(ranks)),
                               result.text.empty() ? " called" : "", made);
    all |= ranks;
    if (ranks.count() > largest.count()) largest = ranks;
  }
  const bool majority = 2 * static_cast<std::size_t>(largest.count()) > calls.size();
  result.ranks = majority ? all - largest : all;
  return result;
}

Disagreement compare_splits(std::span<const SplitRow> splits, const GlobalRanks& global_ranks) {
  Disagreement result;
  for (std::size_t from = 0; from < splits.size(); ++from) {
    for (std::size_t to = 0; to < splits.size(); ++to) {
      const std::uint64_t given = splits[from].to[to];
      const std::uint64_t expected = splits[to].from[from];
      if (given == expected) continue;
      // The text describes the first pair; all ranks at fault are named.
      if (result.ranks.empty()) {
        result.text = fmt::format("rank {} gives {} elements to rank {}, which expects {}",
                                  global_ranks.of(static_cast<int>(from)), given,
                                  global_ranks.of(static_cast<int>(to)), expected);
      }
      result.ranks |= RankSet{static_cast<int>(from), static_cast<int>(to)};
    }
  }
  return result;
}

}  // namespace paceline::shm
