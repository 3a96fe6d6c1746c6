#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <paceline/parameter_server.h>

#include "parallel/parameter_server/flat_tensors.h"
#include "parallel/parameter_server/job.h"

namespace paceline::parameter_server {

// A worker's side. Asks all servers before it waits for the first answer.
class Worker {
 public:
  // `shards`: this rank's parameters, by server. Meets all servers and pulls.
  Worker(std::unique_ptr<Job> job, const std::vector<Tensors>& shards,
         const std::string& description);
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void pull();
  void push();
  void leave();
  // The servers count this worker as lost.
  void abort(const std::string& text) noexcept;

 private:
  // A server, and what goes there.
  struct Peer {
    std::shared_ptr<Pair> pair;
    Tensors parameters;
    FlatTensors gradients;
    FlatTensors received{};  // parameters
    std::int64_t version = 0;
  };

  void introduce(const std::string& description);
  void enter();
  // Runs the body of a call. If a server fails it, no call has a meaning any more.
  template <typename Body>
  void call(const char* operation, Body body);

  const std::unique_ptr<Job> job_;
  std::vector<Peer> peers_;  // by server; empty once this worker has left
  std::exception_ptr failure_;
  std::int64_t pushes_ = 0;
};

}  // namespace paceline::parameter_server
