#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "shm/p2p/message_receiver.h"
#include "shm/p2p/message_sender.h"

namespace paceline::shm {

// Messages from one rank of a region to another, any number at once, beside the group's
// collectives. A message goes to the earliest request for its sender and tag, or for any sender and
// its tag, that its receiver has made; messages of one sender with one tag arrive in the order in
// which they were sent. Both sides must agree on type and count.
//
// Thread-safe. Requests move on only while some thread is in `pump`.
class Mailbox {
 public:
  using Message = P2PMessage;
  static constexpr int kAnyRank = Message::kAnyRank;

  // Called once for each request, by a thread in `pump`, `move` or `close`: when a message has been
  // sent, so that its memory may change, or received; or with the error that ended it. `peer` is
  // who sent it or to whom. Must not throw, and holds up the other messages while it runs.
  using Done = std::function<void(std::exception_ptr error, int peer)>;

  explicit Mailbox(std::shared_ptr<Region> region);
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  // Forgets the requests under way: close() first.
  ~Mailbox();

  // Throw UsageError for a peer or tag that cannot be, and the group's failure.
  void send(const Message& message, Done done);
  void receive(const Message& message, Done done);

  bool idle() const;
  // One attempt to move messages: whether no request is left. Throws UsageError in a forked child.
  bool move();
  // Ends the requests under way with an error. Peers that wait for them find that this rank has
  // left.
  void close();
  // Moves messages until `enough` says so. Errors go to the requests; throws UsageError in a forked
  // child only.
  void pump(const std::function<bool()>& enough);
  // Wakes the threads of this process that are in `pump`, to ask `enough` again.
  void wake() { region_->ring(region_->rank()); }

 private:
  using Request = P2PRequest;
  using Requests = std::list<Request>;
  struct End {
    Done done;
    std::exception_ptr error;
    int peer;
  };
  using Ended = std::vector<End>;

  void check(bool sending, const Message& message) const;
  void post(Requests& requests, const Message& message, Done done, bool sending);
  bool move_some();
  // What `action` returns; what it throws fails the group and ends all requests.
  template <typename F>
  bool with_lock(F&& action);
  // With the lock held: whether anything moved.
  bool move_all(Ended& ended);
  void end(Requests& requests, Requests::iterator request, Ended& ended,
           std::exception_ptr error = nullptr);
  void tell(const Ended& ended);
  // Fails the group if some request has nothing to hope for; does nothing if it looked a moment
  // ago.
  void look_after_peers();
  bool is_time_to_look();
  void check_request(const Request& request, const std::vector<bool>& here);
  // No peer gets what they were to send.
  void end_all(const std::exception_ptr& error);

  std::shared_ptr<Region> region_;
  mutable std::mutex mutex_;
  Requests sends_;
  Requests receives_;
  DeferredRings rings_;
  MessageSender sender_;
  MessageReceiver receiver_;
  std::chrono::steady_clock::time_point looked_;
};

}  // namespace paceline::shm
