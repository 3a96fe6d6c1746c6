#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <paceline/version.h>

#include "base/address.h"
#include "net/listener.h"
#include "nodes/node_session.h"

namespace paceline::nodes {

using namespace std::chrono_literals;

// Launchers as threads, without processes: what they say to each other.
class Session : public ::testing::Test {
 protected:
  // For the node that gives the number; `numbered`: by --node-rank.
  SessionOptions options(int node, int nodes, bool numbered = true) {
    SessionOptions result;
    result.host = "127.0.0.1";
    result.port = port_.port();
    result.key = net::make_key("a secret of the test");
    result.rules = {.min_nodes = nodes, .max_nodes = nodes, .numbered = numbered, .job = "job"};
    result.join = {.version = kVersion,
                   .job = "job",
                   .host = fmt::format("host{}", node),
                   .processes = node + 1,
                   .min_nodes = nodes,
                   .max_nodes = nodes};
    if (numbered) result.join.node = node;
    result.coordinates = node == 0;
    return result;
  }

  // Of a job of `min` to `max` nodes, numbered as they come.
  SessionOptions elastic(int node, int min, int max) {
    SessionOptions result = options(node, max, false);
    result.rules.min_nodes = result.join.min_nodes = min;
    return result;
  }

  NodeSession make(const SessionOptions& options) {
    return {options, nullptr, {}, [this](const std::string& text) {
              const std::lock_guard lock(mutex_);
              printed_ += text;
            }};
  }

  // Runs a launcher on a thread for each; what `body` returns or throws, by node.
  std::vector<std::string> run(const std::vector<SessionOptions>& all,
                               const std::function<std::string(NodeSession&, int)>& body) {
    std::vector<std::string> results(all.size());
    std::vector<std::thread> threads;
    for (std::size_t node = 0; node < all.size(); ++node) {
      threads.emplace_back([&, node] {
        try {
          NodeSession session = make(all[node]);
          results[node] = body(session, static_cast<int>(node));
        } catch (const std::exception& error) {
          results[node] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return results;
  }

  std::string printed() {
    const std::lock_guard lock(mutex_);
    return printed_;
  }

  net::PortReservation port_{base::resolve("127.0.0.1", 0).front()};

 private:
  std::mutex mutex_;
  std::string printed_;
};

// Does what run_job does while processes run: waits for a while, and returns what the others ask
// for.
inline std::vector<launch::NodeRequest> serve(NodeSession& session) {
  std::vector<pollfd> fds;
  session.add_to(fds);
  ::poll(fds.data(), fds.size(), 20);
  return session.receive();
}

// The signals, or 0.
inline std::vector<int> await_requests(NodeSession& session) {
  std::vector<int> signals;
  while (signals.empty()) {
    for (const launch::NodeRequest& request : serve(session)) signals.push_back(request.signal);
  }
  return signals;
}

inline Result ended(int processes, int status = 0, bool stopped = false) {
  launch::RankResult rank;
  rank.status = status;
  rank.ended = 1s;
  rank.stopped = stopped;
  return {std::vector(static_cast<std::size_t>(processes), rank), ""};
}

inline std::string describe(const Start& start) {
  return fmt::format("{}/{} ranks from {} of {} restart {} {} {}", start.node, start.nodes,
                     start.first_rank, start.world_size, start.restart, start.job,
                     start.master_addr);
}

}  // namespace paceline::nodes
