#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <paceline/error.h>

#include "shm/membership/rank_set.h"

namespace paceline::internode {

// Carries bytes between ranks on different nodes. Ranks are group ranks. In a forked child an
// engine must be leaked, because it may have threads and locks; its transfers may be destroyed.
class Engine {
 public:
  // Of a message that is received, if the engine takes them from any rank.
  static constexpr int kAnyRank = -1;

  struct Message {
    int rank;  // to which it goes, or from which it comes
    std::byte* data;
    std::size_t bytes;  // the same at both ends
  };

  // Messages that are complete together.
  class Transfer {
   public:
    // Nothing accesses the memory afterwards, and `when_done` is not called any more. If the
    // transfer was not done, the engine is of no use afterwards.
    virtual ~Transfer() = default;
    // Call when it is done: throws Error if it has failed; PeerLost if the engine knows which rank
    // is lost.
    virtual void check() = 0;
    // The rank whose message is waited for now, if that is known. Any thread may call it.
    virtual std::optional<int> awaited() const { return std::nullopt; }
    // Call when it is done: where its one message from kAnyRank came from.
    virtual int sender() const { return kAnyRank; }
    // Lets a transfer that may not be done go on without its owner: `when_done` is not called any
    // more, and the engine keeps `memory`, that of the messages, until it is done or the engine
    // ends. Afterwards, only destroy the transfer.
    virtual void abandon(std::shared_ptr<const void> memory) = 0;
  };

  static constexpr std::size_t kOrderedBytes = 2048;
  // Tags are smaller.
  static constexpr std::uint32_t kTags = std::uint32_t{1} << 28;

  virtual ~Engine() = default;

  // Connects to these ranks, each of which has to do the same.
  virtual std::unique_ptr<Transfer> connect(const std::vector<int>& ranks,
                                            std::function<void()> when_done) = 0;
  // Both ends of a message give the same tag. Messages of one rank with one tag arrive in the order
  // in which both ends have started them, if they have at most kOrderedBytes. `when_done` is called
  // once, on any thread, as soon as the transfer is complete or has failed, even at once; it must
  // not wait. Nothing of a transfer may be moved before each of its ranks has started one with this
  // rank, and before earlier transfers with one of its ranks are under way.
  virtual std::unique_ptr<Transfer> start(std::uint32_t tag, const std::vector<Message>& sends,
                                          const std::vector<Message>& receives,
                                          std::function<void()> when_done) = 0;
  virtual bool takes_any_rank() const { return false; }
  // Runs `body`, which takes a lock and calls start(). An engine that one thread only may call runs
  // it there: no other may wait for that thread while it holds the lock.
  virtual void run_locked(const std::function<void()>& body) { body(); }
};

// The global ranks that a transfer's error blames: by default its peers, since an engine seldom
// knows.
inline shm::RankSet culprits_of(const std::exception& error, const shm::RankSet& peers) {
  const auto* const lost = dynamic_cast<const PeerLost*>(&error);
  return lost == nullptr ? peers : shm::RankSet(lost->ranks());
}

}  // namespace paceline::internode
