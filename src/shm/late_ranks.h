#pragma once

#include <string>

#include "shm/region.h"
#include "shm/wait_context.h"

namespace paceline::shm {

// The ranks that a wait is for, and where they are: for a Timeout, and for the log before it.
struct LateRanks {
  RankSet missing{};         // of the group; none if ranks on other nodes are late
  RankSet ranks{};           // the missing ones that do not wait for another missing one
  RankSet on_other_nodes{};  // global ranks
  std::string names;         // "ranks 1 and 2"
  std::string where;         // "barrier, call 2 of group world; rank 1: its last was call 1, ..."
};

// `peer`: the rank whose word `context` waits for now.
LateRanks find_late_ranks(const Region& region, int peer, const WaitContext& context);

// What `peer` is late for: it may wait for a message of one of the ranks `among`, and that one too.
// All are global ranks, on any node.
struct AwaitedRank {
  int rank;  // the last one in this row; `peer` if the row is a circle
  // "; rank 1 waits for rank 2; rank 2: its process 17 is stopped", and advice for a circle.
  std::string chain{};
};
AwaitedRank follow_waits(const Region& region, int peer, const RankSet& among);

// A thread's wait for a message to or from a global rank.
class Awaiting {
 public:
  Awaiting(Region& region, int global_rank) : region_(region), global_rank_(global_rank) {}
  Awaiting(const Awaiting&) = delete;
  Awaiting& operator=(const Awaiting&) = delete;
  ~Awaiting() {
    if (is_shown_) region_.end_awaiting(global_rank_);
  }

  // Lets other ranks know of it, until it ends. Call now and then once it has lasted for a while:
  // other threads may wait too.
  void show() {
    region_.begin_awaiting(global_rank_);
    is_shown_ = true;
  }

 private:
  Region& region_;
  int global_rank_;
  bool is_shown_ = false;
};

// Reports in the log that they keep other ranks waiting, if that is due. One of the ranks that wait
// for a rank does so: the first that claims its report.
void report_late_ranks(Region& region, int peer, WaitContext& context);

}  // namespace paceline::shm
