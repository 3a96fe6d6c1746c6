#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <paceline/error.h>

#include "base/deadline.h"
#include "base/wait_report.h"
#include "distributed/backend.h"
#include "shm/membership/exchange.h"
#include "shm/membership/failure.h"

namespace paceline::distributed {

// An all-gather of small blobs over a c10d store whose keys are this group's own. For one use.
class StoreExchange final : public shm::Exchange {
 public:
  // `request` must outlive it.
  explicit StoreExchange(const BackendRequest& request) : request_(request) {}

  int rank() const override { return request_.rank; }
  int size() const override { return request_.size; }
  std::vector<std::string> all_gather(const std::string& blob,
                                      const base::Deadline& deadline) override;
  // For ranks that leave after all_gather: rank 0, which may serve the store, waits until the
  // others have called it too, for a few seconds at most.
  void let_others_read() noexcept;

 private:
  // If the store has not answered since the report before was due.
  void report_silence(base::WaitReport& report,
                      std::chrono::steady_clock::time_point answered) const;

  const BackendRequest& request_;
};

// Throws PeerLost: `ranks` of the group, whose processes ended, did not come.
[[noreturn]] void throw_lost(const shm::GlobalRanks& global_ranks, const shm::RankSet& ranks);

}  // namespace paceline::distributed
