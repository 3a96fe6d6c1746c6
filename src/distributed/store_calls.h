#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/idle_work.h"
#include "base/start_thread.h"
#include "shm/membership/bootstrap.h"
#include "shm/membership/failure.h"

namespace paceline::distributed {

// Runs `body(cancelled)` on a thread of its own and returns its result, or nothing if there is none
// at the deadline: constructors and calls of c10d's stores may block for ever, with any timeout
// that the store has. `meanwhile` is called on the caller's thread every few milliseconds, and may
// throw.
//
// Once `cancelled`, an atomic bool, is set, the body should return. If the store blocks it, its
// thread is detached and runs until the store returns, so `body` must own all it uses.
template <typename Body>
auto call_store(
    const base::Deadline& deadline, Body body, const std::function<void()>& meanwhile = [] {})
    -> std::optional<std::invoke_result_t<Body, const std::atomic<bool>&>> {
  using Result = std::invoke_result_t<Body, const std::atomic<bool>&>;
  const std::chrono::milliseconds pause{base::has_idle_work() ? 1 : 20};
  // The time for the store's own error at the same deadline. It is longer than rank 0 waits there
  // for the other ranks to learn which ranks are missing.
  constexpr std::chrono::milliseconds kLastWord = shm::kVerdict + std::chrono::seconds(1);

  const auto cancelled = std::make_shared<std::atomic<bool>>(false);
  std::packaged_task<Result()> task(
      [cancelled, body = std::move(body)]() mutable { return body(*cancelled); });
  std::future<Result> result = task.get_future();
  std::thread thread = base::start_thread(std::move(task));
  const auto ended_within = [&](std::chrono::milliseconds time) {
    return result.wait_for(time) == std::future_status::ready;
  };
  std::exception_ptr thrown;
  try {
    while (!ended_within(std::min(pause, deadline.remaining())) && !deadline.expired()) {
      base::do_idle_work();
      meanwhile();
    }
  } catch (...) {
    thrown = std::current_exception();
  }
  *cancelled = true;
  const bool ended = ended_within(kLastWord);
  if (ended) {
    thread.join();
  } else {
    thread.detach();
  }
  if (thrown) std::rethrow_exception(thrown);
  if (!ended) return std::nullopt;
  return result.get();
}

// Asks `holds` again and again until it holds, or `should_stop` does; less often if it takes
// longer. Returns whether it holds.
template <typename Condition, typename Stop>
bool poll_until(Condition holds, Stop should_stop) {
  using std::chrono::milliseconds;
  constexpr milliseconds kLongestPause{20};
  constexpr milliseconds kPauseOfLongWaits{200};
  const auto begin = std::chrono::steady_clock::now();
  for (milliseconds pause{1};; pause *= 2) {
    if (holds()) return true;
    if (should_stop()) return false;
    const auto waited =
        std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - begin);
    pause = std::min(pause, std::clamp(waited / 100, kLongestPause, kPauseOfLongWaits));
    std::this_thread::sleep_for(pause);
  }
}

// Asks the store until it has the keys or `should_stop` returns true. The store's own wait() would
// write a warning to the log whenever it is cut short.
template <typename Stop>
void await_keys(c10d::Store& store, const std::vector<std::string>& keys, Stop should_stop) {
  poll_until([&] { return store.check(keys); }, should_stop);
}

// "the store at tcp://127.0.0.1:29500", "the store at file:///tmp/store", "the store".
std::string describe_store(c10d::Store& store);

// How long rank 0, which may serve the store, stays at most for the others to read from it: they
// may have yet to connect, and they try again after a second or so.
inline constexpr std::chrono::seconds kFarewell{5};

// The connection to the store is lost, says `text`. Throws what `check_peers` knows about the cause
// within a few seconds; else PeerLost if rank `server` serves the store, or an Error.
[[noreturn]] void explain_lost_store(const std::string& text, c10d::Store& store,
                                     std::optional<int> server,
                                     const std::function<void()>& check_peers,
                                     const shm::OpContext& op = {"connect", 0});

}  // namespace paceline::distributed
