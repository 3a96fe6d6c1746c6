#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "internode/engine.h"
#include "shm/sync/fork_generation.h"

namespace paceline::backends {

// Transfers as sends and receives of a c10d::Backend. Its works do not say when they are complete,
// so threads wait for them, one for each transfer under way. If these are many, the threads wait
// for them in turns: abort() of a work interrupts its wait, and the work goes on.
//
// The backend connects two ranks at their first message. It waits there for the other rank, cannot
// be interrupted, and fails after some seconds. So two ranks of an engine first meet in the store,
// and then exchange a handshake. Transfers between them wait meanwhile.
//
// A large message is sent in pieces, with tags of their own: a backend with several connections,
// such as Gloo with several devices, takes the next one for each tag.
class GlooEngine final : public internode::Engine {
 public:
  // `store`: in which the ranks of the backend meet; `store_server`: see BackendRequest.
  // `connections`: of the backend to a rank.
  GlooEngine(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store,
             std::optional<int> store_server, int connections)
      : backend_(std::move(backend)),
        store_(std::move(store)),
        store_server_(store_server),
        connections_(connections) {}
  GlooEngine(const GlooEngine&) = delete;
  GlooEngine& operator=(const GlooEngine&) = delete;
  // Ends abandoned transfers, and closes the connections, which takes up to 10 ms for each. If a
  // rank dies in the moment between the meeting and the handshake, this waits for the backend's
  // time limit to connect.
  ~GlooEngine() override;

  std::unique_ptr<Transfer> connect(const std::vector<int>& ranks,
                                    std::function<void()> when_done) override;
  std::unique_ptr<Transfer> start(std::uint32_t tag, const std::vector<Message>& sends,
                                  const std::vector<Message>& receives,
                                  std::function<void()> when_done) override;

 private:
  struct State;
  class Handle;
  // Of a thread's turn with a transfer.
  enum class Outcome {
    ended,
    yields,  // to the other transfers in the queue
    keeps,   // its memory until the engine ends
  };
  struct Piece {
    c10::intrusive_ptr<c10d::Work> work;
    std::size_t bytes;
    int rank;  // at the other end
  };
  using Pieces = std::vector<Piece>;

  // A rank to which this one connects, or is connected.
  struct Peer {
    std::shared_ptr<State> handshake;
    bool handshake_ended = false;  // with or without an error
  };

  std::deque<Message> order_of(const std::vector<Message>& receives) const;
  std::unique_ptr<Transfer> launch(std::shared_ptr<State> state);
  void connect_to(int rank);
  bool meet(const State& state);
  void post_handshake(State& state);
  bool is_ready(const State& state) const;
  void note_lost(State& state) const;
  void post_deferred();
  void post_all(State& state);
  void post_receives(State& state);
  void post(Pieces& posted, std::uint32_t tag, const Message& message, bool sends);
  void provide_thread();
  void enqueue(std::shared_ptr<State> state);
  void run();
  void take_turns();
  Outcome perform(State& state);
  bool wait(State& state);
  static void close_incomplete(const Pieces& pieces);
  void close_connections();

  c10::intrusive_ptr<c10d::Backend> backend_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::optional<int> store_server_;
  int connections_;
  shm::OwningProcess process_;
  std::mutex mutex_;  // guards what follows, and the states
  std::condition_variable changed_;
  std::map<int, Peer> peers_;                   // by rank
  std::list<std::shared_ptr<State>> deferred_;  // they wait for connections, in order
  std::deque<std::shared_ptr<State>> queue_;
  std::vector<std::shared_ptr<State>> running_;  // each has a thread; the first for the longest
  std::deque<std::shared_ptr<State>> kept_;      // abandoned ones that have failed
  std::size_t connecting_ = 0;                   // handshakes that have not ended
  std::uint64_t ended_ = 0;                      // how many transfers
  std::size_t idle_ = 0;                         // threads that have no transfer
  bool stops_ = false;
  std::vector<std::shared_ptr<State>> abandoned_;  // under way
  std::vector<std::thread> threads_;
  std::condition_variable crowded_;  // for take_turns
  std::thread turns_;
};

}  // namespace paceline::backends
