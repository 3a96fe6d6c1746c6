#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "internode/engine.h"

namespace paceline::internode {

// If a rank aborts a step, messages may have been started at one end only: they would occupy memory
// until the engine ends. So after the epoch of such a step, the two ranks of a lane tell each other
// which messages they have started, and each starts the ends that are missing: it sends zeros, and
// drops what it receives.
//
// For one rank, on the thread that uses its bucket level.
class UnmatchedMessages {
 public:
  // `peers`: the ranks of this one's lane on other nodes. `ring` is called, on any thread, when
  // advance() may do something. The engine must outlive this object.
  UnmatchedMessages(Engine& engine, std::vector<int> peers, std::function<void()> ring);
  UnmatchedMessages(const UnmatchedMessages&) = delete;
  UnmatchedMessages& operator=(const UnmatchedMessages&) = delete;
  ~UnmatchedMessages();

  // Call before a step's transfers are added. Nothing of earlier steps is added afterwards.
  void begin_step(std::uint32_t step, std::uint32_t epoch);
  // Call before a transfer with these messages is started.
  void add(std::uint32_t tag, const std::vector<Engine::Message>& sends,
           const std::vector<Engine::Message>& receives);
  // Makes progress without waiting. Returns whether the next transfer may start. It must not while
  // messages of several epochs are left: a rank that throws in every step may never get as far as
  // to start its ends of them.
  bool advance();
  // The rank for which the oldest exchange waits, if that is known.
  std::optional<int> awaited() const;

 private:
  class Exchange;
  // What this rank and another move with a tag.
  struct Started {
    std::int32_t rank;  // the other one
    std::uint32_t tag;
    std::uint64_t sent;  // bytes
    std::uint64_t received;
  };

  Started& entry(int rank, std::uint32_t tag);

  Engine& engine_;
  std::vector<int> peers_;
  std::function<void()> ring_;
  std::uint32_t epoch_ = 0;
  // The last step with a transfer, and its transfers. They are complete on all ranks once a later
  // step of the same epoch starts one.
  std::uint32_t step_ = 0;
  std::vector<Started> started_;
  std::list<Exchange> exchanges_;  // under way
};

}  // namespace paceline::internode
