#include "shm/p2p/mailbox.h"

#include <fmt/format.h>

#include <paceline/error.h>

#include "shm/sync/stop_detector.h"

namespace paceline::shm {
namespace {

// How late a death or a deadline may be noticed while messages flow.
constexpr std::chrono::milliseconds kLookInterval{10};

}  // namespace

Mailbox::Mailbox(std::shared_ptr<Region> region)
    : region_(std::move(region)), sender_(*region_, rings_), receiver_(*region_, rings_) {}

Mailbox::~Mailbox() {
  if (region_->in_forked_child()) return;
  sender_.retire();
  for (const Request& request : sends_) {
    if (request.payload != nullptr) region_->memory().retire(request.payload);
  }
}

void Mailbox::check(bool sending, const Message& message) const {
  const char* const operation = sending ? "send" : "recv";
  region_->check_usable({operation, 0});
  const bool any = message.peer == kAnyRank && !sending;
  const int size = region_->size();
  if (message.peer == region_->rank()) {
    throw UsageError(fmt::format("{} with rank {}, which is this rank itself: copy the tensor",
                                 operation, message.peer));
  }
  if (!any && (message.peer < 0 || message.peer >= size)) {
    throw UsageError(fmt::format("{} with rank {}: the group has ranks 0 to {}", operation,
                                 message.peer, size - 1));
  }
  if (any && size == 1) {
    throw UsageError("recv from any rank: the group has no other rank");
  }
  if (message.tag < 0) {
    throw UsageError(fmt::format("{} with tag {}: tags are not negative", operation, message.tag));
  }
}

void Mailbox::send(const Message& message, Done done) {
  post(sends_, message, std::move(done), true);
}

void Mailbox::receive(const Message& message, Done done) {
  post(receives_, message, std::move(done), false);
}

void Mailbox::post(Requests& requests, const Message& message, Done done, bool sending) {
  check(sending, message);
  std::lock_guard lock(mutex_);
  requests.push_back({.message = message,
                      .done = std::move(done),
                      .deadline = base::Deadline::after(message.timeout),
                      .sending = sending});
}

bool Mailbox::idle() const {
  std::lock_guard lock(mutex_);
  return sends_.empty() && receives_.empty();
}

std::vector<std::string> Mailbox::describe_requests() const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> texts;
  for (const Requests* const requests : {&sends_, &receives_}) {
    for (const Request& request : *requests) texts.push_back(describe(request, *region_));
  }
  return texts;
}

bool Mailbox::move() {
  if (region_->in_forked_child()) region_->check_usable({"send", 0});
  move_some();
  return idle();
}

void Mailbox::close() {
  try {
    region_->check_usable({"recv", 0});
    throw UsageError(fmt::format("the rank left group {} before its message was complete",
                                 region_->options().name));
  } catch (const Error&) {
    end_all(std::current_exception());
  }
}

void Mailbox::pump(const std::function<bool()>& enough) {
  pump(enough, nullptr);
}

void Mailbox::pump_for(const Message& message, bool sending, const std::function<bool()>& enough) {
  MessageWait wait(message, sending, *region_);
  pump(enough, &wait);
}

void Mailbox::pump(const std::function<bool()>& enough, MessageWait* wait) {
  if (region_->in_forked_child()) region_->check_usable({"recv", 0});
  StopDetector detector;
  while (true) {
    // Read first: any later progress of a peer rings.
    const std::uint32_t heard = region_->rings();
    if (enough()) return;
    if (!move_some()) region_->listen(heard);
    if (const auto stopped = detector.look(); stopped.count() > 0) postpone_deadlines(stopped);
    look_after_peers(wait);
  }
}

void Mailbox::postpone_deadlines(std::chrono::milliseconds stopped) {
  const std::lock_guard lock(mutex_);
  for (Requests* const requests : {&sends_, &receives_}) {
    for (Request& request : *requests) {
      StopDetector::postpone(request.deadline, stopped, request.message.timeout);
    }
  }
}

// Whether anything moved.
bool Mailbox::move_some() {
  return with_lock([&](Ended& ended) { return move_all(ended); });
}

template <typename F>
bool Mailbox::with_lock(F&& action) {
  Ended ended;
  bool result = true;
  std::exception_ptr error;
  try {
    std::lock_guard lock(mutex_);
    result = action(ended);
  } catch (const std::exception& problem) {
    error = std::current_exception();
    // Has no effect if the group has failed. A rank that has left must not fail the others.
    if (!region_->departed()) region_->abort(problem.what());
  }
  tell(ended);
  if (error) end_all(error);
  return result;
}

void Mailbox::tell(const Ended& ended) {
  if (ended.empty()) return;
  for (const End& one : ended) one.done(one.error, one.peer);
  // Other threads of this rank may wait for these requests.
  wake();
}

bool Mailbox::move_all(Ended& ended) {
  bool moved = receiver_.take_headers();
  // A later message to a rank must not overtake an earlier one that found its send ring full.
  LocalRankMask full = 0;
  for (auto request = sends_.begin(); request != sends_.end();) {
    const auto current = request++;
    if (current->payload == nullptr) {
      if ((full & local_rank_bit(current->message.peer)) != 0) continue;
      try {
        if (!sender_.announce(*current)) {
          full |= local_rank_bit(current->message.peer);
          continue;
        }
      } catch (const Error&) {  // no room for this message; others go on
        if (region_->failed()) throw;
        end(sends_, current, ended, std::current_exception());
        continue;
      }
      moved = true;
    }
    moved = sender_.fill(*current) || moved;
    if (current->is_complete()) end(sends_, current, ended);
  }
  for (auto request = receives_.begin(); request != receives_.end();) {
    const auto current = request++;
    if (current->payload == nullptr && !receiver_.match(*current)) continue;
    moved = receiver_.drain(*current) || moved;
    if (current->is_complete()) end(receives_, current, ended);
  }
  sender_.collect();
  rings_.ring(*region_);
  return moved;
}

void Mailbox::end(Requests& requests, Requests::iterator request, Ended& ended,
                  std::exception_ptr error) {
  if (request->sending) sender_.release(*request);
  ended.push_back({std::move(request->done), std::move(error), request->message.peer});
  requests.erase(request);
}

bool Mailbox::is_time_to_look(Clock::time_point now) {
  std::lock_guard lock(mutex_);
  if (!region_->failed() && now - looked_ < kLookInterval) return false;
  looked_ = now;
  return true;
}

void Mailbox::look_after_peers(MessageWait* wait) {
  const auto now = Clock::now();
  // Apart from the other looks, which the P2P progress thread may make each time.
  if (wait != nullptr && region_->size() > 1 && now - wait->looked >= kLookInterval) {
    wait->looked = now;
    wait->show();
    report_late_ranks(*region_, *wait->missing().begin(), *wait);
  }
  if (!is_time_to_look(now)) return;
  std::vector<bool> here;
  for (int peer = 0; peer < region_->size(); ++peer) here.push_back(region_->peers().is_here(peer));
  with_lock([&](Ended& ended) {
    region_->check_usable({"send or recv", 0});
    // What a rank did before its loss or the deadline counts. No request must be added between
    // these passes and the checks.
    for (std::size_t i = 0; i <= kBuffers && move_all(ended); ++i) {
    }
    for (const Request& request : sends_) check_request(request, here);
    for (const Request& request : receives_) check_request(request, here);
    return true;
  });
}

// `here`: the ranks that were present before the last passes.
void Mailbox::check_request(const Request& request, const std::vector<bool>& here) {
  const OpContext op = context_of(request);
  int missing = -1;
  bool hope = false;
  for (int peer = 0; peer < region_->size(); ++peer) {
    if (peer == region_->rank()) continue;
    const bool concerned = request.message.peer == peer || request.message.peer == kAnyRank;
    if (here[static_cast<std::size_t>(peer)]) {
      hope = hope || concerned;
      continue;
    }
    // A death fails every request; a rank that left fails the requests for it.
    if (region_->peers().has_died(peer)) region_->fail_lost(peer, describe(request, *region_), op);
    if (concerned) missing = peer;
  }
  if (!hope && missing >= 0) region_->fail_lost(missing, describe(request, *region_), op);
  if (!request.deadline.expired()) return;
  region_->fail(late_message(request.message, request.sending, region_->rank(),
                             region_->global_ranks(), *region_),
                op);
}

void Mailbox::end_all(const std::exception_ptr& error) {
  Ended ended;
  {
    std::lock_guard lock(mutex_);
    for (Request& request : sends_) sender_.withdraw(request);
    for (Requests* const requests : {&sends_, &receives_}) {
      for (Request& request : *requests) {
        ended.push_back({std::move(request.done), error, request.message.peer});
      }
      requests->clear();
    }
  }
  tell(ended);
}

}  // namespace paceline::shm
