#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/paceline/backend.h"
#include "internode/group.h"
#include "internode/remote_messages.h"

namespace paceline::backends {

// c10d over shared memory on each node, and an engine between nodes. The backend "paceline" in
// groups on several nodes.
class HierarchicalBackend final : public PacelineBackend {
 public:
  // Makes an engine that connects the ranks of the group, which all call it with the same name.
  using MakeEngine = std::function<std::unique_ptr<internode::Engine>(const std::string& name)>;

  HierarchicalBackend(std::shared_ptr<internode::Group> group,
                      std::shared_ptr<internode::RemoteMessages> messages, MakeEngine make_engine);

  ~HierarchicalBackend() override;

  void shutdown() override;
  // Fails the group if a rank is missing.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  // Throws UsageError: of an unknown sender, it is not known whether it is on this node.
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  bool supportsSplitting() const override { return false; }
  std::unique_ptr<distributed::BucketReducer> make_bucket_reducer(
      const distributed::BucketReducer::Options& options) override;
  bool reduces_in_place(bool several_leaves) const override { return !several_leaves; }
  void check_peers(const std::vector<int>& needed, const shm::OpContext& op) override;
  // The next world's rendezvous cannot watch processes on other machines.
  std::shared_ptr<const shm::Membership> membership() const override { return nullptr; }

 private:
  bool is_remote(int rank) const;
  int checked_peer(int rank) const;
  WorkPtr remote_message(const Kind& kind, const Tensors& tensors, int peer, int tag);

  std::shared_ptr<internode::Group> nodes_;
  std::shared_ptr<internode::RemoteMessages> messages_;
  MakeEngine make_engine_;
  int bucket_reducers_ = 0;  // so far
};

}  // namespace paceline::backends
