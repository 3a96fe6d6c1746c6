#include "internode/unmatched_messages.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <iterator>
#include <set>
#include <utility>

#include "internode/bucket_tags.h"

namespace paceline::internode {
namespace {

// While the next transfer may start.
constexpr std::size_t kMaxExchanges = 1;

void abandon(Engine::Transfer& transfer, std::shared_ptr<const void> memory) noexcept {
  try {
    transfer.abandon(std::move(memory));
  } catch (const std::exception&) {
    // No memory: the engine is of no use any more, and later steps fail.
  }
}

}  // namespace

// Of one epoch that is over. Phase 0 exchanges how many messages the ranks have started, phase 1
// which.
class UnmatchedMessages::Exchange {
 public:
  Exchange(UnmatchedMessages& all, std::vector<Started> started)
      : all_(all), epoch_(all.epoch_), data_(std::make_shared<Data>()) {
    for (const int rank : all_.peers_) {
      Peer& peer = data_->peers.emplace_back();
      peer.rank = rank;
      std::ranges::copy_if(started, std::back_inserter(peer.own.messages),
                           [&](const Started& one) { return one.rank == rank; });
      peer.own.counts = {all_.step_, static_cast<std::uint32_t>(peer.own.messages.size())};
    }
    exchange(0, [](Side& side) { return std::as_writable_bytes(std::span(&side.counts, 1)); });
  }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  ~Exchange() { abandon(*transfer_, data_); }

  std::optional<int> awaited() const { return transfer_->awaited(); }

  // Returns whether it is over.
  bool advance() {
    if (!data_->done) return false;
    try {
      transfer_->check();
      if (phase_ == 0) {
        for (Peer& peer : data_->peers) peer.other.messages.resize(peer.other.counts.messages);
        exchange(1, [](Side& side) { return std::as_writable_bytes(std::span(side.messages)); });
        return false;
      }
      for (const Peer& peer : data_->peers) start_missing(peer);
    } catch (const std::exception&) {
      // A rank is lost, as the step that is under way learns, or there is no memory.
    }
    return true;
  }

 private:
  struct Counts {
    std::uint32_t step;
    std::uint32_t messages;
  };
  // What one of the two ranks has started.
  struct Side {
    Counts counts{};
    std::vector<Started> messages{};
  };
  struct Peer {
    int rank;
    Side own{};
    Side other{};
  };
  // What the engine accesses.
  struct Data {
    std::vector<Peer> peers{};
    std::atomic<bool> done = false;
  };

  template <typename BytesOf>
  void exchange(std::uint32_t phase, BytesOf bytes_of) {
    std::vector<Engine::Message> sends;
    std::vector<Engine::Message> receives;
    for (Peer& peer : data_->peers) {
      const auto add = [&](auto& messages, std::span<std::byte> bytes) {
        if (!bytes.empty()) messages.push_back({peer.rank, bytes.data(), bytes.size()});
      };
      add(sends, bytes_of(peer.own));
      add(receives, bytes_of(peer.other));
    }
    phase_ = phase;
    data_->done = false;
    transfer_ = all_.engine_.start(tag_after(epoch_, phase), sends, receives,
                                   [data = data_, ring = all_.ring_] {
                                     data->done = true;
                                     ring();
                                   });
  }

  // What the other rank has started and this one has not.
  void start_missing(const Peer& peer) {
    const auto steps_ahead =
        static_cast<std::int32_t>(peer.own.counts.step - peer.other.counts.step);
    if (steps_ahead > 0) return;  // all of the other's step is complete
    std::set<std::uint32_t> own;
    if (steps_ahead == 0) {
      for (const Started& one : peer.own.messages) own.insert(one.tag);
    }
    for (const Started& one : peer.other.messages) {
      if (own.contains(one.tag)) continue;
      std::vector<Engine::Message> sends;
      std::vector<Engine::Message> receives;
      const std::shared_ptr<std::byte[]> memory(new std::byte[one.sent + one.received]());
      if (one.received > 0) sends.push_back({peer.rank, memory.get(), one.received});
      if (one.sent > 0) receives.push_back({peer.rank, memory.get() + one.received, one.sent});
      abandon(*all_.engine_.start(one.tag, sends, receives, [] {}), memory);
    }
  }

  UnmatchedMessages& all_;
  std::uint32_t epoch_;
  std::shared_ptr<Data> data_;
  std::uint32_t phase_ = 0;
  std::unique_ptr<Engine::Transfer> transfer_;
};

UnmatchedMessages::UnmatchedMessages(Engine& engine, std::vector<int> peers,
                                     std::function<void()> ring)
    : engine_(engine), peers_(std::move(peers)), ring_(std::move(ring)) {}

UnmatchedMessages::~UnmatchedMessages() = default;

void UnmatchedMessages::begin_step(std::uint32_t step, std::uint32_t epoch) {
  if (epoch == epoch_ && step != step_) started_.clear();
  for (; epoch_ != epoch; ++epoch_) {
    exchanges_.emplace_back(*this, std::exchange(started_, {}));
  }
  step_ = step;
}

void UnmatchedMessages::add(std::uint32_t tag, const std::vector<Engine::Message>& sends,
                            const std::vector<Engine::Message>& receives) {
  for (const Engine::Message& message : sends) entry(message.rank, tag).sent = message.bytes;
  for (const Engine::Message& message : receives) entry(message.rank, tag).received = message.bytes;
}

UnmatchedMessages::Started& UnmatchedMessages::entry(int rank, std::uint32_t tag) {
  for (auto one = started_.rbegin(); one != started_.rend() && one->tag == tag; ++one) {
    if (one->rank == rank) return *one;
  }
  return started_.emplace_back(Started{rank, tag, 0, 0});
}

std::optional<int> UnmatchedMessages::awaited() const {
  return exchanges_.empty() ? std::nullopt : exchanges_.front().awaited();
}

bool UnmatchedMessages::advance() {
  std::erase_if(exchanges_, [](Exchange& exchange) { return exchange.advance(); });
  return exchanges_.size() <= kMaxExchanges;
}

}  // namespace paceline::internode
