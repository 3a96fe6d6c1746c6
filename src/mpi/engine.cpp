#include "mpi/engine.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <new>
#include <tuple>
#include <utility>

#include "base/deadline.h"
#include "base/start_thread.h"

namespace paceline::mpi {
namespace {

// Larger messages wait for their receiver. MPI is done with those up to this size at once, whether
// anyone receives them or not.
constexpr std::size_t kEagerLimit = std::size_t{2} << 10;
static_assert(kEagerLimit >= Engine::kOrderedBytes);

// How often abandoned transfers are tested while nothing else is under way.
constexpr std::chrono::milliseconds kSweep{10};

}  // namespace

struct Engine::State {
  // A message whose receiver is not ready yet, as far as is known.
  struct PendingSend {
    Message message;
    std::uint32_t tag;
    Requests ready{};
  };

  // Whether MPI accesses the caller's memory no more.
  bool is_memory_free(Communicator& data, Communicator& ready) {
    std::erase_if(pending, [&](PendingSend& one) {
      if (!ready.test(one.ready)) return false;
      if (!cancelled) {
        data.send(one.message.data, one.message.bytes, one.message.rank, one.tag, sends);
      }
      return true;
    });
    return data.test(receives, &sender) && data.test(sends) && pending.empty();
  }
  bool is_over(Communicator& data, Communicator& ready) {
    return is_memory_free(data, ready) && data.test(copied) && ready.test(answers);
  }
  // Sends nothing more. A receive goes on if its sender knows that this rank is ready.
  void cancel_sends(Communicator& ready) {
    if (std::exchange(cancelled, true)) return;
    for (const PendingSend& one : pending) ready.cancel(one.ready);
  }

  std::function<void()> when_done;
  std::vector<PendingSend> pending{};
  Requests sends{};
  Requests receives{};
  Requests copied{};   // sends of `copies`
  Requests answers{};  // that this rank is ready to receive
  std::vector<std::unique_ptr<std::byte[]>> copies{};
  std::exception_ptr error{};
  bool cancelled = false;
  int sender = kAnyRank;
  std::shared_ptr<const void> memory{};  // of an abandoned one
};

class Engine::Handle final : public Transfer {
 public:
  Handle(Engine& engine, std::shared_ptr<State> state)
      : engine_(engine), state_(std::move(state)) {}
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  ~Handle() override {
    if (abandoned_ || engine_.process_.is_forked_child()) return;
    engine_.runtime_.run([&] {
      std::unique_lock lock(engine_.mutex_);
      if (!forget(lock)) return;
      engine_.end({state_}, &State::is_memory_free);
      engine_.abandoned_.push_back(state_);  // for what is copied
    });
  }

  void check() override {
    const std::lock_guard lock(engine_.mutex_);
    if (state_->error) std::rethrow_exception(state_->error);
  }

  int sender() const override {
    const std::lock_guard lock(engine_.mutex_);
    return state_->sender;
  }

  void abandon(std::shared_ptr<const void> memory) override {
    abandoned_ = true;
    engine_.runtime_.run([&] {
      std::unique_lock lock(engine_.mutex_);
      if (!forget(lock)) return;
      state_->memory = std::move(memory);
      engine_.abandoned_.push_back(state_);
    });
  }

 private:
  // Returns whether MPI may still access the transfer's memory. Its when_done is not called any
  // more.
  bool forget(std::unique_lock<std::mutex>& lock) {
    engine_.changed_.wait(lock, [&] { return engine_.calling_ != state_.get(); });
    return std::erase(engine_.open_, state_) > 0 || std::erase(engine_.abandoned_, state_) > 0;
  }

  Engine& engine_;
  std::shared_ptr<State> state_;
  bool abandoned_ = false;
};

Engine::Engine(Runtime& runtime, std::unique_ptr<Communicator> data,
               std::unique_ptr<Communicator> ready)
    : runtime_(runtime), data_(std::move(data)), ready_(std::move(ready)) {
  if (runtime_.has_owner()) runtime_.add_work(this, [this] { progress(); });
}

Engine::~Engine() {
  if (runtime_.has_owner()) runtime_.run([this] { runtime_.remove_work(this); });
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  abandoned_.splice(abandoned_.end(), open_);
  if (end(abandoned_, &State::is_over)) {
    try {
      runtime_.call([&](Library&) {
        data_.reset();
        ready_.reset();
      });
      return;
    } catch (...) {
      // MPI is finalized: nothing can be freed.
    }
  }
  runtime_.do_not_finalize();
  std::ignore = new (std::nothrow) States(std::move(abandoned_));
  std::ignore = data_.release();
  std::ignore = ready_.release();
}

std::unique_ptr<internode::Engine::Transfer> Engine::connect(const std::vector<int>& /*ranks*/,
                                                             std::function<void()> when_done) {
  return start(0, {}, {}, std::move(when_done));
}

std::unique_ptr<internode::Engine::Transfer> Engine::start(std::uint32_t tag,
                                                           const std::vector<Message>& sends,
                                                           const std::vector<Message>& receives,
                                                           std::function<void()> when_done) {
  auto state = std::make_shared<State>(State{std::move(when_done)});
  auto handle = std::make_unique<Handle>(*this, state);
  runtime_.run([&] {
    const std::lock_guard lock(mutex_);
    if (!runtime_.has_owner() && !thread_.joinable()) {
      thread_ = base::start_thread([this] { run(); });
    }
    try {
      runtime_.call([&](Library&) { post(*state, tag, sends, receives); });
    } catch (...) {
      state->error = std::current_exception();
    }
    open_.push_back(std::move(state));
  });
  changed_.notify_all();
  return handle;
}

void Engine::post(State& state, std::uint32_t tag, const std::vector<Message>& sends,
                  const std::vector<Message>& receives) {
  for (const auto& [rank, data, bytes] : receives) {
    data_->receive(data, bytes, rank, tag, state.receives);
    if (bytes > kEagerLimit) ready_->send(nullptr, 0, rank, tag, state.answers);
  }
  for (const Message& message : sends) {
    if (message.bytes > kEagerLimit) {
      State::PendingSend& pending = state.pending.emplace_back(State::PendingSend{message, tag});
      ready_->receive(nullptr, 0, message.rank, tag, pending.ready);
      continue;
    }
    auto& copy = state.copies.emplace_back(new std::byte[message.bytes]);
    if (message.bytes > 0) std::memcpy(copy.get(), message.data, message.bytes);
    data_->send(copy.get(), message.bytes, message.rank, tag, state.copied);
  }
}

// Whether a transfer is complete, or has failed.
bool Engine::advance(State& state) {
  if (state.error) return true;
  try {
    return runtime_.call([&](Library&) { return state.is_over(*data_, *ready_); });
  } catch (...) {
    state.error = std::current_exception();
    return true;
  }
}

// Calls the when_done of one transfer, if one is complete.
bool Engine::finish_one(std::unique_lock<std::mutex>& lock) {
  const auto found =
      std::ranges::find_if(open_, [&](const auto& state) { return advance(*state); });
  if (found == open_.end()) return false;
  const std::shared_ptr<State> state = std::move(*found);
  open_.erase(found);
  if (state->error) abandoned_.push_back(state);  // MPI may still have its other messages
  calling_ = state.get();
  lock.unlock();
  state->when_done();
  lock.lock();
  calling_ = nullptr;
  changed_.notify_all();
  return true;
}

void Engine::forget_ended() {
  std::erase_if(abandoned_, [&](const auto& state) { return !state->error && advance(*state); });
}

// On the one thread that may call MPI.
void Engine::progress() {
  std::unique_lock lock(mutex_);
  while (finish_one(lock)) {
  }
  forget_ended();
}

void Engine::run() {
  std::unique_lock lock(mutex_);
  base::Pause pause;
  while (!stops_) {
    forget_ended();
    if (open_.empty()) {
      const auto limit = abandoned_.empty() ? base::Deadline::kLongest : kSweep;
      changed_.wait_for(lock, limit, [&] { return stops_ || !open_.empty(); });
      pause = {};
    } else if (finish_one(lock)) {
      pause = {};
    } else if (const auto length = pause.length(); length.count() > 0) {
      changed_.wait_for(lock, length);
    } else {
      lock.unlock();
      ::sched_yield();
      lock.lock();
    }
  }
}

// Cancels transfers, and returns whether they end within a second. For a moment receives go on, as
// their sender may have begun. A receive ends once MPI says so, because the message may be
// arriving. What is sent from the caller's memory has a receiver, which takes it unless its process
// is stopped.
bool Engine::end(const States& states, bool (State::*is_over)(Communicator&, Communicator&)) {
  using namespace std::chrono_literals;
  try {
    const auto over_within = [&](std::chrono::milliseconds time) {
      const auto limit = base::Deadline::after(time);
      for (const base::Pause pause;; pause.rest()) {
        const bool over = runtime_.call([&](Library&) {
          return std::ranges::all_of(
              states, [&](const auto& state) { return ((*state).*is_over)(*data_, *ready_); });
        });
        if (over || limit.expired()) return over;
      }
    };
    runtime_.call([&](Library&) {
      for (const auto& state : states) state->cancel_sends(*ready_);
    });
    if (over_within(200ms)) return true;
    runtime_.call([&](Library&) {
      for (const auto& state : states) data_->cancel(state->receives);
    });
    return over_within(800ms);
  } catch (...) {
    return false;  // MPI has failed, or is finalized
  }
}

}  // namespace paceline::mpi
