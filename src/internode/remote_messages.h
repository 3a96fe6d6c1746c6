#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "internode/engine.h"
#include "shm/late_ranks.h"
#include "shm/p2p/request.h"
#include "shm/region.h"

namespace paceline::internode {

// Messages between ranks on different nodes, any number at once, beside the calls of the group;
// what shm::Mailbox is on one node, but for messages from any rank. A header goes first, since an
// engine may end the process if both ends of a message do not agree on its size.
//
// Thread-safe. In a forked child, only destroy it.
class RemoteMessages {
 public:
  using Message = shm::P2PMessage;
  // Called once for each request, on any thread. Must not wait, nor close the messages.
  using Done = std::function<void(std::exception_ptr error)>;
  class Request;

  static constexpr int kTags = Engine::kTags / 2;  // from 0

  // `region`: this node's, which makes failures known. `ranks`: the global ranks of the group.
  RemoteMessages(std::shared_ptr<shm::Region> region, shm::GlobalRanks ranks, int rank,
                 std::unique_ptr<Engine> engine);
  RemoteMessages(const RemoteMessages&) = delete;
  RemoteMessages& operator=(const RemoteMessages&) = delete;
  ~RemoteMessages();

  // `message.peer` is a rank of the group on another node, or kAnyRank in a receive if the engine
  // takes that. `memory` keeps the message's data: a request that has ended with an error may still
  // use it. Throw UsageError for an invalid tag, and the group's failure.
  std::shared_ptr<Request> send(const Message& message, std::shared_ptr<const void> memory,
                                Done done);
  std::shared_ptr<Request> receive(const Message& message, std::shared_ptr<const void> memory,
                                   Done done);
  // Of a request that is complete: the sender of what was received.
  static int sender(Request& request);
  // The wait of a thread for a request, for other ranks; null if any rank may send.
  std::unique_ptr<shm::Awaiting> awaiting(Request& request);
  // Call now and then until a request has ended: ends it if the group has failed, or if its time is
  // over, which fails the group. Returns whether it has ended.
  bool check(Request& request);
  // Ends all requests with an error. Afterwards every `done` is destroyed.
  void close();

 private:
  std::shared_ptr<Request> post(const std::shared_ptr<Request>& request);
  void start(Request& request);
  std::unique_ptr<Engine::Transfer> transfer(Request& request, bool is_payload);
  void handle(Request& request, bool is_payload);
  void advance(Request& request, bool is_payload);
  static void end(Request& request, const std::exception_ptr& error);
  static void finish(Request& request, const std::exception_ptr& error);
  [[noreturn]] void fail(const Request& request, const shm::Failure& failure);
  void check_left(Request& request);
  shm::RankSet peer_of(const Request& request) const;
  std::string describe(const Request& request) const;

  const std::shared_ptr<shm::Region> region_;
  const shm::GlobalRanks global_ranks_;
  const int rank_;
  std::unique_ptr<Engine> engine_;

  std::mutex mutex_;                              // guards what follows
  std::list<std::shared_ptr<Request>> requests_;  // finished ones are removed later
  std::map<int, std::uint32_t> payloads_sent_;    // by receiver
};

}  // namespace paceline::internode
