#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "launch/job_result.h"

namespace paceline::nodes {

// What the launchers of a job's nodes say to each other. One of them, the coordinator, has a
// connection to each; a message is a JSON object with the member "type".

// A node wants to take part. Its first message.
struct Join {
  std::string version;  // of Paceline; has to be the coordinator's
  std::string job;      // --rdzv-id
  std::string host;     // its name, for messages
  int processes = 1;
  int min_nodes = 1;  // --nnodes
  int max_nodes = 1;
  std::optional<int> node{};  // --node-rank; empty: the coordinator chooses
  // Node 0 decides these. What this node's flags say, which may be nothing.
  std::optional<int> max_restarts{};
  bool tolerate_loss = false;
  std::string role = "default";  // --role
};

// The coordinator has accepted the node, which waits for the start now.
struct Welcome {};

// The coordinator does not let the node take part, or not any more.
struct Refuse {
  std::string reason;
};

// The processes are to be started. The answer is a Result.
struct Start {
  int restart = 0;
  int max_restarts = 0;
  bool tolerate_loss = false;
  int nodes = 1;
  int node = 0;
  int first_rank = 0;
  int world_size = 1;
  int first_role_rank = 0;  // among the ranks of the nodes with the same role
  int role_world_size = 1;
  std::string job;  // TORCHELASTIC_RUN_ID
  std::string master_addr;
  int master_port = 0;
};

// A process of the node has failed; from the coordinator: the job is to be stopped.
struct Failed {
  std::vector<int> blamed_ranks{};  // that its error is about
};

// The node passes on a signal to its processes; from the coordinator: it is to do so.
struct Signal {
  int number = 0;
};

// A signal ends the node's launcher, and the job goes on without the node.
struct Leave {
  int signal = 0;
};

// How the node's processes have ended. `ranks` are by local rank; empty if they could not be
// started, for the reason `problem`.
struct Result {
  std::vector<launch::RankResult> ranks;
  std::string problem;
};

// How the job has ended, on all nodes; or that it will be started again.
struct Verdict {
  bool restarts = false;
  int exit_code = 0;
  int signal = 0;      // that ended the job; 0: none did
  std::string report;  // to be printed; may be empty
};

// Something that the launcher should print.
struct Notice {
  std::string text;
};

// The coordinator asks whether a launcher still runs; the same message is the answer.
struct Ping {};

// Of a job, or of a launcher that leaves it.
Verdict stopped_by(int signal);

using Message = std::variant<Join, Welcome, Refuse, Start, Failed, Signal, Leave, Result, Verdict,
                             Notice, Ping>;

std::string encode(const Message& message);
// nullopt for text that no encode() of this version makes.
std::optional<Message> decode(std::string_view text);

}  // namespace paceline::nodes
