#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "base/wait_report.h"
#include "shm/membership/failure.h"

namespace paceline::shm {

// How long a call may wait in total. The clock starts only when a wait sleeps or polls.
struct CallDeadline {
  std::chrono::milliseconds timeout;
  std::optional<base::Deadline> deadline{};
};

// Describes a wait, for errors. Lives on the stack. Only slow waits call poll() and check(); the
// others are queried only after a problem.
class WaitContext {
 public:
  // `call_deadline` is the call's, which may wait several times.
  WaitContext(OpContext what, CallDeadline& call_deadline) : op(what), deadline(call_deadline) {}
  // The ranks of the group that have not done what is waited for.
  virtual RankSet missing() const = 0;
  // The global ranks on other nodes that the missing ranks wait for. If there are any, they are
  // late, not the missing ranks.
  virtual RankSet missing_on_other_nodes() const { return {}; }
  // Whether the wait goes on past its deadline for a moment, in which other ranks may report more
  // than this rank knows. Called at each check after the deadline.
  virtual bool may_learn_more() { return false; }
  virtual std::string describe_on_other_nodes(const RankSet& ranks) const {
    return describe_ranks(ranks);
  }
  // "all_reduce of 10 float32, call 17 of group world".
  virtual std::string describe() const = 0;
  // The last call of `rank`; empty if unknown or not useful.
  virtual std::string last_seen(int /*rank*/, bool /*missing*/) const { return ""; }
  // Whether a rank that is not missing waits too: else it has yet to come to where this rank waits.
  virtual bool waits(int /*rank*/) const { return true; }
  // Throws if waiting for `peer` is pointless for a reason that the region does not know.
  virtual void check(int /*peer*/) const {}
  // Whether this rank has other work while it waits, which poll() drives. While poll() returns
  // true, the wait calls it again and does not sleep. Otherwise the wait listens at this rank's
  // doorbell: a peer rings it when poll() may have work, and when the wait may be over.
  virtual bool polls() const { return false; }
  virtual bool poll() { return false; }

  OpContext op;
  CallDeadline& deadline;
  base::WaitReport report{};

 protected:
  ~WaitContext() = default;
};

}  // namespace paceline::shm
