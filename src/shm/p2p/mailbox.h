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

// Messages from one rank of a region to another, any number at once, concurrent with the group's
// collectives. A message matches the receiver's earliest request for its sender, or any sender, and
// its tag. Messages of one sender with one tag arrive in order. Both sides must agree on type and
// count.
//
// Thread-safe. Requests make progress only while a thread is in `pump`.
class Mailbox {
 public:
  using Message = P2PMessage;
  static constexpr int kAnyRank = Message::kAnyRank;

  // Called once for each request, by a thread in `pump`, `move` or `close`: when the message has
  // been sent, so that its memory may change, or received; or with the error that ended it. `peer`
  // is the rank at the other end. Must not throw; other messages wait while it runs.
  using Done = std::function<void(std::exception_ptr error, int peer)>;

  explicit Mailbox(std::shared_ptr<Region> region);
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  // Forgets the requests under way: close() first.
  ~Mailbox();

  // Throw UsageError for an invalid peer or tag, and the group's failure.
  void send(const Message& message, Done done);
  void receive(const Message& message, Done done);

  bool idle() const;
  // The requests under way, for debuggers: "recv of 10 float32 from rank 1 with tag 0 in group
  // world".
  std::vector<std::string> describe_requests() const;
  // Moves messages once, without waiting; returns whether no request is left. Throws UsageError in
  // a forked child.
  bool move();
  // Ends all requests with an error: the group's failure, if it has one. Peers that wait for them
  // find that this rank has left.
  void close();
  // Moves messages until `enough` returns true. Errors go to the requests; throws UsageError in a
  // forked child only.
  void pump(const std::function<bool()>& enough);
  // The same for a thread that waits for a message: if it waits for long, the log says so. Passes
  // on what `enough` throws; the wait has then failed, and the log does not say that it went on.
  void pump_for(const Message& message, bool sending, const std::function<bool()>& enough);
  // Wakes the threads of this process that are in `pump`, to ask `enough` again.
  void wake() { region_->ring(region_->rank()); }

 private:
  using Clock = std::chrono::steady_clock;
  using Request = P2PRequest;
  using Requests = std::list<Request>;
  struct End {
    Done done;
    std::exception_ptr error;
    int peer;
  };
  using Ended = std::vector<End>;

  void pump(const std::function<bool()>& enough, MessageWait* wait);
  void check(bool sending, const Message& message) const;
  void post(Requests& requests, const Message& message, Done done, bool sending);
  bool move_some();
  // Returns the result of `action`. An exception fails the group and ends all requests.
  template <typename F>
  bool with_lock(F&& action);
  // Call with the lock held. Returns whether anything moved.
  bool move_all(Ended& ended);
  void end(Requests& requests, Requests::iterator request, Ended& ended,
           std::exception_ptr error = nullptr);
  void tell(const Ended& ended);
  // Fails the group if a request can no longer complete; does nothing if called again too soon.
  // Reports `wait`, if there is one.
  void look_after_peers(MessageWait* wait);
  void postpone_deadlines(std::chrono::milliseconds stopped);
  bool is_time_to_look(Clock::time_point now);
  void check_request(const Request& request, const std::vector<bool>& here);
  // Withdraws this rank's messages.
  void end_all(const std::exception_ptr& error);

  std::shared_ptr<Region> region_;
  mutable std::mutex mutex_;
  Requests sends_;
  Requests receives_;
  DeferredRings rings_;
  MessageSender sender_;
  MessageReceiver receiver_;
  Clock::time_point looked_;
};

}  // namespace paceline::shm
