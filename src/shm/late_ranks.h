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
struct AwaitedRank {
  int rank;  // the last one in this row; `peer` if the row is a circle
  bool is_circle = false;
  std::string chain{};  // "; rank 1 waits for rank 2; rank 2: its process 17 is stopped"
};
AwaitedRank follow_waits(const Region& region, int peer, const RankSet& among);

// Reports in the log that they keep other ranks waiting, if that is due. One of the ranks that wait
// for a rank does so: the first that claims its report.
void report_late_ranks(Region& region, int peer, WaitContext& context);

}  // namespace paceline::shm
