#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/deadline.h"

namespace paceline::distributed {

// A round in which each rank of a job has given a handle for its next reconfigure.
struct HandleRound {
  std::int64_t number;
  std::vector<std::string> handles;  // by rank
};

// Gives this rank's handle, and waits for the other ranks' handles. Rounds are tried in order from
// `first` on until one is complete. A process that has replaced another one does not know the
// present round: it finds the handles of the process before it and aborts their rounds, so that the
// other ranks go on to the next one.
//
// `store` has keys of this exchange only. `when_late`: called once, on another thread, if ranks
// have not come within a second. Throws Mismatch if ranks have finished, and Timeout, which names
// the ranks that did not come.
HandleRound exchange_handles(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                             const std::string& handle, std::int64_t first,
                             const base::Deadline& deadline, std::function<void()> when_late);

// This rank will not come to another round: the others throw if they wait for it.
void finish_handle_exchange(const c10::intrusive_ptr<c10d::Store>& store, int rank);

}  // namespace paceline::distributed
