#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "internode/engine.h"
#include "shm/sync/fork_generation.h"

namespace paceline::backends {

// Transfers as sends and receives of a c10d::Backend. Its works do not say when they are complete,
// so threads wait for them, one for each transfer under way.
//
// A large message is sent in pieces, with tags of their own: a backend with several connections,
// such as Gloo with several devices, takes the next one for each tag.
class GlooEngine final : public internode::Engine {
 public:
  // `connections`: of the backend to a rank.
  GlooEngine(c10::intrusive_ptr<c10d::Backend> backend, int connections)
      : backend_(std::move(backend)), connections_(connections) {}
  GlooEngine(const GlooEngine&) = delete;
  GlooEngine& operator=(const GlooEngine&) = delete;
  // Ends abandoned transfers.
  ~GlooEngine() override;

  std::unique_ptr<Transfer> connect(const std::vector<int>& ranks,
                                    std::function<void()> when_done) override;
  std::unique_ptr<Transfer> start(std::uint32_t tag, const std::vector<Message>& sends,
                                  const std::vector<Message>& receives,
                                  std::function<void()> when_done) override;

 private:
  struct State;
  class Handle;
  struct Piece {
    c10::intrusive_ptr<c10d::Work> work;
    std::size_t bytes;
  };
  using Pieces = std::vector<Piece>;

  std::deque<Message> order_of(const std::vector<Message>& receives) const;
  bool note_connections(std::uint32_t tag, const std::vector<Message>& sends,
                        const std::vector<Message>& receives);
  void post_by_rank(State& state, const std::vector<Message>& sends);
  void post_receives(State& state);
  void post(Pieces& posted, std::uint32_t tag, const Message& message, bool sends);
  std::unique_ptr<Transfer> enqueue(std::shared_ptr<State> state);
  void connect(State& state);
  void run();
  void perform(State& state);
  void wait(State& state);
  static void close_incomplete(const Pieces& pieces);

  c10::intrusive_ptr<c10d::Backend> backend_;
  int connections_;
  shm::OwningProcess process_;
  std::mutex mutex_;  // guards what follows, and the states
  std::condition_variable changed_;
  std::set<std::pair<int, int>> connections_made_;  // by rank and number
  std::deque<std::shared_ptr<State>> queue_;
  std::size_t idle_ = 0;  // threads that no transfer in the queue is for
  bool stops_ = false;
  struct Abandoned {
    std::shared_ptr<const void> memory;  // outlives the pieces
    Pieces pieces;
  };
  std::vector<Abandoned> abandoned_;
  std::vector<std::thread> threads_;
};

}  // namespace paceline::backends
