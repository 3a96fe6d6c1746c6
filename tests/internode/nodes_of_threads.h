#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "internode/group.h"
#include "support/thread_ranks.h"

namespace paceline::test {

// A network between ranks that are threads of this process. A thread of its own carries messages
// whose both ends have come, in any order.
class EngineNetwork {
 public:
  EngineNetwork() : worker_([this] { work(); }) {}
  ~EngineNetwork() {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
    }
    changed_.notify_all();
    worker_.join();
  }

  std::unique_ptr<internode::Engine> engine(int rank) {
    return std::make_unique<FakeEngine>(*this, rank);
  }
  // From here on transfers of this rank fail.
  void fail(int rank) {
    {
      const std::lock_guard lock(mutex_);
      failing_.insert(rank);
      for (const auto& open : open_) open->failed = open->failed || open->rank == rank;
    }
    changed_.notify_all();
  }
  // From here on this rank can start only so many transfers.
  void limit(int rank, int transfers) {
    const std::lock_guard lock(mutex_);
    limits_[rank] = transfers;
  }
  // From here on this rank hangs where it starts a transfer, until release().
  void hang(int rank) {
    const std::lock_guard lock(mutex_);
    hanging_ = rank;
  }
  void release() {
    {
      const std::lock_guard lock(mutex_);
      hanging_.reset();
    }
    changed_.notify_all();
  }
  // Returns once a transfer has failed, and its rank was told.
  void await_failure() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return failures_ > 0; });
  }
  // How many transfers have been started.
  int started() {
    const std::lock_guard lock(mutex_);
    return started_;
  }
  // How many of them are not complete.
  std::size_t under_way() {
    const std::lock_guard lock(mutex_);
    return open_.size();
  }
  // The bytes that were carried from one rank to another.
  std::size_t carried() {
    const std::lock_guard lock(mutex_);
    return carried_;
  }

 private:
  using Message = internode::Engine::Message;
  struct Transfer {
    int rank;
    std::uint32_t tag;
    std::vector<Message> sends;
    std::vector<Message> receives;
    std::function<void()> when_done;
    bool failed = false;
    std::shared_ptr<const void> abandoned{};  // its memory
  };

  class FakeEngine final : public internode::Engine {
   public:
    FakeEngine(EngineNetwork& network, int rank) : network_(network), rank_(rank) {}
    std::unique_ptr<internode::Engine::Transfer> connect(const std::vector<int>& ranks,
                                                         std::function<void()> when_done) override {
      std::vector<Message> messages;
      for (const int rank : ranks) messages.push_back({rank, &nothing_, 0});
      return start(kConnectTag, messages, messages, std::move(when_done));
    }
    std::unique_ptr<internode::Engine::Transfer> start(std::uint32_t tag,
                                                       const std::vector<Message>& sends,
                                                       const std::vector<Message>& receives,
                                                       std::function<void()> when_done) override {
      std::unique_lock lock(network_.mutex_);
      network_.changed_.wait(lock, [&] { return network_.hanging_ != rank_; });
      const auto limit = network_.limits_.find(rank_);
      if (limit != network_.limits_.end() && limit->second-- <= 0) {
        throw std::runtime_error("no thread is left");
      }
      auto transfer = std::make_shared<EngineNetwork::Transfer>(
          EngineNetwork::Transfer{rank_, tag, sends, receives, std::move(when_done)});
      transfer->failed = network_.failing_.contains(rank_);
      network_.open_.push_back(transfer);
      ++network_.started_;
      network_.changed_.notify_all();
      return std::make_unique<Handle>(network_, std::move(transfer));
    }

   private:
    class Handle final : public internode::Engine::Transfer {
     public:
      Handle(EngineNetwork& network, std::shared_ptr<EngineNetwork::Transfer> transfer)
          : network_(network), transfer_(std::move(transfer)) {}
      ~Handle() override {
        std::unique_lock lock(network_.mutex_);
        if (transfer_->abandoned) return;
        // What calls `when_done` has taken it out before.
        std::erase(network_.open_, transfer_);
        network_.changed_.wait(lock, [&] { return network_.calling_ != transfer_.get(); });
      }
      void check() override {
        const std::lock_guard lock(network_.mutex_);
        if (transfer_->failed) throw std::runtime_error("the wire broke");
      }
      std::optional<int> awaited() const override {
        const std::lock_guard lock(network_.mutex_);
        for (const auto& messages : {transfer_->receives, transfer_->sends}) {
          if (!messages.empty()) return messages.front().rank;
        }
        return std::nullopt;
      }
      void abandon(std::shared_ptr<const void> memory) override {
        std::unique_lock lock(network_.mutex_);
        transfer_->abandoned = std::move(memory);
        network_.changed_.wait(lock, [&] { return network_.calling_ != transfer_.get(); });
      }

     private:
      EngineNetwork& network_;
      std::shared_ptr<EngineNetwork::Transfer> transfer_;
    };

    static constexpr std::uint32_t kConnectTag = ~std::uint32_t{0};
    EngineNetwork& network_;
    int rank_;
    std::byte nothing_{};
  };

  // The message to or from `rank` of the transfer of `own` with this tag that was started first.
  static Message* first(const std::vector<std::shared_ptr<Transfer>>& open, int own,
                        std::uint32_t tag, std::vector<Message> Transfer::*messages, int rank) {
    for (const auto& transfer : open) {
      if (transfer->rank != own || transfer->tag != tag) continue;
      const auto found = std::ranges::find((*transfer).*messages, rank, &Message::rank);
      if (found != ((*transfer).*messages).end()) return &*found;
    }
    return nullptr;
  }

  // Carries one message, any of those whose both ends have come; returns whether there was one.
  bool carry() {
    std::vector<std::shared_ptr<Transfer>> order = open_;
    std::ranges::shuffle(order, random_);
    for (const auto& from : order) {
      for (const Message& one : from->sends) {
        const int to = one.rank;
        Message* const sent = first(open_, from->rank, from->tag, &Transfer::sends, to);
        Message* const expected = first(open_, to, from->tag, &Transfer::receives, from->rank);
        if (expected == nullptr) continue;
        // The engines that exist end the process.
        if (expected->bytes != sent->bytes) {
          ADD_FAILURE() << "rank " << from->rank << " sends " << sent->bytes << " bytes to rank "
                        << to << ", which expects " << expected->bytes;
          std::terminate();
        }
        std::memcpy(expected->data, sent->data, sent->bytes);
        carried_ += sent->bytes;
        for (const auto& transfer : open_) {
          const auto is = [&](const Message* message) {
            return [message](const Message& other) { return &other == message; };
          };
          std::erase_if(transfer->sends, is(sent));
          std::erase_if(transfer->receives, is(expected));
        }
        return true;
      }
    }
    return false;
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (!stops_) {
      const auto ended = std::ranges::find_if(open_, [](const auto& open) {
        return open->failed || (open->sends.empty() && open->receives.empty());
      });
      if (ended != open_.end()) {
        const auto transfer = std::move(*ended);
        open_.erase(ended);
        if (transfer->abandoned) continue;
        calling_ = transfer.get();
        lock.unlock();
        transfer->when_done();
        lock.lock();
        calling_ = nullptr;
        if (transfer->failed) ++failures_;
        changed_.notify_all();
      } else if (!carry()) {
        changed_.wait(lock);
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Transfer>> open_;
  const Transfer* calling_ = nullptr;  // whose callback runs
  std::set<int> failing_;
  std::map<int, int> limits_;  // transfers, by rank
  std::optional<int> hanging_;
  std::size_t carried_ = 0;
  int started_ = 0;
  int failures_ = 0;
  std::mt19937 random_{1};
  bool stops_ = false;
  std::thread worker_;
};

// Not the rank in the group, so that one is not taken for the other.
inline int global_rank_of(int rank) {
  return 100 + rank;
}

// The connections of each node's leader to the others.
inline std::vector<internode::NodeLinks::Connections> connect_nodes(int nodes) {
  using net::SecureChannel;
  const net::Key key = net::make_key("a secret");
  std::vector<internode::NodeLinks::Connections> all(static_cast<std::size_t>(nodes));
  for (auto& of_node : all) of_node.resize(all.size());
  for (std::size_t a = 0; a < all.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      int ends[2];
      EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
      all[a][b].connection = std::make_unique<net::Connection>(
          base::UniqueFd(ends[0]), key, SecureChannel::Side::connecting, "process");
      all[b][a].connection = std::make_unique<net::Connection>(
          base::UniqueFd(ends[1]), key, SecureChannel::Side::accepting, "process");
      // Until it has heard the other end, the accepting one keeps what it has to send.
      all[a][b].connection->send(encode(internode::LinkMessage(internode::Left{})));
    }
  }
  return all;
}

// Runs `body` on a thread for each rank of a group; `nodes` has the node of each. Returns their
// exceptions, by rank.
inline std::vector<std::exception_ptr> run_on_nodes(
    const std::vector<int>& nodes, EngineNetwork& network,
    const std::function<void(internode::Group&)>& body,
    std::chrono::milliseconds timeout = std::chrono::minutes(1)) {
  const auto size = static_cast<int>(nodes.size());
  std::vector<int> global;
  for (int rank = 0; rank < size; ++rank) global.push_back(global_rank_of(rank));
  const internode::NodeMap map(nodes, 0);
  auto connections = connect_nodes(map.nodes());
  std::vector<std::exception_ptr> errors(nodes.size());
  std::vector<std::thread> threads;
  for (int node = 0; node < map.nodes(); ++node) {
    const auto& here = map.ranks_on(node);
    shm::RegionOptions options = small_region(timeout);
    std::vector<int> global_here;
    for (const int rank : here) global_here.push_back(global_rank_of(rank));
    options.global_ranks = shm::GlobalRanks(global_here, std::vector<int>(here.size(), node));
    auto regions = make_thread_regions(static_cast<int>(here.size()), options);
    for (std::size_t local = 0; local < here.size(); ++local) {
      const int rank = here[local];
      internode::NodeLinks::Connections own;
      if (local == 0) own = std::move(connections[static_cast<std::size_t>(node)]);
      threads.emplace_back(
          [&, rank, region = std::move(regions[local]), own = std::move(own)]() mutable {
            try {
              const internode::NodeMap place(nodes, rank);
              std::vector<int> numbers;
              for (int other = 0; other < place.size(); ++other) {
                numbers.push_back(place.node_of(other));
              }
              internode::Group group(region, place, shm::GlobalRanks(global, numbers),
                                     std::move(own), network.engine(rank));
              try {
                body(group);
              } catch (...) {
                errors[static_cast<std::size_t>(rank)] = std::current_exception();
              }
              region->depart();
            } catch (...) {
              errors[static_cast<std::size_t>(rank)] = std::current_exception();
            }
          });
    }
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

// The same, and rethrows the exception of the lowest rank that threw.
inline void run_on_nodes(const std::vector<int>& nodes,
                         const std::function<void(internode::Group&)>& body) {
  EngineNetwork network;
  for (const auto& error : run_on_nodes(nodes, network, body)) {
    if (error) std::rethrow_exception(error);
  }
}

// What a rank's body threw, which has to be of this type.
template <typename Error>
Error thrown(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const Error& expected) {
    return expected;
  } catch (const std::exception& other) {
    ADD_FAILURE() << "another exception: " << other.what();
  }
  ADD_FAILURE() << "the expected exception was not thrown";
  return Error("", {}, "", 0);
}

}  // namespace paceline::test
