#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "distributed/backend.h"

namespace paceline::parameter_server {

// One end of the group of a server and a worker. Calls throw PeerLost, or Timeout, that names the
// other rank. For one thread; any thread may abort.
class Pair {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;

  // Of the group of two that the backend paceline makes of the request. Collective.
  explicit Pair(distributed::BackendRequest request);

  // The limit of the calls that follow.
  void set_timeout(std::chrono::milliseconds timeout) { backend_->setTimeout(timeout); }
  // A uint8 tensor that the other end reads in place, uninitialised.
  at::Tensor allocate(std::size_t bytes);

  // Until the Work is complete, the tensor must not change.
  Work start_send(const at::Tensor& tensor);
  void finish(const Work& work);
  void send(const at::Tensor& tensor) { finish(start_send(tensor)); }
  void receive(const at::Tensor& tensor);
  void send_number(std::int64_t number);
  std::int64_t receive_number();
  void send_text(std::string_view text);
  std::string receive_text();

  // Ends all calls; the other end throws PeerLost with this text.
  void abort(const std::string& text) noexcept { backend_->abort_because(text); }

 private:
  int other_;       // in the group
  int other_rank_;  // in the job
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  distributed::ExtendedBackend* backend_;  // the group's
};

}  // namespace paceline::parameter_server
