#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "launch/error_file.h"

namespace paceline::launch {

// With this code a process ends that has saved its state because the job was asked to end: to be
// started again later. EX_TEMPFAIL of sysexits.h.
constexpr int kPreemptedCode = 75;

// Whether a process has failed that ended with this status, as wait() gives it.
bool is_failure(int status);

struct RankResult {
  int status = 0;                    // as wait() gives it
  std::chrono::nanoseconds ended{};  // after the start of the job on its node
  bool stopped = false;              // it ended after the job was asked to stop
  bool tolerated = false;            // it failed, and the job went on without it
  bool lost = false;                 // its node was lost; nothing else is known of it
  std::optional<int> late_for{};     // it was killed, since the Timeout of this rank named it
  std::optional<ErrorFile> error;
  std::vector<std::string> last_lines;
  bool pending = false;  // a process of spawn that ended before it called the function
};

// A node of a job that has several.
struct NodeResult {
  std::string host;
  int first_rank = 0;
  int processes = 0;
  std::string problem;  // why it was lost or could not start its processes; empty if it could
};

struct JobResult {
  std::vector<RankResult> ranks;
  int signal = 0;                   // the signal that was passed on and ended the job, if one did
  std::vector<NodeResult> nodes{};  // empty: there is one
  std::string host{};               // the only node's; empty: it is not to be named

  // The rank whose failure ended the job; empty if no rank failed before the job was asked to stop,
  // but for those that were tolerated, which count nowhere here.
  // A rank that loses a peer may end before the peer does. So this is the earliest of those that
  // the first failed rank blames in its error file, or that these blame, and so on, which failed by
  // itself and blames nobody. If there is none, it is one that ended with code 0, which failed the
  // others by ending early.
  std::optional<int> first_failed() const;

  // Whether all ranks but the tolerated ones have ended without a failure, and some of them with
  // kPreemptedCode.
  bool preempted() const;

  // 0, or the code of the rank that failed first, or kPreemptedCode if preempted, or 128 + signal.
  // If the rank that failed first has ended early without a failure, the code of the first rank
  // that failed.
  int exit_code() const;

  // The node of a rank; empty if there is only one.
  std::optional<int> node_of(int rank) const;
};

// The code for a status as wait() gives it: 128 + signal for a death by a signal.
int exit_code_of(int status);

}  // namespace paceline::launch
