#include "parallel/parameter_server/worker.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include <paceline/error.h>

#include "parallel/parameter_server/protocol.h"
#include "parallel/with_error_context.h"

namespace paceline::parameter_server {
namespace {

// A server answers at the limit of the worker's waits; the worker waits this much longer.
constexpr std::chrono::seconds kAnswerTime{5};

void send_command(Pair& pair, Command command) {
  pair.send_number(static_cast<std::int64_t>(command));
}

// Undefined where a parameter has none.
Tensors gradients_of(const Tensors& parameters) {
  Tensors gradients;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (gradient.defined() && gradient.layout() != at::kStrided) {
      throw UsageError(fmt::format(
          "push: the gradient of a parameter of shape {} has the layout {}; it must be dense",
          c10::str(parameter.sizes()), c10::str(gradient.layout())));
    }
    gradients.push_back(gradient);
  }
  return gradients;
}

}  // namespace

Worker::Worker(std::unique_ptr<Job> job, const std::vector<Tensors>& shards,
               const std::string& description)
    : job_(std::move(job)) {
  job_->announce();
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const auto server = static_cast<int>(i);
    const auto process = job_->await(server);
    // Throws if the server has ended meanwhile.
    const auto check = [&] { static_cast<void>(job_->find(server)); };
    const auto pair = job_->meet(server, job_->rank(), process, check);
    pair->set_timeout(job_->timeout() + kAnswerTime);
    peers_.push_back({.pair = pair,
                      .parameters = shards[i],
                      .gradients = FlatTensors(
                          shards[i], [&](std::size_t bytes) { return pair->allocate(bytes); })});
    peers_.back().received = FlatTensors(shards[i], [](std::size_t bytes) {
      return at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
    });
  }
  call("its constructor", [&] {
    introduce(description);
    enter();
  });
  pull();
}

template <typename Body>
void Worker::call(const char* operation, Body body) {
  if (failure_) std::rethrow_exception(failure_);
  if (peers_.empty()) {
    throw UsageError(fmt::format("{} on a ParameterServer that this worker has left", operation));
  }
  try {
    parallel::with_error_context(
        [&] { return fmt::format("in {}; pushes so far: {}", operation, pushes_); }, body,
        fmt::format("rank {}'s ParameterServer", job_->rank()));
  } catch (const PeerError& error) {
    failure_ = std::current_exception();
    abort(error.what());
    throw;
  }
}

void Worker::abort(const std::string& text) noexcept {
  for (const Peer& server : std::exchange(peers_, {})) server.pair->abort(text);
}

void Worker::introduce(const std::string& description) {
  for (const Peer& server : peers_) {
    send_command(*server.pair, Command::introduce);
    server.pair->send_number(job_->timeout().count());
    server.pair->send_text(description);
  }
  std::string difference;
  for (const Peer& server : peers_) {
    const auto found = server.pair->receive_text();
    if (difference.empty()) difference = found;
  }
  if (!difference.empty()) throw Mismatch(difference, {job_->rank()}, "ParameterServer", 0);
}

// At the same step everywhere: the latest that a server is in.
void Worker::enter() {
  for (const Peer& server : peers_) send_command(*server.pair, Command::join);
  std::int64_t clock = 0;
  for (const Peer& server : peers_) clock = std::max(clock, server.pair->receive_number());
  for (const Peer& server : peers_) {
    send_command(*server.pair, Command::enter);
    server.pair->send_number(clock);
  }
}

void Worker::pull() {
  call("pull", [&] {
    for (const Peer& server : peers_) send_command(*server.pair, Command::pull);
    for (Peer& server : peers_) {
      server.version = receive_version(*server.pair, "pull", job_->timeout());
      server.pair->receive(server.received.memory());
    }
    // Only now, so that an error leaves the parameters as they were.
    for (const Peer& server : peers_) server.received.read(server.parameters);
  });
}

void Worker::push() {
  call("push", [&] {
    for (Peer& server : peers_) server.gradients.write(gradients_of(server.parameters));
    std::vector<Pair::Work> sends;
    for (const Peer& server : peers_) {
      send_command(*server.pair, Command::push);
      server.pair->send_number(server.version);
      sends.push_back(server.pair->start_send(server.gradients.memory()));
    }
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      peers_[i].pair->finish(sends[i]);
      static_cast<void>(receive_version(*peers_[i].pair, "push", job_->timeout()));
    }
    ++pushes_;
  });
}

void Worker::leave() {
  if (peers_.empty() && !failure_) return;
  call("leave", [&] {
    for (const Peer& server : peers_) send_command(*server.pair, Command::leave);
    for (const Peer& server : peers_) static_cast<void>(server.pair->receive_number());
  });
  peers_.clear();
}

}  // namespace paceline::parameter_server
