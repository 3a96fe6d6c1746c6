#pragma once

#include <poll.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "internode/link_messages.h"
#include "internode/node_map.h"
#include "net/connection.h"
#include "shm/region.h"

namespace paceline::internode {

// How long an engine's error may come before the leaders know its cause.
inline constexpr std::chrono::seconds kCauseTime =
    net::Connection::kSilenceLimit + std::chrono::seconds(1);

// Of what waits for these ranks of other nodes, which have left; `where` describes it.
shm::Failure failure_of_left(const shm::GlobalRanks& names, const shm::RankSet& global_ranks,
                             const std::string& where);

// The connections from a node's leader to the other leaders, and a thread that serves them. They
// carry no tensors: they gather short texts of all nodes, such as descriptions of calls, and make
// the failure of a group known on all of its nodes.
//
// A failure of the group on another node becomes the failure of this node's region, and the other
// way round. So does the death of a rank of this node, even if no rank waits, the loss of another
// node's leader, and of a machine that has not answered for Connection::kSilenceLimit. Twice a
// second they show in each region which rank each rank of another node waits for.
//
// Thread-safe. In a forked child only the destructor may be called, and does nothing.
class NodeLinks {
 public:
  // To another leader, and what it has sent so far.
  struct Link {
    std::unique_ptr<net::Connection> connection;
    std::vector<std::string> received{};

    // Those too.
    std::vector<std::string> receive();
  };
  // By node; none for this one.
  using Connections = std::vector<Link>;
  // The global ranks of this node that its share of a gather waits for. Called on the thread.
  using Late = std::function<shm::RankSet(const Topic&)>;
  // Another node has aborted a step. Called on the thread; must not call this object.
  using OnAbort = std::function<void(const Aborted&)>;

  // `ranks`: the global ranks of `map`. Throws Error.
  NodeLinks(std::shared_ptr<shm::Region> region, const NodeMap& map, shm::GlobalRanks ranks,
            Connections connections, Late late);
  NodeLinks(const NodeLinks&) = delete;
  NodeLinks& operator=(const NodeLinks&) = delete;
  // Tells the other leaders which ranks of this node have left the group, or its failure.
  ~NodeLinks();

  // Gives this node's share of a gather, of every node one. `when_complete` is called once, on any
  // thread, and must not wait. It is not called if a node does not give its share. Forgets earlier
  // gathers of the stream.
  void gather(const Topic& topic, std::string share, std::function<void()> when_complete);
  // The shares of a complete gather, by node. It is forgotten then.
  std::vector<std::string> take(const Topic& topic);
  // The global ranks that a gather waits for, as far as is known; never empty. In the first second
  // these are all ranks of the nodes that have not given their share. Later these nodes have said
  // which of their ranks are late, or not answered, and then it is their leader.
  shm::RankSet awaited(const Topic& topic) const;
  // The global ranks that lead other nodes and do not run: they have not answered for a second.
  // Call it regularly while this rank waits, since it asks them.
  shm::RankSet silent_leaders();
  // The awaited ranks that have left the group: the gather cannot complete without them.
  shm::RankSet awaited_that_left(const Topic& topic) const;
  // Tells the other nodes that the group has failed, if it has. The thread does it, too, a little
  // later.
  void tell_failure();
  // Tells the other nodes that this one has aborted a step. If the group has failed, they hear that
  // first.
  void abort(const Aborted& aborted);
  // What to call when another node aborts a step of a stream; null: nothing.
  void on_abort(std::uint32_t stream, OnAbort callback);
  // By node: its share of a gather of `stream` for which this node has not given its own.
  std::map<int, std::string> unanswered(std::uint32_t stream) const;

 private:
  using Clock = base::Deadline::Clock;
  struct Node {
    Link link;           // none to this node itself
    shm::RankSet ranks;  // global
    int leader;          // global
    bool lost = false;
    std::optional<Clock::time_point> asked{};  // it has sent nothing since
    std::map<int, int> waits{};  // whom its ranks wait for messages of, as it says; global ranks
  };
  struct Gather {
    explicit Gather(std::size_t nodes) : shares(nodes), late(nodes) {}
    std::vector<std::optional<std::string>> shares;  // by node
    std::vector<std::optional<shm::RankSet>> late;   // the answers, by node
    std::size_t given = 0;
    std::optional<Clock::time_point> since{};  // when this node gave its share
    std::optional<Clock::time_point> asked{};  // when the others were last asked
    std::function<void()> when_complete{};
  };
  using Callbacks = std::vector<std::function<void()>>;

  void run();
  void wait_for_events();
  bool serve(Callbacks& complete);
  void wake();
  Gather& gather_of(const Topic& topic);
  shm::RankSet find_awaited(const Topic& topic) const;
  void give(Gather& gather, std::size_t node, std::string share, Callbacks& complete);
  void handle(std::size_t node, const std::string& text, Callbacks& complete);
  void answer(std::size_t node, const Topic& topic);
  void check_connection(Node& node);
  void check_region();
  void ask();
  void ask_whether_all_run(Clock::time_point now);
  void ask(std::size_t node, const Topic& topic, Clock::time_point now);
  void exchange_waits();
  void show_waits();
  static bool is_silent(const Node& node, std::chrono::seconds limit);
  // Another node's, whose leader has not left and is not lost.
  static bool is_reachable(const Node& node) {
    return node.link.connection && !node.link.connection->loss();
  }
  void send(std::size_t node, const std::string& message);  // encoded
  void send_to_all(const LinkMessage& message);
  bool is_flushed() const;
  // "; its last was call 17, all_reduce of 10 float32", of a rank of this node.
  std::string last_call_of(int rank) const;
  void record(const shm::RankSet& ranks, const std::string& why);

  const std::shared_ptr<shm::Region> region_;
  const shm::GlobalRanks global_ranks_;
  const std::size_t node_;
  const Late late_;
  shm::OwningProcess process_;
  base::UniqueFd wake_;  // an eventfd

  mutable std::mutex mutex_;  // guards what follows
  std::vector<Node> nodes_;
  std::map<Topic, Gather> gathers_;
  std::map<std::uint32_t, OnAbort> on_abort_;  // by stream
  shm::RankSet left_;                          // on other nodes
  shm::RankSet own_left_;                      // on this one, as the others know
  bool told_failure_ = false;
  Clock::time_point asked_whether_all_run_{};
  Clock::time_point exchanged_waits_{};
  std::optional<base::Deadline> stop_;  // by when the thread ends

  std::thread thread_;
};

}  // namespace paceline::internode
