#pragma once

#include <vector>

#include "shm/p2p/request.h"

namespace paceline::shm {

// The sender's side of messages: headers in the send rings, data in payloads. Not thread-safe.
class MessageSender {
 public:
  MessageSender(Region& region, DeferredRings& rings) : region_(region), rings_(rings) {}

  // Writes the header of a request and its payload; false if the send ring is full. Throws Error
  // without touching the request if there is no room for the payload.
  bool announce(P2PRequest& request);
  // Moves an announced request on; whether that was possible.
  bool fill(P2PRequest& request);
  // Keeps the payload of a request that has ended until the peer has read it.
  void release(P2PRequest& request);
  // Frees the payloads that peers have read.
  void collect();
  // The peer gets no more of a request that is under way.
  void withdraw(P2PRequest& request);
  // Leaves the payloads that peers may still read to them.
  void retire();

 private:
  Region& region_;
  DeferredRings& rings_;
  std::vector<Payload*> payloads_;  // sent, and perhaps not read yet
};

}  // namespace paceline::shm
