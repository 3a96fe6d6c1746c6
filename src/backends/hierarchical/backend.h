#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/hierarchical/remote_messages_backend.h"
#include "internode/group.h"

namespace paceline::backends {

// c10d over shared memory on each node, and an engine between nodes. The backend "paceline" in
// groups on several nodes.
class HierarchicalBackend : public RemoteMessagesBackend {
 public:
  // Makes an engine that connects the ranks of the group, which all call it with the same name.
  using MakeEngine = std::function<std::unique_ptr<internode::Engine>(const std::string& name)>;

  struct Parts {
    std::shared_ptr<internode::Group> group;
    distributed::StoreBarrier monitored_barrier;
    std::shared_ptr<internode::RemoteMessages> messages;
    MakeEngine make_engine;
    std::shared_ptr<const distributed::BackendRequest> request;
  };

  explicit HierarchicalBackend(Parts parts);

  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  // Throws UsageError: of an unknown sender, it is not known whether it is on this node.
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  std::unique_ptr<distributed::BucketReducer> make_bucket_reducer(
      const distributed::BucketReducer::Options& options) override;
  bool reduces_in_place(bool several_leaves) const override { return !several_leaves; }
  void check_peers(const std::vector<int>& needed, const shm::OpContext& op) override;
  bool supportsSplitting() const override { return true; }

 protected:
  void add_inherited(distributed::BackendRequest& part) const override;
  c10::intrusive_ptr<Backend> make_part(distributed::BackendRequest part) const override;

 private:
  bool is_remote(int rank) const;

  std::shared_ptr<internode::Group> nodes_;
  MakeEngine make_engine_;
  std::shared_ptr<const distributed::BackendRequest> request_;
  int bucket_reducers_ = 0;  // so far
};

// Connects the ranks of the request, which all call it.
HierarchicalBackend::Parts connect_nodes(distributed::BackendRequest request);

}  // namespace paceline::backends
