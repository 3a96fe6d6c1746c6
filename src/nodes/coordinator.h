#pragma once

#include <poll.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "net/connection.h"
#include "net/listener.h"
#include "nodes/job_rules.h"
#include "nodes/messages.h"

namespace paceline::nodes {

// The launcher among those of a job that decides: it accepts nodes, numbers them, has them start
// their processes, has all of them stop if one fails, and gives the verdict. Runs on the thread
// that calls it, and never waits.
//
// Gathers nodes until they suffice, then runs the job until each node has reported how its
// processes ended. After a failure it gathers again, if restarts are left. A node that is lost
// counts as a failure, unless the rules tolerate it; a node that comes to a running job that has
// room has it start again, which does not count as a restart.
class Coordinator {
 public:
  // `own` is connected to this machine's launcher, which is node 0. Not null.
  Coordinator(JobRules rules, net::Listener listener, const net::Key& key, base::UniqueFd own);

  // Adds what advance() waits for, and when to call it at the latest.
  void add_to(std::vector<pollfd>& fds) const;
  std::optional<base::Deadline> deadline() const;
  void advance();
  // The verdict is given, and every node has got it or is lost.
  bool finished() const;

 private:
  using Clock = base::Deadline::Clock;

  struct Node {
    net::Connection connection;
    std::string address;           // of its end; "" of this machine's
    std::optional<Join> join{};    // once it takes part
    std::optional<int> member{};   // its number in the running job
    bool leaving = false;          // to be closed when everything is sent
    bool pinged = false;           // it has not answered yet
    std::map<int, int> signals{};  // how often it has reported each in the running job
  };
  // A node of the running job, also after it is lost.
  struct Member {
    Join join;
    int first_rank;
    int first_role_rank;
    std::optional<Result> result{};
    std::string problem{};                      // why it was lost
    bool tolerated = false;                     // it was lost, and the job went on without it
    int left_by = 0;                            // the signal that made it leave
    std::optional<Clock::time_point> failed{};  // when it was lost, or reported a failure
  };
  enum class Phase { gathering, running, over };

  Node& add_node(base::UniqueFd socket);
  void accept_all();
  bool accepts() const;
  void make_room();
  std::vector<Node*> find_ready() const;
  bool is_stranger(const Node& node) const;
  void drop_lost();
  void drop_strangers();
  void handle(Node& node, const std::string& text);
  void handle_join(Node& node, const Join& join);
  void tell_to_wait(Node& node);
  void refuse(Node& node, const std::string& reason);
  void report_refusal(const Node& node, const std::string& why, base::Deadline& next,
                      std::chrono::milliseconds pause);
  void report_signal(const Node& node, int signal);
  void handle_stranger_loss(const Node& node);
  void handle_loss(Node& node);
  void handle_leave(Node& node, int signal);
  bool awaits_end() const;
  void check_answers();
  void give_up(Node& node, const std::string& why);
  void handle_result(Node& node, const Result& result);
  void handle_signal(Node& node, int signal);
  void stop_others(const Node* from, const Failed& why = {});
  bool may_go_on_without(const Node& node) const;
  void lose(Node& node, std::string problem, Clock::time_point when);
  Joins present() const;
  void gather();
  void start();
  void check_gathering();
  std::string missing(std::string_view until) const;
  void finish_if_all_reported();
  launch::JobResult collect() const;
  void give(const Verdict& verdict);
  void send_to_all(const Message& message, const Node* except = nullptr);
  Member& member_of(const Node& node) { return members_[static_cast<std::size_t>(*node.member)]; }

  const JobRules rules_;
  std::optional<net::Listener> listener_;  // until the job is over
  const net::Key key_;
  std::vector<std::unique_ptr<Node>> nodes_;  // in the order in which they came
  const Node* own_;                           // this machine's
  std::vector<Member> members_;
  Phase phase_ = Phase::gathering;
  int restart_ = 0;
  int signal_ = 0;              // the first that a node reported
  std::map<int, int> signals_;  // how often each was passed on in the running job
  bool stopping_ = false;       // the members were asked to stop
  bool regrouping_ = false;     // since a node came, and nothing had failed
  std::optional<net::PortReservation> port_;
  Clock::time_point started_;
  base::Deadline join_deadline_;
  base::Deadline next_ping_;
  std::optional<base::Deadline> last_call_;
  base::Deadline next_notice_;
  base::Deadline next_stranger_notice_;
  base::Deadline next_refusal_notice_;
  base::Deadline flush_deadline_;
  base::Deadline accept_again_;  // not before: descriptors have run out
};

}  // namespace paceline::nodes
