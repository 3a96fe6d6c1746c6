#include "internode/node_links.h"

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <new>
#include <tuple>
#include <utility>

#include "base/errno_error.h"
#include "base/start_thread.h"
#include "shm/collectives/call_state.h"

namespace paceline::internode {
namespace {

using namespace std::chrono_literals;

// How often the thread looks at what wakes nobody: the region's failure, and ranks that leave.
constexpr auto kTick = 20ms;
// How long a gather lasts before the nodes that are late are asked why, and how often they are.
constexpr auto kPatience = 500ms;
// A leader that does not answer for so long does not run. Longer for waits of messages, which
// nobody judges within seconds.
constexpr auto kAnswerLimit = 1s;
constexpr auto kLongAnswerLimit = 3s;
// No gather has it, as calls are numbered from 1. So a leader that runs answers.
constexpr Topic kPing{};
// For the last messages.
constexpr auto kFlushLimit = 2s;

}  // namespace

shm::Failure failure_of_left(const shm::GlobalRanks& names, const shm::RankSet& global_ranks,
                             const std::string& where) {
  return {
      shm::FailureKind::peer_lost, global_ranks,
      fmt::format("{} {} left the group and {} missing in {}", names.describe_global(global_ranks),
                  shm::has_or_have(global_ranks), global_ranks.count() == 1 ? "is" : "are", where)};
}

std::vector<std::string> NodeLinks::Link::receive() {
  std::vector<std::string> messages = std::exchange(received, {});
  for (std::string& message : connection->receive()) messages.push_back(std::move(message));
  return messages;
}

NodeLinks::NodeLinks(std::shared_ptr<shm::Region> region, const NodeMap& map,
                     shm::GlobalRanks ranks, Connections connections, Late late)
    : region_(std::move(region)),
      global_ranks_(std::move(ranks)),
      node_(static_cast<std::size_t>(map.node())),
      late_(std::move(late)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) throw base::errno_error("cannot make an eventfd");
  for (int node = 0; node < map.nodes(); ++node) {
    nodes_.push_back({.link = std::move(connections[static_cast<std::size_t>(node)]),
                      .ranks = global_ranks_.of(shm::RankSet(map.ranks_on(node))),
                      .leader = global_ranks_.of(map.leader_of(node))});
  }
  thread_ = base::start_thread([this] { run(); });
}

NodeLinks::~NodeLinks() {
  if (process_.is_forked_child()) {
    // The thread exists in the parent only.
    std::ignore = new (std::nothrow) std::thread(std::move(thread_));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stop_ = base::Deadline::after(kFlushLimit);
  }
  wake();
  thread_.join();
}

void NodeLinks::wake() {
  const std::uint64_t one = 1;
  std::ignore = ::write(wake_.get(), &one, sizeof(one));
}

void NodeLinks::gather(const Topic& topic, std::string share, std::function<void()> when_complete) {
  Callbacks complete;
  bool unsent = false;
  {
    const std::lock_guard lock(mutex_);
    gathers_.erase(gathers_.lower_bound({topic.stream, 0}), gathers_.lower_bound(topic));
    Gather& gather = gather_of(topic);
    gather.since = Clock::now();
    gather.when_complete = std::move(when_complete);
    send_to_all(Share{topic, share});
    give(gather, node_, std::move(share), complete);
    unsent = !is_flushed();
  }
  if (unsent) wake();  // the thread waits for the sockets then
  for (const auto& callback : complete) callback();
}

std::vector<std::string> NodeLinks::take(const Topic& topic) {
  const std::lock_guard lock(mutex_);
  auto entry = gathers_.extract(topic);
  std::vector<std::string> shares;
  for (auto& share : entry.mapped().shares) shares.push_back(std::move(share).value());
  return shares;
}

shm::RankSet NodeLinks::awaited(const Topic& topic) const {
  const std::lock_guard lock(mutex_);
  return find_awaited(topic);
}

shm::RankSet NodeLinks::awaited_that_left(const Topic& topic) const {
  const std::lock_guard lock(mutex_);
  const shm::RankSet ranks = find_awaited(topic);
  return ranks - (ranks - left_);
}

shm::RankSet NodeLinks::find_awaited(const Topic& topic) const {
  shm::RankSet ranks;
  const auto entry = gathers_.find(topic);
  if (entry == gathers_.end()) return ranks;
  const Gather& gather = entry->second;
  for (std::size_t node = 0; node < nodes_.size(); ++node) {
    if (gather.shares[node]) continue;
    const bool is_known = gather.late[node] && !gather.late[node]->empty();
    if (is_silent(nodes_[node], kAnswerLimit)) {
      ranks.insert(nodes_[node].leader);
    } else if (is_known) {
      ranks |= *gather.late[node];
    } else {
      ranks |= nodes_[node].ranks;
    }
  }
  return ranks;
}

shm::RankSet NodeLinks::silent_leaders() {
  shm::RankSet ranks;
  {
    const std::lock_guard lock(mutex_);
    ask_whether_all_run(Clock::now());
    for (const Node& node : nodes_) {
      if (is_silent(node, kAnswerLimit)) ranks.insert(node.leader);
    }
    if (is_flushed()) return ranks;
  }
  wake();  // the thread waits for the sockets then
  return ranks;
}

bool NodeLinks::is_silent(const Node& node, std::chrono::seconds limit) {
  return node.asked && Clock::now() - *node.asked > limit;
}

void NodeLinks::tell_failure() {
  {
    const std::lock_guard lock(mutex_);
    check_region();
    if (is_flushed()) return;
  }
  wake();  // the thread waits for the sockets then
}

void NodeLinks::abort(const Aborted& aborted) {
  {
    const std::lock_guard lock(mutex_);
    check_region();
    send_to_all(aborted);
    if (is_flushed()) return;
  }
  wake();  // the thread waits for the sockets then
}

void NodeLinks::on_abort(std::uint32_t stream, OnAbort callback) {
  const std::lock_guard lock(mutex_);
  on_abort_[stream] = std::move(callback);
}

std::map<int, std::string> NodeLinks::unanswered(std::uint32_t stream) const {
  const std::lock_guard lock(mutex_);
  std::map<int, std::string> shares;
  const auto end = gathers_.upper_bound({stream, std::numeric_limits<std::uint64_t>::max()});
  for (auto entry = gathers_.lower_bound({stream, 0}); entry != end; ++entry) {
    const Gather& gather = entry->second;
    for (std::size_t node = 0; !gather.since && node < nodes_.size(); ++node) {
      if (gather.shares[node]) shares.emplace(static_cast<int>(node), *gather.shares[node]);
    }
  }
  return shares;
}

void NodeLinks::run() {
  try {
    bool goes_on = true;
    while (goes_on) {
      wait_for_events();
      Callbacks complete;
      goes_on = serve(complete);
      for (const auto& callback : complete) callback();
    }
  } catch (const std::exception& error) {  // no memory
    record({nodes_[node_].leader}, fmt::format("can no longer hear other nodes: {}", error.what()));
  }
}

void NodeLinks::wait_for_events() {
  std::vector<pollfd> fds{{wake_.get(), POLLIN, 0}};
  {
    const std::lock_guard lock(mutex_);
    for (const Node& node : nodes_) {
      if (node.link.connection) node.link.connection->add_to(fds);
    }
    if (stop_ && is_flushed()) return;
  }
  for (int rank = 0; rank < region_->size() && !region_->failed(); ++rank) {
    const auto& watch = region_->peers().membership()->peers[static_cast<std::size_t>(rank)].watch;
    if (watch && region_->peers().is_here(rank)) fds.push_back({watch.get(), POLLIN, 0});
  }
  ::poll(fds.data(), fds.size(), static_cast<int>(std::chrono::milliseconds(kTick).count()));
  std::uint64_t wakes = 0;
  std::ignore = ::read(wake_.get(), &wakes, sizeof(wakes));
}

// Adds what to call without the lock. Returns false if the thread ends, which is decided with the
// lock held: once stop_ is seen, the other nodes were told all that was to be told before.
bool NodeLinks::serve(Callbacks& complete) {
  const std::lock_guard lock(mutex_);
  for (std::size_t node = 0; node < nodes_.size(); ++node) {
    if (!nodes_[node].link.connection) continue;
    for (const std::string& text : nodes_[node].link.receive()) {
      nodes_[node].asked.reset();
      handle(node, text, complete);
    }
  }
  for (Node& node : nodes_) check_connection(node);
  check_region();
  ask();
  exchange_waits();
  return !stop_ || (!is_flushed() && !stop_->expired());
}

NodeLinks::Gather& NodeLinks::gather_of(const Topic& topic) {
  return gathers_.try_emplace(topic, nodes_.size()).first->second;
}

void NodeLinks::give(Gather& gather, std::size_t node, std::string share, Callbacks& complete) {
  if (gather.shares[node]) return;
  gather.shares[node] = std::move(share);
  if (++gather.given == nodes_.size()) complete.push_back(std::move(gather.when_complete));
}

void NodeLinks::handle(std::size_t node, const std::string& text, Callbacks& complete) {
  const auto message = decode_link_message(text);
  if (!message) {
    return record({nodes_[node].leader}, "sent a message that Paceline does not know");
  }
  if (const auto* const share = std::get_if<Share>(&*message)) {
    give(gather_of(share->topic), node, share->text, complete);
  } else if (const auto* const question = std::get_if<Question>(&*message)) {
    answer(node, question->topic);
  } else if (const auto* const known = std::get_if<Answer>(&*message)) {
    const auto entry = gathers_.find(known->topic);
    if (entry != gathers_.end()) entry->second.late[node] = known->late;
  } else if (const auto* const failed = std::get_if<Failed>(&*message)) {
    region_->memory().group_block().failure.record(failed->failure);
  } else if (const auto* const left = std::get_if<Left>(&*message)) {
    left_ |= left->ranks;
    region_->set_left_elsewhere(left_);
  } else if (const auto* const aborted = std::get_if<Aborted>(&*message)) {
    const auto callback = on_abort_.find(aborted->step.stream);
    if (callback != on_abort_.end() && callback->second) {
      callback->second(*aborted);
    }
  } else if (const auto* const waits = std::get_if<Waits>(&*message)) {
    if (nodes_[node].ranks.contains(waits->rank)) nodes_[node].waits[waits->rank] = waits->awaited;
    show_waits();
  }
}

void NodeLinks::answer(std::size_t node, const Topic& topic) {
  const auto entry = gathers_.find(topic);
  // A share that was given meanwhile is on its way.
  if (entry != gathers_.end() && entry->second.shares[node_]) return;
  send(node, encode(Answer{topic, late_(topic)}));
}

void NodeLinks::check_connection(Node& node) {
  const auto& connection = node.link.connection;
  if (!connection || node.lost || !connection->loss()) return;
  node.lost = true;
  if (stop_ || left_.contains(node.leader)) return;
  const auto& loss = *connection->loss();
  const shm::RankSet ranks = loss.silent ? node.ranks : shm::RankSet{node.leader};
  record(ranks, fmt::format("{} lost: {}", ranks.count() == 1 ? "was" : "were", loss.why));
}

void NodeLinks::check_region() {
  shm::RankSet left;
  for (int rank = 0; rank < region_->size(); ++rank) {
    const int global = region_->global_ranks().of(rank);
    if (region_->peers().has_left(rank)) {
      left.insert(global);
    } else if (!region_->failed() && rank != region_->rank() && region_->peers().has_died(rank)) {
      record({global}, region_->peers().describe_loss(rank) + last_call_of(rank));
    }
  }
  // First why, since a rank that fails leaves then.
  if (region_->failed() && !std::exchange(told_failure_, true)) {
    send_to_all(Failed{region_->failure()});
  }
  if (left != own_left_) send_to_all(Left{own_left_ = left});
}

void NodeLinks::ask() {
  const auto now = Clock::now();
  for (auto& [topic, gather] : gathers_) {
    if (!gather.since || gather.given == nodes_.size() || now - *gather.since < kPatience) continue;
    if (gather.asked && now - *gather.asked < kPatience) continue;
    gather.asked = now;
    for (std::size_t node = 0; node < nodes_.size(); ++node) {
      if (!gather.shares[node]) ask(node, topic, now);
    }
  }
}

void NodeLinks::ask_whether_all_run(Clock::time_point now) {
  if (now - asked_whether_all_run_ < kPatience) return;
  asked_whether_all_run_ = now;
  for (std::size_t node = 0; node < nodes_.size(); ++node) ask(node, kPing, now);
}

void NodeLinks::ask(std::size_t node, const Topic& topic, Clock::time_point now) {
  if (!is_reachable(nodes_[node])) return;
  // It has unread questions. More would fill its buffer after minutes, and TCP would take that for
  // the loss of its machine.
  if (is_silent(nodes_[node], kAnswerLimit)) return;
  if (!nodes_[node].asked) nodes_[node].asked = now;
  send(node, encode(Question{topic}));
}

// Says whom the ranks of this node wait for messages of, where that has changed.
void NodeLinks::exchange_waits() {
  const auto now = Clock::now();
  if (now - exchanged_waits_ < kPatience && !stop_) return;
  exchanged_waits_ = now;
  Node& own = nodes_[node_];
  bool waits = false;
  for (int rank = 0; rank < region_->size(); ++rank) {
    const int global = region_->global_ranks().of(rank);
    int awaited = region_->awaited_by(global).value_or(-1);
    // What a rank waited for when it was stopped does not matter.
    if (awaited >= 0 && !region_->peers().describe_stop(rank).empty()) awaited = -1;
    waits = waits || awaited >= 0;
    int& said = own.waits.try_emplace(global, -1).first->second;
    if (awaited != said) send_to_all(Waits{global, said = awaited});
  }
  if (waits) ask_whether_all_run(now);
  show_waits();
}

// To the ranks of this node. Nothing is known of a node that has left or is lost, nor of any once
// the thread ends.
void NodeLinks::show_waits() {
  auto& shown = region_->memory().group_block().awaited_elsewhere;
  for (const Node& node : nodes_) {
    const bool is_known = is_reachable(node) && !stop_;
    // A leader that does not run says nothing, and its node's ranks wait for it sooner or later.
    const bool silent = is_silent(node, kLongAnswerLimit);
    for (const int rank : node.ranks) {
      const auto said = node.waits.find(rank);
      int awaited = said == node.waits.end() ? -1 : said->second;
      if (silent) awaited = rank == node.leader ? -1 : node.leader;
      if (!is_known) awaited = -1;
      shown[static_cast<std::size_t>(rank)].store(static_cast<std::uint32_t>(awaited) + 1,
                                                  std::memory_order_relaxed);
    }
  }
}

void NodeLinks::send(std::size_t node, const std::string& message) {
  if (is_reachable(nodes_[node])) nodes_[node].link.connection->send(message);
}

void NodeLinks::send_to_all(const LinkMessage& message) {
  const std::string encoded = encode(message);
  for (std::size_t node = 0; node < nodes_.size(); ++node) send(node, encoded);
}

bool NodeLinks::is_flushed() const {
  return std::ranges::none_of(nodes_, [](const Node& node) {
    return node.link.connection && node.link.connection->pending();
  });
}

std::string NodeLinks::last_call_of(int rank) const {
  const auto state = shm::read_call_states(*region_)[static_cast<std::size_t>(rank)];
  if (state.operation.empty()) return "";
  return fmt::format("; its last was call {}, {}", state.call, state.operation);
}

void NodeLinks::record(const shm::RankSet& ranks, const std::string& why) {
  region_->memory().group_block().failure.record(
      {shm::FailureKind::peer_lost, ranks,
       fmt::format("{} {}", global_ranks_.describe_global(ranks), why)});
}

}  // namespace paceline::internode
