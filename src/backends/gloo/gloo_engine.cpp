#include "backends/gloo/gloo_engine.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <utility>

#include "base/deadline.h"
#include "base/signals_blocked.h"

namespace paceline::backends {
namespace {

// Of a message. One connection fills a slow link, and several are worth their wake-ups only for
// large ones.
constexpr std::size_t kPieces = 2;
constexpr std::size_t kLeastPiece = std::size_t{256} << 10;
static_assert(GlooEngine::kTags * kPieces <= std::size_t{1} << 31);  // c10d's are ints
// A transfer posts no further receive while it waits for so many bytes. Gloo sends only what has
// been posted, and a link drops packets if all other nodes send to it at once.
constexpr std::size_t kPostedBytes = std::size_t{512} << 10;

std::size_t pieces_of(const internode::Engine::Message& message) {
  return std::clamp(message.bytes / kLeastPiece, std::size_t{1}, kPieces);
}

int piece_tag(std::uint32_t tag, std::size_t piece) {
  return static_cast<int>(tag * kPieces + piece);
}

}  // namespace

struct GlooEngine::State {
  std::function<void()> when_done;
  std::vector<int> peers{};  // to connect to
  std::uint32_t tag = 0;
  std::deque<Message> later{};  // receives that are not posted yet
  std::size_t awaited_bytes = 0;
  Pieces receives{};
  Pieces sends{};
  std::exception_ptr error{};
  bool cancelled = false;
  std::shared_ptr<const void> abandoned{};  // the memory of the messages, which may go on
  bool done = false;
};

class GlooEngine::Handle final : public Transfer {
 public:
  Handle(GlooEngine& engine, std::shared_ptr<State> state)
      : engine_(engine), state_(std::move(state)) {}
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  ~Handle() override { cancel(nullptr); }
  void abandon(std::shared_ptr<const void> memory) override { cancel(std::move(memory)); }
  void check() override {
    const std::lock_guard lock(engine_.mutex_);
    if (state_->error) std::rethrow_exception(state_->error);
  }

 private:
  void cancel(std::shared_ptr<const void> memory) {
    if (engine_.process_.is_forked_child()) return;
    std::unique_lock lock(engine_.mutex_);
    if (state_->cancelled) return;
    state_->cancelled = true;
    state_->abandoned = std::move(memory);
    for (const Pieces* const pieces : {&state_->receives, &state_->sends}) {
      for (const Piece& piece : *pieces) piece.work->abort();  // ends its wait
    }
    engine_.changed_.wait(lock, [&] { return state_->done; });
  }

  GlooEngine& engine_;
  std::shared_ptr<State> state_;
};

GlooEngine::~GlooEngine() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  for (const Abandoned& one : abandoned_) close_incomplete(one.pieces);
}

std::unique_ptr<internode::Engine::Transfer> GlooEngine::connect(const std::vector<int>& ranks,
                                                                 std::function<void()> when_done) {
  return enqueue(std::make_shared<State>(State{std::move(when_done), ranks}));
}

std::unique_ptr<internode::Engine::Transfer> GlooEngine::start(std::uint32_t tag,
                                                               const std::vector<Message>& sends,
                                                               const std::vector<Message>& receives,
                                                               std::function<void()> when_done) {
  auto state = std::make_shared<State>(
      State{.when_done = std::move(when_done), .tag = tag, .later = order_of(receives)});
  try {
    if (note_connections(tag, sends, receives)) {
      post_receives(*state);
      for (const Message& message : sends) post(state->sends, tag, message, true);
    } else {
      post_by_rank(*state, sends);
    }
  } catch (...) {
    // The connection is lost already: the transfer fails as if it were lost later.
    state->error = std::current_exception();
  }
  return enqueue(std::move(state));
}

std::unique_ptr<internode::Engine::Transfer> GlooEngine::enqueue(std::shared_ptr<State> state) {
  {
    const std::lock_guard lock(mutex_);
    if (queue_.size() == idle_) {
      const base::SignalsBlocked blocked;
      threads_.emplace_back([this] { run(); });
      ++idle_;
    }
    queue_.push_back(state);
  }
  changed_.notify_all();
  return std::make_unique<Handle>(*this, std::move(state));
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

// Whether all of these messages' connections were there before.
bool GlooEngine::note_connections(std::uint32_t tag, const std::vector<Message>& sends,
                                  const std::vector<Message>& receives) {
  bool all = true;
  const std::lock_guard lock(mutex_);
  for (const auto* const messages : {&sends, &receives}) {
    for (const Message& message : *messages) {
      for (std::size_t piece = 0; piece < pieces_of(message); ++piece) {
        const int connection = piece_tag(tag, piece) % connections_;
        all = !connections_made_.emplace(message.rank, connection).second && all;
      }
    }
  }
  return all;
}

// Two ranks connect at their first message, and one waits until the other does the same; Gloo
// chooses which, on each device by itself. With several devices, ranks that connected in an order
// of their own could wait for each other in a circle.
void GlooEngine::post_by_rank(State& state, const std::vector<Message>& sends) {
  struct Post {
    Message message;
    bool sends;
  };
  std::vector<Post> posts;
  for (const Message& message : std::exchange(state.later, {})) posts.push_back({message, false});
  for (const Message& message : sends) posts.push_back({message, true});
  std::ranges::stable_sort(posts, {}, [](const Post& one) { return one.message.rank; });
  for (const auto& [message, is_send] : posts) {
    post(is_send ? state.sends : state.receives, state.tag, message, is_send);
    if (!is_send) state.awaited_bytes += message.bytes;
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
                      end - begin});
  }
}

// c10d connects at the first message and waits meanwhile, so this runs on a thread of the engine.
// The messages are over before others have their tags.
void GlooEngine::connect(State& state) {
  if (state.peers.empty()) return;
  std::vector<at::Tensor> send{at::zeros({1}, at::kByte)};
  std::vector<at::Tensor> receive{at::zeros({1}, at::kByte)};
  for (const bool sends : {false, true}) {
    for (const int rank : state.peers) {
      for (int tag = 0; tag < connections_; ++tag) {
        auto work = sends ? backend_->send(send, rank, tag) : backend_->recv(receive, rank, tag);
        const std::lock_guard lock(mutex_);
        (sends ? state.sends : state.receives).push_back({std::move(work), 0});
        if (state.cancelled) return;
      }
    }
  }
}

void GlooEngine::run() {
  while (true) {
    std::shared_ptr<State> state;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stops_ || !queue_.empty(); });
      if (queue_.empty()) return;
      state = std::move(queue_.front());
      queue_.pop_front();
      --idle_;
    }
    perform(*state);
    {
      const std::lock_guard lock(mutex_);
      state->done = true;
      ++idle_;
    }
    changed_.notify_all();
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
void GlooEngine::wait(State& state) {
  for (const bool sends : {false, true}) {
    const Pieces& pieces = sends ? state.sends : state.receives;
    for (std::size_t i = 0;; ++i) {
      Piece piece;
      {
        const std::lock_guard lock(mutex_);
        if (state.cancelled || state.error) return;
        if (!sends) post_receives(state);
        if (i == pieces.size()) break;
        piece = pieces[i];
      }
      piece.work->wait(base::Deadline::kLongest);
      if (!sends) state.awaited_bytes -= piece.bytes;
    }
  }
}

void GlooEngine::perform(State& state) {
  try {
    connect(state);
    wait(state);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    state.error = std::current_exception();
  }
  Pieces pieces;
  bool cancelled = false;
  bool failed = false;
  {
    const std::lock_guard lock(mutex_);
    cancelled = state.cancelled;
    failed = state.error != nullptr;
    pieces = std::exchange(state.receives, {});
    std::ranges::move(std::exchange(state.sends, {}), std::back_inserter(pieces));
    if (state.abandoned) {
      abandoned_.push_back({std::move(state.abandoned), std::move(pieces)});
      pieces.clear();
    }
  }
  if (cancelled || failed) close_incomplete(pieces);
  pieces.clear();  // from here on, nothing accesses the memory
  if (!cancelled) state.when_done();
}

}  // namespace paceline::backends
