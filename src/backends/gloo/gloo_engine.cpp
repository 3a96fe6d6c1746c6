#include "backends/gloo/gloo_engine.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <paceline/error.h>

#include "base/deadline.h"
#include "base/start_thread.h"
#include "distributed/store_calls.h"
#include "distributed/translate.h"

namespace paceline::backends {
namespace {

// Of a message. One connection fills a slow link, and several are worth their wake-ups only for
// large ones.
constexpr std::size_t kPieces = 2;
constexpr std::size_t kLeastPiece = std::size_t{256} << 10;
static_assert(GlooEngine::kTags * kPieces < std::size_t{1} << 31);  // c10d's are ints
// A transfer posts no further receive while it waits for so many bytes. Gloo sends only what has
// been posted, and a link drops packets if all other nodes send to it at once.
constexpr std::size_t kPostedBytes = std::size_t{512} << 10;
// Besides the threads that connect to a rank.
constexpr std::size_t kThreads = 128;
// If more transfers are under way, a thread waits so long for one, and then for the next. The turns
// are short while transfers end.
constexpr std::chrono::milliseconds kShortTurn{8};
constexpr std::chrono::milliseconds kLongTurn{32};

std::size_t pieces_of(const internode::Engine::Message& message) {
  return std::clamp(message.bytes / kLeastPiece, std::size_t{1}, kPieces);
}

int piece_tag(std::uint32_t tag, std::size_t piece) {
  return static_cast<int>(tag * kPieces + piece);
}

}  // namespace

struct GlooEngine::State {
  std::function<void()> when_done;
  std::set<int> ranks{};             // at the other end
  std::optional<int> connects_to{};  // it is the handshake with this rank
  std::uint32_t tag = 0;
  std::vector<Message> unsent{};
  std::deque<Message> later{};  // receives that are not posted yet
  std::size_t awaited_bytes = 0;
  Pieces receives{};
  Pieces sends{};
  std::size_t received = 0;  // pieces that are complete
  std::size_t sent = 0;
  base::Deadline::Clock::time_point taken{};  // when its thread took it
  bool yields = false;                        // its thread is to take another one
  std::optional<int> awaited{};
  std::exception_ptr error{};
  bool cancelled = false;
  bool abandoned = false;
  std::shared_ptr<const void> memory{};  // of the messages, if it is abandoned
  bool ends = false;                     // when_done may be called
  bool done = false;

  // With the engine's lock.
  void cancel() {
    cancelled = true;
    for (const Pieces* const pieces : {&receives, &sends}) {
      for (const Piece& piece : *pieces) piece.work->abort();  // ends its wait
    }
  }
  void yield() {
    yields = true;
    if (received < receives.size()) receives[received].work->abort();
    if (sent < sends.size()) sends[sent].work->abort();
  }
};

class GlooEngine::Handle final : public Transfer {
 public:
  Handle(GlooEngine& engine, std::shared_ptr<State> state)
      : engine_(engine), state_(std::move(state)) {}
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  ~Handle() override {
    if (engine_.process_.is_forked_child()) return;
    std::unique_lock lock(engine_.mutex_);
    if (state_->abandoned || forget_deferred()) return;
    state_->cancel();
    engine_.changed_.wait(lock, [&] { return state_->done; });
  }
  void abandon(std::shared_ptr<const void> memory) override {
    if (engine_.process_.is_forked_child()) return;
    std::unique_lock lock(engine_.mutex_);
    if (state_->done || forget_deferred()) return;
    engine_.abandoned_.push_back(state_);
    state_->abandoned = true;
    state_->memory = std::move(memory);
    engine_.changed_.wait(lock, [&] { return !state_->ends || state_->done; });
  }
  void check() override {
    const std::lock_guard lock(engine_.mutex_);
    if (state_->error) std::rethrow_exception(state_->error);
  }
  std::optional<int> awaited() const override {
    const std::lock_guard lock(engine_.mutex_);
    return state_->awaited;
  }

 private:
  // Of a transfer that waits for connections; nothing knows its memory.
  bool forget_deferred() {
    if (std::erase(engine_.deferred_, state_) == 0) return false;
    state_->done = true;
    engine_.post_deferred();
    return true;
  }

  GlooEngine& engine_;
  std::shared_ptr<State> state_;
};

GlooEngine::~GlooEngine() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
    for (auto& [rank, peer] : peers_) {
      if (!peer.handshake_ended) peer.handshake->cancel();
    }
    for (const auto& state : abandoned_) state->cancel();
    std::ranges::move(std::exchange(kept_, {}), std::back_inserter(queue_));
  }
  changed_.notify_all();
  crowded_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  if (turns_.joinable()) turns_.join();
  close_connections();
}

// The backend's destructor ends Gloo's loop before it closes the connections. Meanwhile the loop
// cannot forget one that its peer closes. If a child process has the socket, too, the loop goes on
// seeing its end, and aborts. So they are closed first: Gloo closes them all if a wait for a
// message times out.
void GlooEngine::close_connections() {
  constexpr int kUnused = kTags * kPieces;  // above all tags of messages
  for (int connection = 0; connection < connections_; ++connection) {
    for (const auto& [rank, peer] : peers_) {
      if (!peer.handshake_ended || peer.handshake->error) continue;
      try {
        std::vector<at::Tensor> nothing{at::zeros({1}, at::kByte)};
        close_incomplete({{backend_->recv(nothing, rank, kUnused + connection), 0, rank}});
      } catch (const std::exception&) {
        // This connection is closed.
      }
    }
  }
}

std::unique_ptr<internode::Engine::Transfer> GlooEngine::connect(const std::vector<int>& ranks,
                                                                 std::function<void()> when_done) {
  return launch(std::make_shared<State>(
      State{.when_done = std::move(when_done), .ranks{ranks.begin(), ranks.end()}}));
}

std::unique_ptr<internode::Engine::Transfer> GlooEngine::start(std::uint32_t tag,
                                                               const std::vector<Message>& sends,
                                                               const std::vector<Message>& receives,
                                                               std::function<void()> when_done) {
  auto state = std::make_shared<State>(State{
      .when_done = std::move(when_done), .tag = tag, .unsent = sends, .later = order_of(receives)});
  for (const auto* const messages : {&sends, &receives}) {
    for (const Message& message : *messages) state->ranks.insert(message.rank);
  }
  return launch(std::move(state));
}

std::unique_ptr<internode::Engine::Transfer> GlooEngine::launch(std::shared_ptr<State> state) {
  std::unique_lock lock(mutex_);
  provide_thread();
  for (const int rank : state->ranks) connect_to(rank);
  if (is_ready(*state)) {
    note_lost(*state);
    lock.unlock();
    post_all(*state);
    lock.lock();
    enqueue(state);
  } else {
    deferred_.push_back(state);
  }
  return std::make_unique<Handle>(*this, std::move(state));
}

// What follows up to post_deferred: with the lock.

// For one more transfer. It has none of its own if there are many.
void GlooEngine::provide_thread() {
  if (queue_.size() < idle_ || threads_.size() >= kThreads + connecting_) return;
  // First, so that transfers never wait for a thread without it.
  if (threads_.size() + 1 >= kThreads && !turns_.joinable()) {
    turns_ = base::start_thread([this] { take_turns(); });
  }
  threads_.push_back(base::start_thread([this] { run(); }));
  ++idle_;
}

void GlooEngine::enqueue(std::shared_ptr<State> state) {
  try {
    provide_thread();
  } catch (const Error&) {
    // There is one, which takes it after others.
  }
  // Before transfers that have had a turn. A handshake may keep its thread for ever, and has a
  // thread of its own.
  const auto is_first = [&](const auto& other) {
    return state->connects_to || !other->connects_to;
  };
  queue_.insert(std::ranges::find_if(queue_, is_first), std::move(state));
  changed_.notify_all();
  crowded_.notify_all();
}

void GlooEngine::connect_to(int rank) {
  if (peers_.contains(rank)) return;
  const auto when_done = [this, rank] {
    const std::lock_guard lock(mutex_);
    peers_[rank].handshake_ended = true;
    --connecting_;
    post_deferred();
  };
  auto handshake = std::make_shared<State>(State{.when_done = when_done, .connects_to = rank});
  peers_[rank].handshake = handshake;
  ++connecting_;
  enqueue(std::move(handshake));
}

// Whether its ranks are connected, and nothing that was started before waits for one of them:
// messages of a rank keep their order.
bool GlooEngine::is_ready(const State& state) const {
  return std::ranges::all_of(state.ranks, [&](int rank) {
    return peers_.at(rank).handshake_ended &&
           std::ranges::none_of(deferred_,
                                [&](const auto& other) { return other->ranks.contains(rank); });
  });
}

// A transfer fails with a rank to which this one could not connect.
void GlooEngine::note_lost(State& state) const {
  for (const int rank : state.ranks) {
    if (!state.error) state.error = peers_.at(rank).handshake->error;
  }
}

void GlooEngine::post_deferred() {
  const auto waiting = std::exchange(deferred_, {});
  for (const auto& state : waiting) {
    if (is_ready(*state)) {
      note_lost(*state);
      post_all(*state);
      enqueue(state);
    } else {
      deferred_.push_back(state);
    }
  }
}

// First the messages that must not wait. Then each rank begins with the one before it, so that all
// receive from different ones.
std::deque<internode::Engine::Message> GlooEngine::order_of(
    const std::vector<Message>& receives) const {
  std::deque<Message> ordered(receives.begin(), receives.end());
  std::ranges::stable_sort(ordered, {}, [&](const Message& message) {
    const int distance = backend_->getRank() - message.rank;
    return std::pair(message.bytes > kOrderedBytes,
                     distance < 0 ? distance + backend_->getSize() : distance);
  });
  return ordered;
}

void GlooEngine::post_all(State& state) {
  if (state.error) return;
  try {
    post_receives(state);
    for (const Message& message : std::exchange(state.unsent, {})) {
      post(state.sends, state.tag, message, true);
    }
  } catch (...) {
    // The connection is lost already: the transfer fails as if it were lost later.
    state.error = std::current_exception();
  }
}

void GlooEngine::post_receives(State& state) {
  while (!state.later.empty()) {
    const Message& next = state.later.front();
    if (next.bytes > kOrderedBytes && state.awaited_bytes >= kPostedBytes) return;
    post(state.receives, state.tag, next, false);
    state.awaited_bytes += next.bytes;
    state.later.pop_front();
  }
}

void GlooEngine::post(Pieces& posted, std::uint32_t tag, const Message& message, bool sends) {
  const std::size_t pieces = pieces_of(message);
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    const std::size_t begin = message.bytes * piece / pieces;
    const std::size_t end = message.bytes * (piece + 1) / pieces;
    std::vector<at::Tensor> tensors{
        at::from_blob(message.data + begin, {static_cast<std::int64_t>(end - begin)}, at::kByte)};
    posted.push_back({sends ? backend_->send(tensors, message.rank, piece_tag(tag, piece))
                            : backend_->recv(tensors, message.rank, piece_tag(tag, piece)),
                      end - begin, message.rank});
  }
}

// Waits until the other rank wants to connect, too; false if the engine ends before. The second key
// says that the rank has seen the first one just now: it will not let the backend wait.
bool GlooEngine::meet(const State& state) {
  struct Ends {};
  const auto check = [&] {
    const std::lock_guard lock(mutex_);
    if (state.cancelled) throw Ends();
  };
  const auto meet_in_store = [store = store_, own = backend_->getRank(),
                              other = *state.connects_to](const auto& cancelled) {
    for (const char* const step : {"has a message for", "connects to"}) {
      const auto key = [step](int from, int to) { return fmt::format("{} {} {}", from, step, to); };
      store->set(key(own, other), std::vector<std::uint8_t>{1});
      distributed::await_keys(*store, {key(other, own)}, [&] { return cancelled.load(); });
      if (cancelled) break;
    }
    return true;
  };
  try {
    try {
      distributed::call_store(base::Deadline::after(base::Deadline::kLongest), meet_in_store,
                              check);
    } catch (const c10::DistNetworkError&) {
      distributed::explain_lost_store(
          "connecting two ranks: " + distributed::current_exception_text(), *store_, store_server_,
          check);
    }
  } catch (const Ends&) {
    return false;
  }
  return true;
}

// It is over before other messages have its tags.
void GlooEngine::post_handshake(State& state) {
  if (!meet(state)) return;
  const int rank = *state.connects_to;
  std::vector<at::Tensor> send{at::zeros({1}, at::kByte)};
  std::vector<at::Tensor> receive{at::zeros({1}, at::kByte)};
  for (int tag = 0; tag < connections_; ++tag) {
    for (const bool sends : {false, true}) {
      auto work = sends ? backend_->send(send, rank, tag) : backend_->recv(receive, rank, tag);
      const std::lock_guard lock(mutex_);
      (sends ? state.sends : state.receives).push_back({std::move(work), 0, rank});
      if (state.cancelled) return;
    }
  }
}

void GlooEngine::run() {
  while (true) {
    std::shared_ptr<State> state;  // destroyed without the lock
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stops_ || !queue_.empty(); });
      if (queue_.empty()) return;
      state = std::move(queue_.front());
      queue_.pop_front();
      --idle_;
      state->taken = base::Deadline::Clock::now();
      running_.push_back(state);
    }
    const Outcome outcome = perform(*state);
    {
      const std::lock_guard lock(mutex_);
      std::erase(running_, state);
      ++idle_;
      if (outcome == Outcome::ended) {
        state->done = true;
        ++ended_;
        std::erase(abandoned_, state);
      } else {
        (outcome == Outcome::yields || stops_ ? queue_ : kept_).push_back(state);
      }
    }
    changed_.notify_all();
  }
}

// Interrupts the threads if transfers wait for one. A wait that is interrupted loses nothing.
void GlooEngine::take_turns() {
  std::unique_lock lock(mutex_);
  auto turn = kShortTurn;
  std::uint64_t ended = ended_;
  const auto stops = [&] { return stops_; };
  while (!stops_) {
    crowded_.wait(lock, [&] { return stops_ || queue_.size() > idle_; });
    crowded_.wait_for(lock, turn, stops);
    const auto now = base::Deadline::Clock::now();
    std::size_t wait = queue_.size() - std::min(queue_.size(), idle_);
    for (const auto& state : running_) {
      if (wait == 0) break;
      if (state->connects_to || state->yields || now - state->taken < turn) continue;
      state->yield();
      --wait;
    }
    turn = std::exchange(ended, ended_) == ended_ ? std::min(2 * turn, kLongTurn) : kShortTurn;
  }
}

// Gloo does not end a connection whose message has lost its memory half-way: its thread would read
// it for ever, and its destructor wait for the thread. But it closes all connections if a wait for
// a message times out.
void GlooEngine::close_incomplete(const Pieces& pieces) {
  constexpr std::chrono::milliseconds kAtOnce{1};
  for (const Piece& piece : pieces) {
    try {
      // An abort ends one wait.
      if (!piece.work->wait(kAtOnce)) piece.work->wait(kAtOnce);
    } catch (const std::exception&) {
      // It was not complete.
    }
  }
}

// Sends are waited for last: their receivers may post them only after what they receive before.
// False if the thread is to take another transfer before this one has ended.
bool GlooEngine::wait(State& state) {
  std::unique_lock lock(mutex_);
  for (const bool sends : {false, true}) {
    const Pieces& pieces = sends ? state.sends : state.receives;
    std::size_t& complete = sends ? state.sent : state.received;
    while (!state.cancelled && !state.error) {
      if (!sends) post_receives(state);
      if (complete == pieces.size()) break;
      if (std::exchange(state.yields, false)) return false;
      const Piece piece = pieces[complete];
      state.awaited = piece.rank;
      lock.unlock();
      const bool is_complete = piece.work->wait(base::Deadline::kLongest);
      lock.lock();
      if (!is_complete) continue;  // it was interrupted
      ++complete;
      if (!sends) state.awaited_bytes -= piece.bytes;
    }
  }
  return true;
}

GlooEngine::Outcome GlooEngine::perform(State& state) {
  try {
    if (state.connects_to) post_handshake(state);
    if (!wait(state)) return Outcome::yields;
  } catch (...) {
    const std::lock_guard lock(mutex_);
    state.error = std::current_exception();
  }
  Pieces pieces;
  bool completed = false;
  bool awaited = false;
  {
    const std::lock_guard lock(mutex_);
    // To close its connections would end the messages of other transfers, too.
    if (state.error && state.abandoned && !stops_) return Outcome::keeps;
    completed = !state.cancelled && !state.error;
    state.ends = awaited = !state.cancelled && !state.abandoned;
    pieces = std::exchange(state.receives, {});
    std::ranges::move(std::exchange(state.sends, {}), std::back_inserter(pieces));
  }
  if (!completed) close_incomplete(pieces);
  pieces.clear();  // from here on, nothing accesses the memory
  if (awaited) state.when_done();
  return Outcome::ended;
}

}  // namespace paceline::backends
