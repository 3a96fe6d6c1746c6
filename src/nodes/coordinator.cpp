#include "nodes/coordinator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <string>
#include <utility>

#include "launch/report.h"
#include "launch/signal_names.h"

namespace paceline::nodes {
namespace {

using namespace std::chrono_literals;
using base::Deadline;

constexpr auto kFirstNotice = 10s;
constexpr auto kNextNotice = 60s;
// Connections that have not proved to be nodes.
constexpr auto kStrangerLimit = 10s;
constexpr int kMaxStrangers = 64;
constexpr auto kAcceptPause = 1s;

}  // namespace

Coordinator::Coordinator(JobRules rules, net::Listener listener, const net::Key& key,
                         base::UniqueFd own)
    : rules_(std::move(rules)),
      listener_(std::move(listener)),
      key_(key),
      own_(&add_node(std::move(own))),
      join_deadline_(Deadline::after(rules_.join_timeout)),
      next_ping_(Deadline::after(0ms)),
      next_notice_(Deadline::after(kFirstNotice)),
      next_stranger_notice_(Deadline::after(0ms)),
      next_refusal_notice_(Deadline::after(0ms)),
      flush_deadline_(Deadline::after(0ms)),
      accept_again_(Deadline::after(0ms)) {}

void Coordinator::add_to(std::vector<pollfd>& fds) const {
  if (accepts()) fds.push_back({listener_->fd(), POLLIN, 0});
  for (const auto& node : nodes_) node->connection.add_to(fds);
}

std::optional<Deadline> Coordinator::deadline() const {
  if (phase_ == Phase::over) return flush_deadline_;
  std::vector<Deadline> all;
  if (!accept_again_.expired()) all.push_back(accept_again_);
  if (phase_ == Phase::gathering) {
    all.push_back(last_call_ ? *last_call_ : join_deadline_);
    if (!last_call_) all.push_back(next_notice_);
  }
  if (awaits_end()) all.push_back(next_ping_);
  for (const auto& node : nodes_) {
    if (!is_stranger(*node)) continue;
    all.push_back(Deadline::after(std::chrono::ceil<std::chrono::milliseconds>(
        node->connection.began() + kStrangerLimit - Clock::now())));
  }
  if (all.empty()) return std::nullopt;
  return *std::ranges::min_element(all, {}, &Deadline::remaining);
}

bool Coordinator::finished() const {
  if (phase_ != Phase::over) return false;
  return flush_deadline_.expired() ||
         std::ranges::none_of(nodes_, [](const auto& node) { return node->connection.pending(); });
}

void Coordinator::advance() {
  accept_all();
  for (Node* const node : find_ready()) {
    for (const std::string& text : node->connection.receive()) handle(*node, text);
  }
  drop_lost();
  std::erase_if(nodes_, [&](const auto& node) {
    return node.get() != own_ && node->leaving && !node->connection.pending();
  });
  drop_strangers();
  if (awaits_end()) check_answers();
  if (phase_ == Phase::running) finish_if_all_reported();
  if (phase_ == Phase::gathering) check_gathering();
}

Coordinator::Node& Coordinator::add_node(base::UniqueFd socket) {
  std::string address = base::peer_host(socket.get());
  net::Connection connection(std::move(socket), key_, net::SecureChannel::Side::accepting,
                             "launcher");
  nodes_.push_back(std::make_unique<Node>(
      Node{.connection = std::move(connection), .address = std::move(address)}));
  return *nodes_.back();
}

void Coordinator::accept_all() {
  for (int accepted = 0; accepts() && accepted < kMaxStrangers; ++accepted) {
    auto socket = listener_->accept();
    if (!socket && (errno == EMFILE || errno == ENFILE)) {
      // The listener stays readable, and nothing can be done about it now.
      accept_again_ = Deadline::after(kAcceptPause);
    }
    if (!socket) return;
    make_room();
    add_node(std::move(*socket));
  }
}

bool Coordinator::is_stranger(const Node& node) const {
  return &node != own_ && !node.connection.authenticated();
}

bool Coordinator::accepts() const {
  return listener_ && accept_again_.expired();
}

// The oldest connection that has said nothing makes room for another, or else the oldest that has
// not proved to be a node. If none were accepted while there are many, they would keep nodes out.
void Coordinator::make_room() {
  const auto is_one = [&](const auto& node) { return is_stranger(*node); };
  if (std::ranges::count_if(nodes_, is_one) < kMaxStrangers + 2 * rules_.max_nodes) return;
  auto victim = std::ranges::find_if(
      nodes_, [&](const auto& node) { return is_one(node) && !node->connection.greeted(); });
  if (victim == nodes_.end()) victim = std::ranges::find_if(nodes_, is_one);
  nodes_.erase(victim);
}

std::vector<Coordinator::Node*> Coordinator::find_ready() const {
  std::vector<pollfd> fds;
  std::vector<Node*> polled;
  for (const auto& node : nodes_) {
    node->connection.add_to(fds);
    polled.resize(fds.size(), node.get());
  }
  ::poll(fds.data(), fds.size(), 0);
  std::vector<Node*> ready;
  for (std::size_t i = 0; i < fds.size(); ++i) {
    if (fds[i].revents != 0) ready.push_back(polled[i]);
  }
  return ready;
}

// A message to a node may show that it is lost, and its loss is a message to others.
void Coordinator::drop_lost() {
  const auto is_lost = [&](const auto& node) {
    return node.get() != own_ && node->connection.loss();
  };
  for (auto at = nodes_.begin(); (at = std::ranges::find_if(nodes_, is_lost)) != nodes_.end();) {
    const auto node = std::move(*at);
    nodes_.erase(at);
    handle_loss(*node);
  }
}

// Those that do not say in time who they are.
void Coordinator::drop_strangers() {
  const auto oldest = Clock::now() - kStrangerLimit;
  std::erase_if(nodes_, [&](const auto& node) {
    return is_stranger(*node) && node->connection.began() <= oldest;
  });
}

void Coordinator::handle(Node& node, const std::string& text) {
  if (node.leaving) return;
  const auto message = decode(text);
  const auto* const join = message ? std::get_if<Join>(&*message) : nullptr;
  if (!node.join) {
    return join != nullptr ? handle_join(node, *join)
                           : refuse(node, "it cannot read what this version of Paceline sends");
  }
  // It would be waited for in vain.
  if (!message) return give_up(node, "its launcher sent a message that node 0 cannot read");
  if (const auto* const result = std::get_if<Result>(&*message)) {
    handle_result(node, *result);
  } else if (const auto* const signal = std::get_if<Signal>(&*message)) {
    handle_signal(node, signal->number);
  } else if (const auto* const failed = std::get_if<Failed>(&*message)) {
    if (!node.member) return;
    Member& member = member_of(node);
    if (!member.failed) member.failed = Clock::now();
    stop_others(&node, *failed);
  } else if (const auto* const leave = std::get_if<Leave>(&*message)) {
    handle_leave(node, leave->signal);
  } else if (std::holds_alternative<Ping>(*message)) {
    node.pinged = false;
  }
}

void Coordinator::handle_join(Node& node, const Join& join) {
  if (const std::string reason = refusal(rules_, join, present()); !reason.empty()) {
    return refuse(node, reason);
  }
  node.join = join;
  node.join->host = clean(join.host);
  node.connection.send(encode(Welcome{}));
  // A job that has room starts again with the new node, unless it is about to end.
  // It does not for a node that it goes on without.
  const auto alive = std::ranges::count_if(
      members_, [](const Member& m) { return m.problem.empty() || m.tolerated; });
  const bool ends =
      std::ranges::any_of(members_, [](const Member& m) { return m.result.has_value(); });
  if (phase_ != Phase::running) return;
  if (rules_.numbered || stopping_ || ends || alive >= rules_.max_nodes) {
    return tell_to_wait(node);
  }
  regrouping_ = true;
  stop_others(nullptr);
}

void Coordinator::tell_to_wait(Node& node) {
  node.connection.send(encode(Notice{
      fmt::format("paceline: the job runs on {} already; this one waits for a place\n",
                  members_.size() == 1 ? "a node" : fmt::format("{} nodes", members_.size()))}));
}

void Coordinator::refuse(Node& node, const std::string& reason) {
  node.leaving = true;
  node.connection.send(encode(Refuse{reason}));
  report_refusal(node, fmt::format(", with the error: {}", reason), next_refusal_notice_, 1s);
}

// Others gave up before they said who they are.
void Coordinator::handle_stranger_loss(const Node& node) {
  if (!node.connection.loss()->wrong_key) return;
  report_refusal(node,
                 ", which does not know the secret of this job: give all nodes the same "
                 "PACELINE_SECRET or --secret-file",
                 next_stranger_notice_, kNextNotice);
}

// Somebody may try many: so not of each.
void Coordinator::report_refusal(const Node& node, const std::string& why, Deadline& next,
                                 std::chrono::milliseconds pause) {
  if (!next.expired()) return;
  next = Deadline::after(pause);
  send_to_all(Notice{fmt::format("paceline: refused a launcher at {}{}\n", node.address, why)});
}

void Coordinator::handle_loss(Node& node) {
  if (!node.connection.authenticated()) return handle_stranger_loss(node);
  if (!node.member || phase_ != Phase::running) return;
  Member& member = member_of(node);
  // Its processes have ended, or will, or it was lost before.
  if (member.result || !member.problem.empty()) return;
  lose(node, "was lost: " + node.connection.loss()->why, node.connection.loss()->since);
}

// Rank 0 is on node 0.
bool Coordinator::may_go_on_without(const Node& node) const {
  return rules_.tolerate_loss && *node.member > 0 && !stopping_ && signal_ == 0;
}

void Coordinator::lose(Node& node, std::string problem, Clock::time_point when) {
  Member& member = member_of(node);
  member.problem = std::move(problem);
  member.tolerated = may_go_on_without(node);
  if (!member.failed) member.failed = when;
  if (!member.tolerated) return stop_others(&node);
  send_to_all(Notice{fmt::format("paceline: node {} ({}), {}: {}; the others go on without it\n",
                                 *node.member, member.join.host,
                                 launch::name_ranks(member.first_rank, member.join.processes),
                                 member.problem)},
              &node);
}

void Coordinator::handle_leave(Node& node, int signal) {
  node.leaving = true;
  if (!node.member || phase_ != Phase::running) return;
  Member& member = member_of(node);
  if (member.result) return;  // its processes have ended
  member.left_by = signal;
  lose(node, fmt::format("left: {} ended its launcher", launch::signal_name(signal)), Clock::now());
}

bool Coordinator::awaits_end() const {
  return phase_ == Phase::running && (stopping_ || signal_ != 0);
}

// A launcher that is suspended, or waits for a file system, would have all others wait for the end
// of its processes.
void Coordinator::check_answers() {
  if (!next_ping_.expired()) return;
  next_ping_ = Deadline::after(rules_.answer_limit);
  for (const auto& node : nodes_) {
    if (node.get() == own_ || !node->member || node->leaving || member_of(*node).result) continue;
    if (std::exchange(node->pinged, true)) {
      give_up(*node, fmt::format("its launcher has not answered for {} s; is it suspended?",
                                 rules_.answer_limit.count() / 1000.0));
    } else {
      node->connection.send(encode(Ping{}));
    }
  }
}

void Coordinator::give_up(Node& node, const std::string& why) {
  node.leaving = true;
  node.connection.send(encode(Refuse{why}));
  if (!node.member || phase_ != Phase::running || member_of(node).result) return;
  lose(node, "was lost: " + why, Clock::now());
}

void Coordinator::handle_result(Node& node, const Result& result) {
  if (!node.member || phase_ != Phase::running) return;
  Member& member = member_of(node);
  member.result = result;
  if (result.ranks.size() == static_cast<std::size_t>(member.join.processes)) return;
  member.problem =
      result.problem.empty() ? "reported something else than its processes" : clean(result.problem);
  member.failed = started_;
  stop_others(&node);
}

// Passed on to all, the sender too: its processes may have started since. Each launcher counts it
// once, from wherever it came first; it is passed on again when one of them gets it again.
void Coordinator::handle_signal(Node& node, int signal) {
  if (phase_ == Phase::over) return;
  if (signal_ == 0) {
    signal_ = signal;
    report_signal(node, signal);
  }
  if (phase_ == Phase::running) {
    const int times = ++node.signals[signal];
    if (times <= signals_[signal]) return;
    signals_[signal] = times;
    return send_to_all(Signal{signal});
  }
  give(stopped_by(signal));
}

void Coordinator::report_signal(const Node& node, int signal) {
  const std::string number = node.member ? fmt::format("node {} ", *node.member) : "";
  send_to_all(Notice{fmt::format("paceline: {} came to {}({})\n", launch::signal_name(signal),
                                 number, node.join ? node.join->host : node.address)},
              &node);
}

void Coordinator::stop_others(const Node* from, const Failed& why) {
  if (phase_ != Phase::running || std::exchange(stopping_, true)) return;
  send_to_all(why, from);
}

Joins Coordinator::present() const {
  Joins joins;
  for (const auto& node : nodes_) {
    if (node->join && !node->leaving) joins.push_back(&*node->join);
  }
  return joins;
}

void Coordinator::gather() {
  phase_ = Phase::gathering;
  members_.clear();
  for (const auto& node : nodes_) node->member.reset();
  last_call_.reset();
  join_deadline_ = Deadline::after(rules_.join_timeout);
  next_notice_ = Deadline::after(kFirstNotice);
}

void Coordinator::check_gathering() {
  if (!own_->join) return;
  const auto count = static_cast<int>(present().size());
  if (count >= rules_.max_nodes) return start();
  if (count < rules_.min_nodes) {
    last_call_.reset();
  } else if (!last_call_) {
    last_call_ = Deadline::after(rules_.last_call);
  }
  if (last_call_) {
    if (last_call_->expired()) start();
    return;
  }
  if (join_deadline_.expired()) {
    return give(
        {.exit_code = 1,
         .report = missing(fmt::format("within {} s", rules_.join_timeout.count() / 1000.0))});
  }
  if (!next_notice_.expired()) return;
  next_notice_ = Deadline::after(kNextNotice);
  send_to_all(Notice{missing("yet")});
}

// Who has not come, and what they have to do.
std::string Coordinator::missing(std::string_view until) const {
  return fmt::format(
      "paceline: {} {}: start the same command there{}, and see that it reaches {}\n",
      describe_missing(rules_, present()), until, rules_.numbered ? ", with its --node-rank" : "",
      rules_.endpoint);
}

void Coordinator::start() {
  std::vector<Node*> order;
  for (const auto& node : nodes_) {
    node->signals.clear();
    node->pinged = false;
    if (node->join && !node->leaving) order.push_back(node.get());
  }
  if (rules_.numbered) {
    std::ranges::sort(order, {}, [](const Node* node) { return node->join->node; });
  } else {
    // Rank 0 is on this machine, where its address leads; nodes that are too many wait.
    std::stable_partition(order.begin(), order.end(),
                          [&](const Node* node) { return node == own_; });
    order.resize(std::min(order.size(), static_cast<std::size_t>(rules_.max_nodes)));
  }
  int ranks = 0;
  std::map<std::string, int> ranks_by_role;
  for (Node* const node : order) {
    node->member = static_cast<int>(members_.size());
    int& of_role = ranks_by_role[node->join->role];
    members_.push_back({.join = *node->join, .first_rank = ranks, .first_role_rank = of_role});
    ranks += node->join->processes;
    of_role += node->join->processes;
  }
  port_ = net::PortReservation(listener_->address());  // the last one is still held
  for (Node* const node : order) {
    const Member& member = member_of(*node);
    node->connection.send(encode(Start{.restart = restart_,
                                       .max_restarts = rules_.max_restarts,
                                       .tolerate_loss = rules_.tolerate_loss,
                                       .nodes = static_cast<int>(order.size()),
                                       .node = *node->member,
                                       .first_rank = member.first_rank,
                                       .world_size = ranks,
                                       .first_role_rank = member.first_role_rank,
                                       .role_world_size = ranks_by_role.at(member.join.role),
                                       .job = rules_.job,
                                       .master_addr = rules_.master_addr,
                                       .master_port = port_->port()}));
  }
  for (const auto& node : nodes_) {
    if (node->join && !node->leaving && !node->member) tell_to_wait(*node);
  }
  started_ = Clock::now();
  phase_ = Phase::running;
  stopping_ = regrouping_ = false;
  next_ping_ = Deadline::after(0ms);
  signals_.clear();
}

void Coordinator::send_to_all(const Message& message, const Node* except) {
  const std::string text = encode(message);
  for (const auto& node : nodes_) {
    if (node->join && !node->leaving && node.get() != except) node->connection.send(text);
  }
}

}  // namespace paceline::nodes
