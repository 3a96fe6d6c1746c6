#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "nodes/messages.h"

namespace paceline::nodes {

// What a job on several nodes needs, and where its processes meet.
struct JobRules {
  int min_nodes = 1;  // also to go on after a node was lost
  int max_nodes = 1;
  bool numbered = false;  // each node says which number it has; min_nodes = max_nodes
  std::string job;
  int max_restarts = 0;
  bool tolerate_loss = false;  // the job goes on without a node that is lost, unless it is node 0
  std::chrono::milliseconds join_timeout = std::chrono::minutes(10);
  // How long the job waits for more nodes once min_nodes are there.
  std::chrono::milliseconds last_call = std::chrono::seconds(30);
  // How long a launcher may not answer once the job is to end. It then counts as lost.
  std::chrono::milliseconds answer_limit = std::chrono::seconds(30);
  std::string master_addr{};  // of the coordinator's machine, where rank 0 will be
  std::string endpoint{};     // where launchers find the coordinator, for messages
};

using Joins = std::vector<const Join*>;

// Why a node may not take part in the job beside `present`; empty if it may.
std::string refusal(const JobRules& rules, const Join& join, const Joins& present);

// "only 1 of 2 nodes has come (host-a), not node 1"
std::string describe_missing(const JobRules& rules, const Joins& present);

// A name that another machine has sent, for messages.
std::string clean(std::string_view name);

}  // namespace paceline::nodes
