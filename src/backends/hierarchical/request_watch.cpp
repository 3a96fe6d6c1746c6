#include "backends/hierarchical/request_watch.h"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <new>
#include <tuple>
#include <utility>

#include "base/idle_work.h"
#include "base/start_thread.h"

namespace paceline::backends {
namespace {

constexpr std::chrono::milliseconds kInterval{20};

// A request whose check throws, for lack of memory, is checked by nobody any more.
bool has_ended(internode::RemoteMessages& messages, internode::RemoteMessages::Request& request) {
  try {
    return messages.check(request);
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace

struct RequestWatch::State {
  explicit State(std::shared_ptr<internode::RemoteMessages> those) : messages(std::move(those)) {}

  std::shared_ptr<internode::RemoteMessages> messages;
  std::mutex mutex{};  // guards what follows
  std::condition_variable changed{};
  std::list<std::shared_ptr<internode::RemoteMessages::Request>> added{};
  bool stopping = false;
  bool ended = false;  // the thread has nothing left that it could destroy
};

RequestWatch::RequestWatch(std::shared_ptr<internode::RemoteMessages> messages)
    : state_(std::make_shared<State>(std::move(messages))) {}

RequestWatch::~RequestWatch() {
  if (process_.is_forked_child()) {
    std::ignore = new (std::nothrow) std::thread(std::move(thread_));
    std::ignore = new (std::nothrow) std::shared_ptr<State>(std::move(state_));
    return;
  }
  stop();
}

void RequestWatch::add(std::shared_ptr<internode::RemoteMessages::Request> request) {
  const std::lock_guard lock(state_->mutex);
  if (state_->stopping) return;
  if (!thread_.joinable()) thread_ = base::start_thread([state = state_] { run(*state); });
  state_->added.push_back(std::move(request));
  state_->changed.notify_one();
}

// Waits as calls do: the thread may need this one to destroy a request, where MPI allows one thread
// only.
void RequestWatch::stop() {
  std::thread thread;
  {
    std::unique_lock lock(state_->mutex);
    state_->stopping = true;
    thread = std::move(thread_);
    state_->changed.notify_all();
    if (!thread.joinable()) return;
    base::wait(state_->changed, lock, [&] { return state_->ended; });
  }
  thread.join();
}

void RequestWatch::run(State& state) {
  std::list<std::shared_ptr<internode::RemoteMessages::Request>> open;
  while (wait_for_work(state, !open.empty())) {
    {
      const std::lock_guard lock(state.mutex);
      open.splice(open.end(), state.added);
    }
    open.remove_if([&](const auto& request) { return has_ended(*state.messages, *request); });
  }
  open.clear();
  std::unique_lock lock(state.mutex);
  open = std::move(state.added);
  lock.unlock();
  open.clear();
  lock.lock();
  state.ended = true;
  state.changed.notify_all();
}

// Waits until there is something to do. Returns false if the thread is to end.
bool RequestWatch::wait_for_work(State& state, bool has_open) {
  std::unique_lock lock(state.mutex);
  const auto has_news = [&] { return state.stopping || !state.added.empty(); };
  if (has_open) {
    state.changed.wait_for(lock, kInterval, has_news);
  } else {
    state.changed.wait(lock, has_news);
  }
  return !state.stopping;
}

}  // namespace paceline::backends
