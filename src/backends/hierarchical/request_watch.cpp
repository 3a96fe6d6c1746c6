#include "backends/hierarchical/request_watch.h"

#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <new>
#include <tuple>
#include <utility>

#include "base/deadline.h"
#include "base/idle_work.h"
#include "base/signals_blocked.h"

namespace paceline::backends {
namespace {

constexpr std::chrono::milliseconds kInterval{20};

}  // namespace

struct RequestWatch::State {
  explicit State(std::shared_ptr<internode::RemoteMessages> those) : messages(std::move(those)) {}

  std::shared_ptr<internode::RemoteMessages> messages;
  std::mutex mutex{};  // guards what follows
  std::condition_variable changed{};
  std::list<std::shared_ptr<internode::RemoteMessages::Request>> added{};
  bool stopping = false;
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
  if (!thread_.joinable()) {
    const base::SignalsBlocked blocked;
    thread_ = std::thread([state = state_] { run(*state); });
  }
  state_->added.push_back(std::move(request));
  state_->changed.notify_one();
}

void RequestWatch::stop() {
  std::thread thread;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    thread = std::move(thread_);
  }
  state_->changed.notify_one();
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();
  } else if (thread.joinable()) {
    thread.join();
  }
}

void RequestWatch::run(State& state) {
  std::list<std::shared_ptr<internode::RemoteMessages::Request>> open;
  while (true) {
    {
      std::unique_lock lock(state.mutex);
      const auto has_news = [&] { return state.stopping || !state.added.empty(); };
      if (open.empty()) {
        state.changed.wait(lock, has_news);
      } else {
        state.changed.wait_for(lock, kInterval, has_news);
      }
      if (state.stopping) return;
      open.splice(open.end(), state.added);
    }
    open.remove_if([&](const auto& request) { return state.messages->check(*request); });
  }
}

}  // namespace paceline::backends
