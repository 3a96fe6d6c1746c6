#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "internode/engine.h"
#include "internode/node_links.h"
#include "internode/node_map.h"
#include "shm/collectives/collectives.h"
#include "shm/collectives/fingerprint.h"
#include "shm/collectives/group.h"
#include "shm/region.h"

namespace paceline::internode {

// The collectives of ranks on several nodes: through shared memory on each node, and by an Engine
// between them. Results are the same, bit for bit, as if all ranks were on one node.
//
// Before an Engine moves anything for a call, the leaders of the nodes have compared the calls of
// all ranks. docs/multi-node.md describes what each call moves between nodes.
class Group final : public shm::Collectives {
 public:
  // Collective. `region`: of this node's ranks. `ranks`: the global ranks of `map`. `connections`:
  // to the other leaders, on a leader; else none. Throws UsageError if the ranks are spread over
  // the nodes so that their sums have more than kMaxSources parts.
  Group(std::shared_ptr<shm::Region> region, NodeMap map, shm::GlobalRanks ranks,
        NodeLinks::Connections connections, std::unique_ptr<Engine> engine);

  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() override;

  int rank() const override { return map_.rank(); }
  int size() const override { return map_.size(); }
  const shm::GlobalRanks& global_ranks() const override { return global_ranks_; }
  const std::shared_ptr<shm::Region>& region() const { return local_.region(); }
  // Of this node's ranks.
  shm::Group& local() { return local_; }
  const NodeMap& map() const { return map_; }
  // To the other nodes; on a leader only.
  NodeLinks& links() { return *links_; }
  // The stream of the links for something else than calls. Collective.
  std::uint32_t new_stream() { return ++streams_; }

  void barrier() override;
  void broadcast(void* data, std::size_t count, shm::DataType type, int root) override;
  void all_reduce(const void* input, void* output, std::size_t count, shm::DataType type,
                  shm::ReduceOp op) override;
  void reduce(const void* input, void* output, std::size_t count, shm::DataType type,
              shm::ReduceOp op, int root) override;
  void gather(shm::Input input, std::span<const shm::Output> outputs, shm::DataType type,
              int root) override;
  void scatter(std::span<const shm::Input> inputs, shm::Output output, shm::DataType type,
               int root) override;
  void all_gather(shm::Input input, std::span<const shm::Output> outputs,
                  shm::DataType type) override;
  void reduce_scatter(std::span<const shm::Input> inputs, shm::Output output, shm::DataType type,
                      shm::ReduceOp op) override;
  void all_to_all(std::span<const shm::Input> inputs, std::span<const shm::Output> outputs,
                  shm::DataType type) override;
  [[noreturn]] void fail(const shm::RankSet& ranks, const std::string& text) override;

 private:
  friend class BucketLevel;
  class Call;
  class Wait;
  class GatherWait;
  class TransferWait;
  class Exchange;
  class LaneReduction;
  using Messages = std::vector<Engine::Message>;
  using Memory = std::unique_ptr<std::byte[]>;

  // What this node's ranks show each other of a call, in their region. Zero-initialised.
  struct Board {
    struct alignas(shm::kCacheLine) Line {
      shm::Word arrived;           // the last call, by its number
      shm::AtomicRankSet awaited;  // the global ranks on other nodes that the rank waits for
    };
    std::array<Line, shm::kMaxRanks> ranks;
  };
  // How many elements this rank gives to each rank and expects from each.
  struct OwnSplits {
    std::vector<std::uint64_t> to;
    std::vector<std::uint64_t> from;
  };
  // How a tensor is divided for the exchange between nodes.
  struct Division {
    std::size_t count;  // elements
    std::size_t element_size;
    int lanes;           // local rank l exchanges lane l; ranks beyond the lanes exchange nothing
    bool whole = false;  // each node reduces all of a lane; else each its slice
    int nodes = 1;

    shm::Slice lane(int lane) const;
    // A node's slice of a lane, in elements of the lane.
    shm::Slice slice(const shm::Slice& lane, int node) const;
  };

  // A zero-initialised T that the ranks of this node share until the group ends. Collective over
  // them.
  template <typename T>
  T& share() {
    return *static_cast<T*>(share_bytes(sizeof(T)));
  }
  void* share_bytes(std::size_t bytes);
  shm::RankSet find_late(const Topic& topic) const;
  // Compares the calls of all ranks.
  void agree(const OwnSplits* splits);
  void compare(const std::vector<std::string>& shares, bool uneven);
  [[noreturn]] void fail_transfer(const std::exception& error, const shm::RankSet& peers,
                                  bool has_started);
  // The board's, once there is one. `rank`: of this node.
  shm::AtomicRankSet& awaited(int rank) const {
    return board_.load()->ranks[static_cast<std::size_t>(rank)].awaited;
  }
  void set_awaited(const shm::RankSet& ranks) const { awaited(local_.rank()).store(ranks); }
  // The other nodes would learn it a little later, and not at all if this process ends at once.
  void tell_failure() noexcept;
  std::string describe_call() const;
  // To the node's other ranks.
  void show_call();
  // What other nodes call, while this one does not: the ranks of these nodes, by group rank, and
  // the call of one of them. None unless each rank, there and here, uses the group from one thread.
  struct CallElsewhere {
    std::vector<int> ranks;
    shm::CollectiveFingerprint call;
  };
  std::optional<CallElsewhere> call_elsewhere() const;
  bool uses_one_thread() const;  // each rank of this node
  shm::OpContext context() const {
    return {call_.sequence == 0 ? "connect" : name(call_.operation), call_.sequence};
  }
  // Leaders gather a text of each node.
  std::vector<std::string> gather_texts(const Topic& topic, std::string own);

  static Memory allocate(std::size_t bytes) {
    return std::make_unique_for_overwrite<std::byte[]>(bytes);
  }
  // Moves messages between nodes. `number` is the same at both ends of each, and differs between
  // the exchanges of one call that are under way.
  void exchange(const Messages& sends, const Messages& receives, std::uint32_t number);
  OwnSplits splits_of(std::span<const shm::Input> to, std::span<const shm::Output> from) const;

  std::size_t local_size() const { return map_.here().size(); }
  int lane_peer(int node) const { return map_.rank_at(node, map_.local_rank()); }
  // Parts that are sent between ranks of this node; by local rank.
  template <typename Part>
  std::vector<Part> local_parts(std::span<const Part> parts) const;
  Division divide(std::size_t count, shm::DataType type) const;
  Division divide_sums(std::size_t count, shm::DataType type) const;
  // The same for a lane of `count` sums, which is a tensor of its own.
  Division divide_lane(std::size_t count, shm::DataType type) const;
  bool is_whole_less(std::size_t sum_bytes, std::size_t result_bytes, std::size_t count) const;
  // A slice of this rank's lane, which is at `lane`, to or from its peer on a node.
  Engine::Message slice_message(int node, std::byte* lane, const shm::Slice& slice,
                                std::size_t element_size) const {
    return {lane_peer(node), lane + slice.begin * element_size, slice.count() * element_size};
  }
  // Every lane's owner has its lane in `data`; then all ranks of the node have all.
  void share_lanes(const Division& division, std::byte* data, shm::DataType type);
  // Each node has its slice of this rank's lane. Afterwards node `to` has all of the lane; without
  // `to`, every node has.
  void gather_slices(const Division& division, std::byte* lane, std::optional<int> to,
                     std::uint32_t number);
  // Makes the parts of this node from one source for each of its ranks: one array after the other,
  // of sums if has_sums(), else of elements.
  void accumulate(std::span<const std::byte* const> sources, shm::DataType type, shm::ReduceOp op,
                  std::size_t count, std::byte* sums) const;
  // From what accumulate made on each node, or from sums, whose type is then `type`.
  void complete(std::span<const std::byte* const> sums, shm::DataType type, shm::ReduceOp op,
                std::size_t count, void* result) const;
  bool has_sums() const;
  std::size_t sum_size(shm::DataType type) const;
  std::size_t bytes_of_sums(int node, shm::DataType type, std::size_t count) const;
  template <typename Share>
  void reduce_in_parts(const void* input, std::size_t count, shm::DataType type, shm::ReduceOp op,
                       std::optional<int> to, Share share);

  shm::Group local_;
  NodeMap map_;
  shm::GlobalRanks global_ranks_;
  struct PartOfSum {
    int node;
    std::size_t index;  // of the node's
    int first_leaf;
  };
  std::vector<PartOfSum> parts_;  // of all nodes, ascending
  std::size_t most_parts_ = 1;    // of a node
  std::atomic<Board*> board_ = nullptr;
  shm::CollectiveFingerprint call_;  // the current one
  shm::Word gathered_ = 0;           // gathers that are complete
  std::uint32_t streams_;            // of the links, so far
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<NodeLinks> links_;  // on a leader
};

}  // namespace paceline::internode
