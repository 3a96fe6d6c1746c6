#include "nodes/node_session.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <string_view>
#include <utility>

#include <paceline/error.h>

#include "base/address.h"
#include "base/errno_error.h"
#include "base/printable.h"

namespace paceline::nodes {
namespace {

using namespace std::chrono_literals;
using base::Deadline;

constexpr auto kFirstReminder = 10s;
constexpr auto kNextReminder = 60s;
constexpr auto kReconnectPause = 1s;

bool is_this_machine(const std::string& host, int port) {
  return std::ranges::any_of(base::resolve(host, port), base::is_own);
}

// What others call this machine: `host` if that is one of its addresses, else the address by which
// it would reach `host`.
std::string own_name(const std::string& host, int port) {
  if (is_this_machine(host, port)) return host;
  const auto source = base::source_address(base::resolve(host, port).front());
  return source ? source->host() : host;
}

std::array<base::UniqueFd, 2> socket_pair() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    throw base::errno_error("cannot create a pair of sockets");
  }
  return {base::UniqueFd(ends[0]), base::UniqueFd(ends[1])};
}

}  // namespace

NodeSession::NodeSession(SessionOptions options, launch::SignalForwarding* signals,
                         std::vector<launch::NonBlockingWriter*> writers,
                         std::function<void(const std::string&)> print)
    : options_(std::move(options)),
      signals_(signals),
      writers_(std::move(writers)),
      print_(std::move(print)),
      join_deadline_(Deadline::after(options_.rules.join_timeout)),
      next_notice_(Deadline::after(kFirstReminder)),
      answer_deadline_(Deadline::after(options_.answer_limit)) {
  find_role();
}

void NodeSession::find_role() {
  bool is_coordinator = options_.coordinates.value_or(true);
  try {
    if (is_coordinator) is_coordinator = is_this_machine(options_.host, options_.port);
  } catch (const UsageError& error) {
    return await_name(error.what());
  }
  find_role_again_.reset();
  // Something else may lead from the address to node 0.
  if (options_.coordinates.value_or(is_coordinator)) {
    std::optional<base::Address> address;
    try {
      address = base::listening_address_for_machines(options_.host, options_.port);
    } catch (const UsageError& error) {
      throw UsageError(
          fmt::format("cannot be node 0 (--master-addr, --rdzv-endpoint): {}", error.what()));
    }
    try {
      return coordinate(net::Listener(*address));
    } catch (const Error& error) {
      // Otherwise another launcher on this machine may be the coordinator.
      if (options_.coordinates) {
        throw Error(fmt::format("{}; is another job using the port?", error.what()));
      }
      print_(fmt::format("paceline: {}; another launcher here may be node 0\n", error.what()));
      may_listen_ = true;
    }
  }
  print_(fmt::format("paceline: looks for node 0 at {}\n", described_endpoint()));
  connector_.emplace(options_.host, options_.port);
}

// A cluster may know the name of a machine only a while after it has started.
void NodeSession::await_name(const std::string& why) {
  if (join_deadline_.expired()) {
    return fail(fmt::format("{} within {} s; see that --master-addr or --rdzv-endpoint is right",
                            why, options_.rules.join_timeout.count() / 1000.0));
  }
  if (!find_role_again_ || next_notice_.expired()) {
    next_notice_ = Deadline::after(kNextReminder);
    print_(fmt::format("paceline: {} (--master-addr, --rdzv-endpoint); waiting for an address\n",
                       why));
  }
  find_role_again_ = Deadline::after(kReconnectPause);
}

std::string NodeSession::endpoint() const {
  return base::join_host_port(options_.host, options_.port);
}

// With the mistake that the default of --master-addr invites.
std::string NodeSession::described_endpoint() const {
  return endpoint() + (base::names_loopback(options_.host)
                           ? " (only this machine reaches it; give another by --master-addr or "
                             "--rdzv-endpoint)"
                           : "");
}

void NodeSession::coordinate(net::Listener listener) {
  JobRules rules = options_.rules;
  // The address as the user wrote it may mean something else to other machines only if it is not
  // this machine's own.
  if (rules.master_addr.empty()) rules.master_addr = own_name(options_.host, options_.port);
  rules.endpoint = described_endpoint();
  const bool everywhere =
      !listener.address().is_loopback() && !is_this_machine(options_.host, options_.port);
  print_(fmt::format("paceline: waits for {} at {}{}{}\n",
                     rules.min_nodes == rules.max_nodes
                         ? fmt::format("{} nodes", rules.max_nodes)
                         : fmt::format("{} to {} nodes", rules.min_nodes, rules.max_nodes),
                     everywhere ? listener.address().to_string() : rules.endpoint,
                     everywhere
                         ? fmt::format(", as no interface here has {} (is this machine node 0, and "
                                       "the address right?)",
                                       options_.host)
                         : "",
                     options_.has_secret ? ""
                                         : "; without PACELINE_SECRET or --secret-file, whoever "
                                           "reaches this address can join"));
  auto [far_end, near_end] = socket_pair();
  coordinator_.emplace(std::move(rules), std::move(listener), options_.key, std::move(far_end));
  connection_.emplace(std::move(near_end), options_.key, net::SecureChannel::Side::connecting,
                      "launcher");
  connection_->send(encode(options_.join));
}

std::optional<Start> NodeSession::await_start() {
  own_signals_.clear();
  while (!start_ && !is_over()) {
    if (!failure_.empty()) throw Error(failure_);
    wait();
  }
  // A start that came with the loss of the coordinator is none.
  if (!failure_.empty() && !is_over()) throw Error(failure_);
  if (is_over()) {
    leave();
    return std::nullopt;
  }
  verdict_.reset();
  return std::exchange(start_, std::nullopt);
}

Verdict NodeSession::await_verdict(const Result& result) {
  if (left_by_ == 0 && connection_) connection_->send(encode(result));
  own_signals_.clear();
  while (!verdict_ && left_by_ == 0) {
    if (!failure_.empty()) throw Error(failure_);
    wait();
  }
  if (left_by_ != 0) {
    const launch::JobResult own{.ranks = result.ranks, .signal = left_by_};
    if (own.preempted()) return {.exit_code = own.exit_code(), .signal = left_by_, .report = ""};
    return stopped_by(left_by_);
  }
  if (!verdict_->restarts) leave();
  return *verdict_;
}

// The coordinator goes last: every node has to get its verdict.
void NodeSession::leave() {
  while (coordinator_ && !coordinator_->finished()) wait();
}

void NodeSession::wait() {
  std::vector<pollfd> fds;
  if (signals_ != nullptr) fds.push_back({signals_->fd(), POLLIN, 0});
  for (launch::NonBlockingWriter* const writer : writers_) {
    if (writer->pending()) fds.push_back({writer->fd(), POLLOUT, 0});
  }
  const auto limit = add_to(fds);
  ::poll(fds.data(), fds.size(), static_cast<int>(limit.count()));
  for (launch::NonBlockingWriter* const writer : writers_) writer->write_some();
  handle_signals();
  advance();
}

std::chrono::milliseconds NodeSession::add_to(std::vector<pollfd>& fds) const {
  std::chrono::milliseconds limit = 1h;
  const auto lower_to = [&](const std::optional<Deadline>& deadline) {
    if (deadline) limit = std::min(limit, deadline->remaining());
  };
  if (coordinator_) {
    coordinator_->add_to(fds);
    lower_to(coordinator_->deadline());
  }
  if (connection_) {
    connection_->add_to(fds);
    if (!connection_->authenticated()) lower_to(answer_deadline_);
  }
  if (connector_) {
    connector_->add_to(fds);
    lower_to(connector_->deadline());
    lower_to(next_notice_);
    lower_to(join_deadline_);
  }
  if (find_role_again_) {
    lower_to(find_role_again_);
    lower_to(join_deadline_);
  }
  return limit;
}

void NodeSession::advance() {
  if (find_role_again_) {
    if (find_role_again_->expired() || join_deadline_.expired()) find_role();
    return;
  }
  if (coordinator_) coordinator_->advance();
  if (!failure_.empty()) return;
  if (!connection_) connect();
  if (connection_) {
    for (const std::string& text : connection_->receive()) {
      if (const auto message = decode(text)) handle(*message);
    }
  }
  if (!failure_.empty() || left_by_ != 0) return;
  if (!is_joined()) return check_joining();
  if (connection_->loss() && !is_over()) {
    fail(
        fmt::format("lost the launcher of node 0 at {}: {}", endpoint(), connection_->loss()->why));
  }
}

bool NodeSession::is_over() const {
  return verdict_ && !verdict_->restarts;
}

bool NodeSession::is_joined() const {
  return connection_ && connection_->authenticated();
}

void NodeSession::connect() {
  auto socket = connector_->advance();
  if (!connector_->last_failure().empty()) why_not_ = connector_->last_failure();
  if (!socket) {
    if (may_listen_ && !why_not_.empty()) listen_again();
    return;
  }
  connection_.emplace(std::move(*socket), options_.key, net::SecureChannel::Side::connecting,
                      "launcher");
  connection_->send(encode(options_.join));
  answer_deadline_ = Deadline::after(options_.answer_limit);
  connector_.reset();
}

// If two launchers here begin to listen in the same moment, Linux may refuse both. Or the launcher
// of an earlier job has ended.
void NodeSession::listen_again() {
  try {
    coordinate(net::Listener(base::listening_address_for_machines(options_.host, options_.port)));
    connector_.reset();
  } catch (const Error&) {
    // Another one listens, or will soon.
  }
}

// While the coordinator has not accepted this node. Not node 0's, which reaches itself at once.
void NodeSession::check_joining() {
  if (coordinator_) return;
  // Node 0 says nothing to a launcher with another secret. But one close may also be that of a
  // launcher which ends, or to which this one was too slow.
  if (connection_ && connection_->loss() && connection_->greeted() && ++closed_ > 1) {
    return fail(fmt::format(
        "the launcher at {} closed the connection: it has another secret, or is not Paceline's; "
        "give all nodes the same PACELINE_SECRET or --secret-file",
        endpoint()));
  }
  if (connection_ && (connection_->loss() || answer_deadline_.expired())) {
    // The launcher of an earlier job may be about to end, or something else has the port.
    why_not_ =
        connection_->loss() ? connection_->loss()->why : "what listens there does not answer";
    connection_.reset();
    connector_.emplace(options_.host, options_.port, kReconnectPause);
  }
  std::string_view reason = why_not_;
  if (const std::string prefix = endpoint() + ": "; reason.starts_with(prefix)) {
    reason.remove_prefix(prefix.size());
  }
  const std::string why = reason.empty() ? "" : fmt::format(": {}", reason);
  if (join_deadline_.expired()) {
    return fail(
        fmt::format("no launcher answered at {} within {} s{}; start node 0 too, and see "
                    "that this is its address in the network",
                    described_endpoint(), options_.rules.join_timeout.count() / 1000.0, why));
  }
  if (!next_notice_.expired()) return;
  next_notice_ = Deadline::after(kNextReminder);
  print_(fmt::format("paceline: no launcher answers at {} yet{}; waiting\n", described_endpoint(),
                     why));
}

void NodeSession::handle(const Message& message) {
  if (const auto* const refuse = std::get_if<Refuse>(&message)) {
    fail(fmt::format("the launcher at {} does not accept this node: {}", endpoint(),
                     base::printable(refuse->reason)));
  } else if (const auto* const start = std::get_if<Start>(&message)) {
    start_ = *start;
    requests_.clear();
  } else if (const auto* const signal = std::get_if<Signal>(&message)) {
    requests_.push_back({.signal = signal->number});
  } else if (const auto* const failed = std::get_if<Failed>(&message)) {
    requests_.push_back({.blamed_ranks = failed->blamed_ranks});
  } else if (const auto* const verdict = std::get_if<Verdict>(&message)) {
    verdict_ = *verdict;
  } else if (const auto* const notice = std::get_if<Notice>(&message)) {
    print_(notice->text);
  } else if (std::holds_alternative<Ping>(message)) {
    connection_->send(encode(Ping{}));
  }
}

// Signals that come while no processes run. If node 0 does not react, a repeated signal ends this
// launcher.
void NodeSession::handle_signals() {
  while (const int signal = signals_ != nullptr ? signals_->next() : 0) {
    if (signal == SIGTSTP) {
      ::raise(SIGSTOP);
      continue;
    }
    if (is_joined()) report_signal(signal);
    const int most = coordinator_ ? 2 : 1;
    const bool is_shared = is_joined() && !may_leave(signal);
    if (is_shared && ++own_signals_[signal] <= most) continue;
    verdict_ = stopped_by(signal);
    coordinator_.reset();
  }
}

std::vector<launch::NodeRequest> NodeSession::receive() {
  advance();
  return std::exchange(requests_, {});
}

void NodeSession::report_failure(const std::vector<int>& blamed_ranks) {
  if (connection_) connection_->send(encode(Failed{blamed_ranks}));
}

// The job goes on without a node that has no number of its own. Other signals, such as SIGUSR1,
// come from a scheduler, which means the whole job.
bool NodeSession::may_leave(int signal) const {
  const bool is_for_one_node =
      signal == SIGINT || signal == SIGTERM || signal == SIGHUP || signal == SIGQUIT;
  return !coordinator_ && !options_.rules.numbered && is_for_one_node;
}

void NodeSession::report_signal(int signal) {
  if (!connection_) return;
  if (!may_leave(signal)) return connection_->send(encode(Signal{signal}));
  if (std::exchange(left_by_, signal) == 0) connection_->send(encode(Leave{signal}));
}

void NodeSession::fail(std::string why) {
  failure_ = std::move(why);
  requests_.push_back({});
}

}  // namespace paceline::nodes
