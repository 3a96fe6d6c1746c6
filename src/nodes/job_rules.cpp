#include "nodes/job_rules.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include <paceline/version.h>

#include "launch/clip.h"

namespace paceline::nodes {
namespace {

std::string describe_nnodes(int min, int max) {
  return min == max ? std::to_string(min) : fmt::format("{}:{}", min, max);
}

std::string refuse_number(const JobRules& rules, const Join& join, const Joins& present) {
  if (!join.node) return "--rdzv-backend c10d here and static on node 0";
  if (*join.node >= rules.max_nodes) {
    return fmt::format("--node-rank {}, but the job has {} nodes, numbered from 0", *join.node,
                       rules.max_nodes);
  }
  for (const Join* const other : present) {
    if (other->node != join.node) continue;
    return fmt::format("node {} is taken by {}: give each node its own --node-rank", *join.node,
                       other->host);
  }
  return "";
}

}  // namespace

std::string refusal(const JobRules& rules, const Join& join, const Joins& present) {
  if (join.version != kVersion) {
    return fmt::format("Paceline {} here and {} on node 0: install the same version on all nodes",
                       clean(join.version), kVersion);
  }
  if (join.job != rules.job) {
    return fmt::format("the job '{}' meets there, and not '{}' (--rdzv-id)", rules.job,
                       clean(join.job));
  }
  if (join.min_nodes != rules.min_nodes || join.max_nodes != rules.max_nodes) {
    return fmt::format("--nnodes {} here and {} on node 0",
                       describe_nnodes(join.min_nodes, join.max_nodes),
                       describe_nnodes(rules.min_nodes, rules.max_nodes));
  }
  if (join.max_restarts.value_or(rules.max_restarts) != rules.max_restarts) {
    return fmt::format(
        "--max-restarts (or PET_MAX_RESTARTS) is {} here and {} on node 0, which decides: give it "
        "to both alike, or only there",
        *join.max_restarts, rules.max_restarts);
  }
  if (join.tolerate_loss && !rules.tolerate_loss) {
    return "--tolerate-loss here and not on node 0, which decides: give it to both, or only there";
  }
  if (rules.numbered) return refuse_number(rules, join, present);
  // One too many waits until another is lost.
  return join.node ? "--rdzv-backend static here and c10d on node 0" : "";
}

std::string describe_missing(const JobRules& rules, const Joins& present) {
  std::vector<std::string> hosts;
  std::vector<int> absent;
  for (int number = 0; number < rules.max_nodes; ++number) absent.push_back(number);
  for (const Join* const join : present) {
    hosts.push_back(join->host);
    std::erase(absent, join->node.value_or(-1));
  }
  const std::string numbers =
      fmt::format(", not {} {}", absent.size() == 1 ? "node" : "nodes", fmt::join(absent, ", "));
  return fmt::format("only {} of {} nodes {} come ({}){}", hosts.size(), rules.min_nodes,
                     hosts.size() == 1 ? "has" : "have", fmt::join(hosts, ", "),
                     rules.numbered ? numbers : "");
}

std::string clean(std::string_view name) {
  std::string result = launch::clip(name, 255);
  for (char& c : result) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  }
  return result;
}

}  // namespace paceline::nodes
