#pragma once

#include <poll.h>

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/job.h"
#include "launch/non_blocking_writer.h"
#include "launch/signal_forwarding.h"
#include "net/connection.h"
#include "net/connector.h"
#include "nodes/coordinator.h"
#include "nodes/messages.h"

namespace paceline::nodes {

struct SessionOptions {
  // Where the coordinator listens.
  std::string host;
  int port = 0;
  // Whether this launcher is the coordinator; unset: if it is the first on the machine that has the
  // address.
  std::optional<bool> coordinates{};
  Join join{};  // what this node asks for
  // If it is the coordinator. An empty master_addr becomes this machine's address; `endpoint` is
  // set.
  JobRules rules{};
  net::Key key{};
  std::chrono::milliseconds answer_limit =
      std::chrono::seconds(10);  // of what accepts a connection
  bool has_secret = false;       // or else anybody knows the key
};

// One launcher's part in a job on several nodes: finds the coordinator, or is it; learns when to
// start processes, has run_job report failures and signals to the others, and gets the verdict.
class NodeSession : public launch::OtherNodes {
 public:
  // `writers`: what the processes have left in them is written on while this waits. `print` gets
  // lines for the user. No pointer is owned. Throws UsageError and Error.
  NodeSession(SessionOptions options, launch::SignalForwarding* signals,
              std::vector<launch::NonBlockingWriter*> writers,
              std::function<void(const std::string&)> print);

  // Waits until processes are to be started; nullopt if the job is over before. Throws Error if the
  // coordinator refuses this node, cannot be reached in time, or is lost.
  std::optional<Start> await_start();
  // Reports how they ended, and waits for all nodes. Throws Error if the coordinator was lost.
  Verdict await_verdict(const Result& result);
  // How the job has ended; after await_start() has returned nullopt.
  const Verdict& verdict() const { return *verdict_; }

  // For run_job.
  std::chrono::milliseconds add_to(std::vector<pollfd>& fds) const override;
  std::vector<launch::NodeRequest> receive() override;
  void report_failure(const std::vector<int>& blamed_ranks) override;
  void report_signal(int signal) override;

 private:
  void find_role();
  void await_name(const std::string& why);
  void coordinate(net::Listener listener);
  void wait();
  void advance();
  void connect();
  void listen_again();
  bool is_over() const;
  bool is_joined() const;
  void check_joining();
  std::string endpoint() const;
  std::string described_endpoint() const;
  void handle(const Message& message);
  void handle_signals();
  bool may_leave(int signal) const;
  void fail(std::string why);
  void leave();

  const SessionOptions options_;
  launch::SignalForwarding* const signals_;
  const std::vector<launch::NonBlockingWriter*> writers_;
  const std::function<void(const std::string&)> print_;
  std::optional<Coordinator> coordinator_;
  std::optional<net::Connector> connector_;
  std::optional<net::Connection> connection_;
  std::optional<base::Deadline> find_role_again_;  // set until the name of node 0 is known
  base::Deadline join_deadline_;
  base::Deadline next_notice_;
  base::Deadline answer_deadline_;  // of an end that has accepted the connection
  bool may_listen_ = false;         // this machine has the address, and its port was in use
  int closed_ = 0;                  // connections that an end like a launcher's closed unanswered
  std::string why_not_;             // the last attempt to join failed
  int left_by_ = 0;                 // the signal that took this node out of the job
  std::map<int, int> own_signals_;  // how often each came during this wait
  std::vector<launch::NodeRequest> requests_;
  std::optional<Start> start_;
  std::optional<Verdict> verdict_;
  std::string failure_;  // why this node cannot take part any more
};

}  // namespace paceline::nodes
