#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/pause.h"
#include "internode/engine.h"
#include "mpi/runtime.h"
#include "shm/sync/fork_generation.h"

namespace paceline::mpi {

// Transfers as messages of MPI, which a thread tests; the one that may call MPI, if there is only
// one.
//
// MPI cannot take back a message that it has begun to send. So a small one is sent from a copy, and
// a large one only when its receiver says that it has memory for it (rendezvous).
class Engine final : public internode::Engine {
 public:
  // Two communicators, for data and for what receivers say.
  Engine(Runtime& runtime, std::unique_ptr<Communicator> data, std::unique_ptr<Communicator> ready);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  // Cancels abandoned transfers. If MPI does not end them within a second, leaks what they use, and
  // MPI is not finalized.
  ~Engine() override;

  // MPI connects by itself.
  std::unique_ptr<Transfer> connect(const std::vector<int>& ranks,
                                    std::function<void()> when_done) override;
  std::unique_ptr<Transfer> start(std::uint32_t tag, const std::vector<Message>& sends,
                                  const std::vector<Message>& receives,
                                  std::function<void()> when_done) override;
  bool takes_any_rank() const override { return true; }
  void run_locked(const std::function<void()>& body) override { runtime_.run(body); }

 private:
  struct State;
  class Handle;
  using States = std::list<std::shared_ptr<State>>;

  void post(State& state, std::uint32_t tag, const std::vector<Message>& sends,
            const std::vector<Message>& receives);
  bool advance(State& state);
  bool finish_one(std::unique_lock<std::mutex>& lock);
  void forget_ended();
  bool end(const States& states, bool (State::*is_over)(Communicator&, Communicator&));
  void progress();
  void run();

  Runtime& runtime_;
  std::unique_ptr<Communicator> data_;
  std::unique_ptr<Communicator> ready_;
  shm::OwningProcess process_;
  std::mutex mutex_;  // guards what follows, and the states
  std::condition_variable changed_;
  States open_;
  States abandoned_;                // MPI may still access their memory
  const State* calling_ = nullptr;  // whose when_done runs
  bool stops_ = false;
  std::thread thread_;  // starts with the first transfer, if others than one may call MPI
};

}  // namespace paceline::mpi
