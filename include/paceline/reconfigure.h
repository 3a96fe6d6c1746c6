#pragma once

/// @file
/// A world whose ranks change: InitOptions::enable_reconfigure. After the loss of a rank the others
/// go on, without it or with another process in its place.
///
/// Ranks find each other by handles, opaque strings that the program exchanges as it likes: over a
/// store, a file, a scheduler. They need no rank of an earlier world, and no rendezvous. Where
/// `paceline run --max-replacements` starts processes in place of failed ones, reconfigure(timeout)
/// exchanges them.

#include <paceline/api.h>
#include <paceline/distributed.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace paceline {

/// Whether the ranks of the group can change.
[[nodiscard]] PACELINE_API bool supports_reconfigure(const ProcessGroup& group = {});

/// This process's handle for its next reconfigure, which gives it another one. Throws UsageError if
/// the ranks of the group cannot change.
[[nodiscard]] PACELINE_API std::string get_reconfigure_handle(const ProcessGroup& group = {});

/// Makes the processes of `handles` the ranks of the group, in this order. Collective over these
/// processes, which all give the same handles and the same `uuid`, a number that none of them has
/// given to this group before. Other processes have no part in it. `timeout` is for this call;
/// unset: the group's.
///
/// This process's calls that are under way end with PeerLost. Models of DistributedDataParallel
/// must be wrapped anew. get_rank, get_world_size, topology and so on follow the new ranks, and so
/// do messages and errors.
///
/// Throws UsageError for invalid arguments, which change nothing. If the group cannot be formed, it
/// throws PeerLost or Timeout, which name ranks by their positions among the handles, or Mismatch:
/// processes have other handles or another uuid. The group has no ranks then, and reconfigure may
/// be called again with new handles.
PACELINE_API void reconfigure(std::int64_t uuid, const std::vector<std::string>& handles,
                              const ProcessGroup& group = {},
                              std::optional<std::chrono::milliseconds> timeout = {});

/// Makes the processes of this job the ranks of the world. Each process keeps the rank that it had
/// in init_process_group. Collective over all ranks: every process calls it after
/// init_process_group, and again after each PeerLost. A rank that goes on after another exception
/// calls it, too: if others have not come within a second, calls of the world that are under way
/// throw PeerLost there, since they may wait for this rank. It waits for the processes that
/// `paceline run --max-replacements` starts in place of failed ones, and tries again if a process
/// fails meanwhile.
///
/// The processes exchange handles over the store of the rendezvous. The store must outlive every
/// rank; the launcher's does. The world must be the first of each process, since a new process
/// cannot know how many there were before. This uses the uuids 0, 1, 2 and so on, so do not call
/// the other reconfigure in the same world.
///
/// Throws Mismatch, which names ranks that have finished, and will not come again: record() has
/// returned there without an error. Call barrier() before the end, so that the ranks end together.
/// Throws Timeout, which names the ranks that have not come within `timeout`; unset: the world's.
/// Throws UsageError if the ranks of the world cannot change.
PACELINE_API void reconfigure(std::optional<std::chrono::milliseconds> timeout = {});

}  // namespace paceline
