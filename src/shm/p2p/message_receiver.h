#pragma once

#include <deque>

#include "shm/p2p/request.h"

namespace paceline::shm {

// The receiver's side of messages: takes headers out of the send rings, matches them with requests
// and copies their data. Fails the group if a peer's message is malformed, or is not what the
// request expects. Not thread-safe.
class MessageReceiver {
 public:
  MessageReceiver(Region& region, DeferredRings& rings) : region_(region), rings_(rings) {}

  // Whether there were any.
  bool take_headers();
  // Whether a message has arrived for the request, which is its own from then on.
  bool match(P2PRequest& request);
  // Copies the next chunk of a matched request; whether there was one.
  bool drain(P2PRequest& request);

 private:
  struct Arrival {
    int from;
    MessageHeader header;
    Payload* payload;
    std::byte* source;
  };

  void take_header(int from, MessageHeader header);
  [[noreturn]] void fail(const P2PRequest& request, FailureKind kind, const RankSet& ranks,
                         const std::string& text);

  Region& region_;
  DeferredRings& rings_;
  std::deque<Arrival> arrivals_;  // announced, and not matched yet
};

}  // namespace paceline::shm
