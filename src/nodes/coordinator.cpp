#include "nodes/coordinator.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include <paceline/version.h>

#include "launch/job.h"
#include "launch/report.h"

namespace paceline::nodes {
namespace {

using namespace std::chrono_literals;
using base::Deadline;

constexpr auto kFirstNotice = 10s;
constexpr auto kNextNotice = 60s;
constexpr auto kFlushLimit = 5s;
// Connections that have not proved to be nodes.
constexpr auto kStrangerLimit = 10s;
constexpr std::size_t kMaxStrangers = 64;

template <typename Container>
std::string name_nodes(const Container& numbers) {
  return fmt::format("{} {}", numbers.size() == 1 ? "node" : "nodes", fmt::join(numbers, ", "));
}

}  // namespace

Coordinator::Coordinator(JobRules rules, net::Listener listener, const net::Key& key,
                         base::UniqueFd own)
    : rules_(std::move(rules)),
      listener_(std::move(listener)),
      key_(key),
      join_deadline_(Deadline::after(rules_.join_timeout)),
      next_notice_(Deadline::after(kFirstNotice)),
      flush_deadline_(Deadline::after(0ms)) {
  add_node(std::move(own));
}

void Coordinator::add_to(std::vector<pollfd>& fds) const {
  if (listener_) fds.push_back({listener_->fd(), POLLIN, 0});
  for (const auto& node : nodes_) node->connection.add_to(fds);
}

std::optional<Deadline> Coordinator::deadline() const {
  if (phase_ == Phase::running) return std::nullopt;
  if (phase_ == Phase::over) return flush_deadline_;
  const auto earlier = [](const Deadline& a, const Deadline& b) {
    return a.remaining() < b.remaining() ? a : b;
  };
  const Deadline first = earlier(join_deadline_, next_notice_);
  return last_call_ ? earlier(first, *last_call_) : first;
}

bool Coordinator::finished() const {
  if (phase_ != Phase::over) return false;
  return flush_deadline_.expired() ||
         std::ranges::none_of(nodes_, [](const auto& node) { return node->connection.pending(); });
}

void Coordinator::advance() {
  accept_all();
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    Node& node = *nodes_[i];
    for (const std::string& text : node.connection.receive()) {
      const auto message = decode(text);
      if (message) handle(node, *message);
    }
    if (node.connection.loss()) handle_loss(node);
  }
  std::erase_if(nodes_, [](const auto& node) {
    return node->connection.loss() || (node->leaving && !node->connection.pending());
  });
  drop_strangers();
  if (phase_ == Phase::running) finish_if_all_reported();
  if (phase_ == Phase::gathering) check_gathering();
}

void Coordinator::add_node(base::UniqueFd socket) {
  net::Connection connection(std::move(socket), key_, net::SecureChannel::Side::accepting);
  nodes_.push_back(std::make_unique<Node>(Node{.connection = std::move(connection)}));
}

void Coordinator::accept_all() {
  while (auto socket = listener_ ? listener_->accept() : std::nullopt) {
    add_node(std::move(*socket));
  }
}

// Those that do not say in time who they are, and the oldest if there are too many.
void Coordinator::drop_strangers() {
  const auto is_stranger = [](const auto& node) { return !node->connection.authenticated(); };
  auto strangers = static_cast<std::size_t>(std::ranges::count_if(nodes_, is_stranger));
  const auto oldest = Deadline::Clock::now() - kStrangerLimit;
  std::erase_if(nodes_, [&](const auto& node) {
    if (!is_stranger(node) || node == nodes_.front()) return false;
    const bool drops = strangers > kMaxStrangers || node->connection.began() < oldest;
    if (drops) --strangers;
    return drops;
  });
}

void Coordinator::handle(Node& node, const Message& message) {
  if (node.leaving) return;
  if (const auto* const join = std::get_if<Join>(&message)) {
    if (!node.join) handle_join(node, *join);
  } else if (const auto* const result = std::get_if<Result>(&message)) {
    handle_result(node, *result);
  } else if (const auto* const signal = std::get_if<Signal>(&message)) {
    handle_signal(node, signal->number);
  } else if (std::holds_alternative<Failed>(message) && node.member) {
    stop_others(&node);
  }
}

void Coordinator::handle_join(Node& node, const Join& join) {
  if (const std::string reason = refusal(join); !reason.empty()) {
    node.leaving = true;
    return node.connection.send(encode(Refuse{reason}));
  }
  node.join = join;
  if (phase_ != Phase::running || rules_.numbered) return;
  regrouping_ = true;
  stop_others(nullptr);
}

// Why the node may not take part; empty if it may.
std::string Coordinator::refusal(const Join& join) const {
  if (join.version != kVersion) {
    return fmt::format("Paceline {} here and {} on node 0: install the same version on all nodes",
                       join.version, kVersion);
  }
  if (join.job != rules_.job) {
    return fmt::format("the job '{}' meets there, and not '{}' (--rdzv-id)", rules_.job, join.job);
  }
  if (join.processes < 1 || join.processes > launch::kMaxProcesses) return "invalid request";
  std::size_t present = 0;
  for (const auto& other : nodes_) {
    if (!other->join || other->leaving) continue;
    ++present;
    if (!rules_.numbered || other->join->node != join.node) continue;
    return fmt::format("node {} is taken by {}: give each node its own --node-rank",
                       join.node.value_or(0), other->join->host);
  }
  if (rules_.numbered && (!join.node || *join.node < 0 || *join.node >= rules_.max_nodes)) {
    return fmt::format("--node-rank {}, but the job has {} nodes, numbered from 0",
                       join.node ? std::to_string(*join.node) : "is missing", rules_.max_nodes);
  }
  if (present < static_cast<std::size_t>(rules_.max_nodes)) return "";
  return fmt::format("the job has its {} nodes already", rules_.max_nodes);
}

void Coordinator::handle_loss(Node& node) {
  if (!node.member || phase_ != Phase::running) return;
  Member& member = members_[static_cast<std::size_t>(*node.member)];
  if (member.result) return;  // its processes have ended
  member.problem = "was lost: " + node.connection.loss()->why;
  member.lost = node.connection.loss()->since;
  stop_others(&node);
}

void Coordinator::handle_result(Node& node, const Result& result) {
  if (!node.member || phase_ != Phase::running) return;
  Member& member = members_[static_cast<std::size_t>(*node.member)];
  const bool fits = result.ranks.size() == static_cast<std::size_t>(member.join.processes);
  member.result = result;
  if (fits) return;
  member.problem =
      result.problem.empty() ? "reported something else than its processes" : result.problem;
  member.lost = started_;
  stop_others(&node);
}

void Coordinator::handle_signal(const Node& from, int signal) {
  const bool is_own = &from == nodes_.front().get();
  if (!from.join || (phase_ == Phase::gathering && !is_own)) return;
  if (signal_ == 0) signal_ = signal;
  if (phase_ == Phase::running) return send_to_all(Signal{signal}, &from);
  launch::JobResult result;
  result.signal = signal;
  give({.exit_code = result.exit_code(), .report = launch::failure_report(result)});
}

void Coordinator::stop_others(const Node* from) {
  if (phase_ != Phase::running || std::exchange(stopping_, true)) return;
  send_to_all(Failed{}, from);
}

void Coordinator::gather() {
  phase_ = Phase::gathering;
  members_.clear();
  for (const auto& node : nodes_) node->member.reset();
  port_.reset();
  last_call_.reset();
  join_deadline_ = Deadline::after(rules_.join_timeout);
  next_notice_ = Deadline::after(kFirstNotice);
}

void Coordinator::check_gathering() {
  const auto present =
      std::ranges::count_if(nodes_, [](const auto& n) { return n->join.has_value(); });
  if (present >= rules_.min_nodes && !last_call_) last_call_ = Deadline::after(rules_.last_call);
  if (present < rules_.min_nodes) last_call_.reset();
  if (present == rules_.max_nodes || (last_call_ && last_call_->expired() && !rules_.numbered)) {
    return start();
  }
  if (last_call_) return;
  if (join_deadline_.expired()) {
    return give({.exit_code = 1,
                 .report = fmt::format("paceline: {} within {} s\n", missing(),
                                       rules_.join_timeout.count() / 1000.0)});
  }
  if (!next_notice_.expired()) return;
  next_notice_ = Deadline::after(kNextNotice);
  send_to_all(Notice{fmt::format("paceline: {} yet; waiting\n", missing())});
}

// "only 1 of 2 nodes has come (host-a), not node 1"
std::string Coordinator::missing() const {
  std::vector<std::string> hosts;
  std::vector<int> absent;
  for (int number = 0; number < rules_.max_nodes; ++number) absent.push_back(number);
  for (const auto& node : nodes_) {
    if (!node->join) continue;
    hosts.push_back(node->join->host);
    std::erase(absent, node->join->node.value_or(-1));
  }
  return fmt::format("only {} of {} nodes {} come ({}){}", hosts.size(), rules_.min_nodes,
                     hosts.size() == 1 ? "has" : "have", fmt::join(hosts, ", "),
                     rules_.numbered ? ", not " + name_nodes(absent) : "");
}

void Coordinator::start() {
  std::vector<Node*> order;
  for (const auto& node : nodes_) {
    if (node->join) order.push_back(node.get());
  }
  if (rules_.numbered) {
    std::ranges::sort(order, {}, [](const Node* node) { return node->join->node; });
  }
  int ranks = 0;
  for (Node* const node : order) {
    node->member = static_cast<int>(members_.size());
    members_.push_back({.join = *node->join, .first_rank = ranks});
    ranks += node->join->processes;
  }
  port_.emplace(listener_->address());
  for (Node* const node : order) {
    node->connection.send(
        encode(Start{.restart = restart_,
                     .nodes = static_cast<int>(order.size()),
                     .node = *node->member,
                     .first_rank = members_[static_cast<std::size_t>(*node->member)].first_rank,
                     .world_size = ranks,
                     .job = rules_.job,
                     .master_addr = rules_.master_addr,
                     .master_port = port_->port()}));
  }
  started_ = Deadline::Clock::now();
  phase_ = Phase::running;
  stopping_ = regrouping_ = false;
}

void Coordinator::finish_if_all_reported() {
  const bool all = std::ranges::all_of(
      members_, [](const Member& member) { return member.result || !member.problem.empty(); });
  if (!all) return;
  const launch::JobResult result = collect();
  Verdict verdict{.exit_code = result.exit_code(), .report = launch::failure_report(result)};
  const bool is_failure = result.first_failed().has_value();
  const bool stopped = std::ranges::any_of(result.ranks, &launch::RankResult::stopped);
  const bool cannot_start = std::ranges::any_of(
      members_, [](const Member& member) { return member.result && !member.problem.empty(); });
  if (signal_ != 0 || cannot_start || (!is_failure && !(regrouping_ && stopped)))
    return give(verdict);
  if (is_failure && restart_ == rules_.max_restarts) return give(verdict);
  verdict.restarts = true;
  if (is_failure) {
    ++restart_;
    verdict.report += fmt::format("paceline: starts all processes again, restart {} of {}\n",
                                  restart_, rules_.max_restarts);
  } else {
    verdict.report += "paceline: starts all processes again, as a node has come\n";
  }
  send_to_all(verdict);
  gather();
}

launch::JobResult Coordinator::collect() const {
  launch::JobResult result{.ranks = {}, .signal = signal_, .nodes = {}};
  for (const Member& member : members_) {
    result.nodes.push_back(
        {member.join.host, member.first_rank, member.join.processes, member.problem});
    if (member.problem.empty()) {
      const auto& ranks = member.result->ranks;
      result.ranks.insert(result.ranks.end(), ranks.begin(), ranks.end());
    } else {
      launch::RankResult lost;
      lost.ended = member.lost - started_;
      lost.lost = true;
      result.ranks.insert(result.ranks.end(), static_cast<std::size_t>(member.join.processes),
                          lost);
    }
  }
  return result;
}

void Coordinator::give(const Verdict& verdict) {
  phase_ = Phase::over;
  flush_deadline_ = Deadline::after(kFlushLimit);
  send_to_all(verdict);
  listener_.reset();
  port_.reset();
}

void Coordinator::send_to_all(const Message& message, const Node* except) {
  const std::string text = encode(message);
  for (const auto& node : nodes_) {
    if (node->join && !node->leaving && node.get() != except) node->connection.send(text);
  }
}

}  // namespace paceline::nodes
