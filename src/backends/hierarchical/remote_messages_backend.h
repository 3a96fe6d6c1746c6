#pragma once

#include <chrono>
#include <memory>

#include "backends/hierarchical/request_watch.h"
#include "backends/paceline/backend.h"
#include "distributed/store_barrier.h"
#include "internode/remote_messages.h"

namespace paceline::backends {

// What backends have in common whose ranks do not all share memory: their messages to other ranks,
// and what needs shared memory.
class RemoteMessagesBackend : public PacelineBackend {
 public:
  ~RemoteMessagesBackend() override;

  bool supportsSplitting() const override { return false; }
  // The next world's rendezvous cannot watch processes on other machines.
  std::shared_ptr<const shm::Membership> membership() const override { return nullptr; }

 protected:
  static constexpr Kind kSend{c10d::OpType::SEND, "send", "paceline:send"};
  static constexpr Kind kReceive{c10d::OpType::RECV, "recv", "paceline:recv"};

  // As PacelineBackend, with the messages to ranks outside of `local`, and all ranks' barrier.
  RemoteMessagesBackend(const std::shared_ptr<shm::Collectives>& group,
                        std::shared_ptr<shm::Group> local,
                        distributed::StoreBarrier monitored_barrier,
                        std::shared_ptr<internode::RemoteMessages> messages);

  // Throws UsageError unless it is another rank of the group.
  int checked_peer(int rank) const;
  // `peer`: see RemoteMessages.
  WorkPtr remote_message(const Kind& kind, const Tensors& tensors, int peer, int tag);
  void leave() override;
  void pass_monitored_barrier(std::chrono::milliseconds timeout, bool wait_all_ranks) override;

 private:
  const shm::GlobalRanks global_ranks_;
  distributed::StoreBarrier monitored_barrier_;
  std::shared_ptr<internode::RemoteMessages> messages_;
  std::shared_ptr<RequestWatch> watch_;
};

}  // namespace paceline::backends
