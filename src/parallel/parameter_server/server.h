#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <paceline/parameter_server.h>

#include "base/deadline.h"
#include "parallel/parameter_server/flat_tensors.h"
#include "parallel/parameter_server/job.h"
#include "parallel/parameter_server/shard.h"
#include "parallel/parameter_server/update_order.h"

namespace paceline::parameter_server {

// A server's side: a thread for each worker, which blocks in the messages of their pair.
class Server {
 public:
  // In the store, where workers find it. Throws PeerLost if this rank had a process before.
  static void announce(Job& job);

  // After announce(). `description`: of the model, for comparison.
  Server(std::unique_ptr<Job> job, Shard shard, std::string description,
         const ParameterServerOptions& options);
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  ~Server();

  void serve();
  ParameterServerStats stats() const;

 private:
  // The process that a worker has now.
  struct Session {
    std::int64_t number = 0;  // of the worker's last process that was taken in; 0: none
    std::thread thread;
    bool ended = true;  // guarded by sessions_mutex_, as is the next
    std::shared_ptr<Pair> pair;
    FlatTensors gradients{};
    std::chrono::milliseconds limit{};  // of the worker's waits for others
    std::int64_t bytes_sent = 0;        // guarded by sessions_mutex_, as is the next
    std::int64_t bytes_received = 0;
  };

  int rank_of(int worker) const { return options_.servers + worker; }
  Session& session(int worker) { return sessions_[static_cast<std::size_t>(worker)]; }
  void take_in_workers();
  std::optional<Announcement> find(int worker);
  bool is_absent(int worker);
  bool is_any_absent();
  void start(int worker, const Announcement& process);
  void run(int worker, const Announcement& process) noexcept;
  void admit(int worker, const Announcement& process);
  void obey(int worker, Pair& pair);
  void push(int worker, Pair& pair);
  void pull(int worker, Pair& pair, FlatTensors& parameters);
  void send_late(Pair& pair, const LateWorkers& late) const;
  void introduce(int worker, Pair& pair);
  void give_up_late_workers();
  void lose(int worker, const std::string& reason);
  bool awaits_replacements();
  bool has_server_ended() const;
  void end(const std::string& why) noexcept;
  [[noreturn]] void throw_all_lost() const;

  const std::unique_ptr<Job> job_;
  Shard shard_;
  const std::string description_;
  const ParameterServerOptions options_;
  mutable std::mutex sessions_mutex_;
  std::vector<Session> sessions_;
  UpdateOrder updates_;
  bool served_ = false;
  bool is_closed_ = false;               // no process can come any more
  base::Deadline coming_;                // for workers that have not come yet
  std::optional<base::Deadline> alone_;  // for replacements, after all workers were lost
};

}  // namespace paceline::parameter_server
