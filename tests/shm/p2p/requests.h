#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <numeric>
#include <vector>

#include "shm/p2p/mailbox.h"

namespace paceline::test {

inline constexpr std::chrono::minutes kLong{1};

// Requests of one rank that are made first and then waited for.
class Requests {
 public:
  explicit Requests(shm::Mailbox& mailbox) : mailbox_(mailbox) {}
  void send(const std::vector<int>& data, int to, int tag = 0,
            std::chrono::milliseconds timeout = kLong) {
    ++open_;
    mailbox_.send(
        {const_cast<int*>(data.data()), data.size(), shm::DataType::int32, to, tag, timeout},
        done());
  }
  void receive(std::vector<int>& data, int from, int tag = 0,
               std::chrono::milliseconds timeout = kLong) {
    ++open_;
    mailbox_.receive({data.data(), data.size(), shm::DataType::int32, from, tag, timeout}, done());
  }
  // Throws the first error; else returns the peer of the request that completed last.
  int wait() {
    mailbox_.pump([&] { return open_ == 0; });
    if (error_) std::rethrow_exception(error_);
    return last_peer_;
  }

 private:
  shm::Mailbox::Done done() {
    return [this](const std::exception_ptr& error, int peer) {
      if (error && !error_) error_ = error;
      last_peer_ = peer;
      --open_;
    };
  }
  shm::Mailbox& mailbox_;
  std::atomic<int> open_{0};
  std::atomic<int> last_peer_{-1};
  std::exception_ptr error_;
};

inline std::vector<int> numbers(std::size_t count, int from, int tag) {
  std::vector<int> data(count);
  std::iota(data.begin(), data.end(), from * 1000 + tag);
  return data;
}

}  // namespace paceline::test
