#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <tuple>
#include <vector>

#include "shm/buckets/second_level.h"
#include "shm/kernels/kernels.h"
#include "support/thread_ranks.h"

namespace paceline::test {

// A network between nodes that are groups of threads in this process. A thread of its own completes
// what all nodes have started, in any order, each after it was polled some times.
class FakeNetwork {
 public:
  FakeNetwork(const std::vector<int>& node_sizes, int lanes) : lanes_(lanes) {
    int index = 0;
    for (const int size : node_sizes) {
      auto& here = nodes_.emplace_back();
      for (int rank = 0; rank < size; ++rank) {
        here.push_back(index++);
        nodes_of_ranks_.push_back(static_cast<int>(nodes_.size()) - 1);
      }
    }
    for (int i = 0; i < index; ++i) global_ranks_.push_back(global_rank_of(i));
    at_step_.resize(nodes_.size());
    aborted_.resize(nodes_.size());
    worker_ = std::thread([this] { work(); });
  }
  ~FakeNetwork() {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
    }
    changed_.notify_all();
    worker_.join();
    let_go();
  }

  // Not the rank's place in the job, so that one is not taken for the other.
  static int global_rank_of(int index) { return 100 + index; }
  std::vector<int> global_ranks_of(int node) const {
    std::vector<int> ranks;
    for (const int index : nodes_[static_cast<std::size_t>(node)]) {
      ranks.push_back(global_rank_of(index));
    }
    return ranks;
  }
  int node_of(int index) const { return nodes_of_ranks_[static_cast<std::size_t>(index)]; }
  const std::vector<std::vector<int>>& nodes() const { return nodes_; }

  // For one rank of a node.
  std::shared_ptr<shm::SecondLevel> level(int node) { return std::make_shared<Level>(*this, node); }

  // From here on no part of a bucket is completed, until this is called with false.
  void hold(bool holds) {
    {
      const std::lock_guard lock(mutex_);
      holds_ = holds;
    }
    changed_.notify_all();
  }
  // The same for what is gathered.
  void hold_gatherings(bool holds) {
    {
      const std::lock_guard lock(mutex_);
      holds_gatherings_ = holds;
    }
    changed_.notify_all();
  }
  // Once the rank at this place in the job has asked what an exchange waits for, it hangs in the
  // exchange's next poll, until this is called with nothing.
  void hang(std::optional<int> index) {
    {
      const std::lock_guard lock(mutex_);
      hangs_at_ = index;
      hung_ = false;
    }
    changed_.notify_all();
  }
  bool hung() {
    const std::lock_guard lock(mutex_);
    return hung_;
  }
  // Is called whenever a rank asks what an exchange waits for, with its place in the job.
  void on_awaited(std::function<void(int)> callback) { on_awaited_ = std::move(callback); }
  // The leaders that ranks of other nodes hear nothing of. Call it before the ranks start.
  void silence(const shm::RankSet& leaders) { silent_leaders_ = leaders; }
  // How many parts of buckets all nodes have started.
  std::size_t started() {
    const std::lock_guard lock(mutex_);
    return static_cast<std::size_t>(std::ranges::count_if(exchanges_, [](const auto& entry) {
      return entry.second->reduction && is_whole(*entry.second);
    }));
  }
  // Has all polls of parts of buckets throw this, or only those of one node; none is completed.
  void fail(std::exception_ptr failure, std::optional<std::size_t> node = std::nullopt) {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
    fails_at_ = node;
  }
  // How many stages and levels were destroyed.
  int destroyed() const { return destroyed_; }
  // How often ranks have aborted a step.
  int aborts() const { return aborts_; }
  // Writes to all buffers of cancelled parts, as an engine may that is slow to notice, and then
  // lets go of them. Returns how many there were.
  std::size_t let_go() {
    const std::lock_guard lock(mutex_);
    const std::size_t number = late_.size();
    write_late();
    late_.clear();
    return number;
  }

 private:
  struct Buffer {
    std::shared_ptr<std::byte> data;
    std::size_t bytes;
  };
  // Step, bucket, lane; or step, -1, phase.
  using Key = std::tuple<std::uint32_t, std::ptrdiff_t, int>;
  struct Exchange {
    std::vector<std::optional<Buffer>> parts;   // by node
    std::vector<std::vector<std::byte>> given;  // by node, where it is a gathering
    std::optional<shm::SecondLevel::LaneReduction> reduction;
    std::uint32_t step = 0;
    std::map<std::size_t, shm::RankSet> aborted_by;  // nodes, and the ranks at fault
    int polls_to_come = 0;
    bool complete = false;
  };

  class Stage final : public shm::SecondLevel::Stage {
   public:
    Stage(FakeNetwork& network, std::size_t node, int index, std::shared_ptr<Exchange> exchange)
        : network_(network), node_(node), index_(index), exchange_(std::move(exchange)) {}

    ~Stage() override { ++network_.destroyed_; }
    State poll() override {
      std::unique_lock lock(network_.mutex_);
      if (hangs_ && network_.hangs_at_ == index_) network_.hung_ = true;
      network_.changed_.wait(lock, [&] { return !hangs_ || network_.hangs_at_ != index_; });
      if (exchange_->complete) return State::complete;
      if (network_.failure_ && exchange_->reduction &&
          network_.fails_at_.value_or(node_) == node_) {
        std::rethrow_exception(network_.failure_);
      }
      if (!exchange_->aborted_by.empty()) return State::aborted;
      if (exchange_->polls_to_come > 0) --exchange_->polls_to_come;
      network_.changed_.notify_all();
      return State::under_way;
    }
    void cancel() noexcept override {
      const std::lock_guard lock(network_.mutex_);
      if (exchange_->complete) return;
      network_.mark_aborted(*exchange_, node_);
      auto& part = exchange_->parts[node_];
      if (part) network_.late_.push_back(*part);
      part.reset();
    }
    shm::RankSet at_fault() const override {
      const std::lock_guard lock(network_.mutex_);
      shm::RankSet ranks;
      for (const auto& [_, at_fault] : exchange_->aborted_by) ranks |= at_fault;
      return ranks;
    }
    shm::RankSet awaited() const override {
      if (network_.on_awaited_) network_.on_awaited_(index_);
      const std::lock_guard lock(network_.mutex_);
      hangs_ = network_.hangs_at_ == index_;
      shm::RankSet ranks;
      shm::RankSet others;
      for (std::size_t node = 0; node < network_.nodes_.size(); ++node) {
        const shm::RankSet its(network_.global_ranks_of(static_cast<int>(node)));
        if (node != node_) others |= its;
        if (!exchange_->parts[node]) ranks |= its;
      }
      return ranks.empty() ? others : ranks;
    }

   private:
    FakeNetwork& network_;
    std::size_t node_;
    int index_;
    std::shared_ptr<Exchange> exchange_;
    mutable bool hangs_ = false;
  };

  class Level final : public shm::SecondLevel {
   public:
    Level(FakeNetwork& network, int node)
        : network_(network), node_(static_cast<std::size_t>(node)), parts_(1) {
      for (std::size_t rank = 0; rank < here().size(); ++rank) {
        parts_[0].push_back(static_cast<int>(rank));
      }
    }

    ~Level() override { ++network_.destroyed_; }
    const std::vector<int>& ranks() const override { return network_.global_ranks_; }
    const std::vector<int>& nodes() const override { return network_.nodes_of_ranks_; }
    const std::vector<int>& here() const override { return network_.nodes_[node_]; }
    const std::vector<std::vector<int>>& parts() const override { return parts_; }
    int lanes() const override { return network_.lanes_; }

    std::unique_ptr<shm::SecondLevel::Stage> gather(const Collection& what,
                                                    std::span<const std::byte> mine,
                                                    std::shared_ptr<std::byte> all) override {
      const std::size_t each = mine.size() / here().size();
      return network_.enter(node_, {what.step, -1, static_cast<int>(what.phase)},
                            {std::move(all), each * ranks().size()}, mine, std::nullopt);
    }
    std::unique_ptr<shm::SecondLevel::Stage> start(const LaneReduction& what,
                                                   std::shared_ptr<std::byte> buffer) override {
      return network_.enter(node_, {what.step, static_cast<std::ptrdiff_t>(what.bucket), what.lane},
                            {std::move(buffer), what.count * shm::element_size(what.type)}, {},
                            what);
    }
    shm::RankSet silent_leaders() override { return network_.silent_leaders_; }
    void abort(std::uint32_t step, const shm::RankSet& at_fault, bool /*gone*/) noexcept override {
      network_.abort(node_, step, at_fault);
    }

   private:
    FakeNetwork& network_;
    std::size_t node_;
    std::vector<std::vector<int>> parts_;  // one of all local ranks
  };

  void abort(std::size_t node, std::uint32_t step, const shm::RankSet& at_fault) {
    ++aborts_;
    const std::lock_guard lock(mutex_);
    aborted_[node].try_emplace(step, at_fault);
    mark_aborted();
  }

  // A node takes no part in exchanges that it has not started, of steps that it has aborted or
  // left.
  void mark_aborted() {
    for (const auto& [_, open] : exchanges_) {
      for (std::size_t node = 0; node < nodes_.size(); ++node) {
        if (open->parts[node] || open->complete) continue;
        if (at_step_[node] > open->step || aborted_[node].contains(open->step)) {
          mark_aborted(*open, node);
        }
      }
    }
  }
  void mark_aborted(Exchange& exchange, std::size_t node) {
    const auto aborted = aborted_[node].find(exchange.step);
    exchange.aborted_by[node] = aborted != aborted_[node].end()
                                    ? aborted->second
                                    : shm::RankSet(global_ranks_of(static_cast<int>(node)));
  }

  std::unique_ptr<shm::SecondLevel::Stage> enter(
      std::size_t node, const Key& key, Buffer buffer, std::span<const std::byte> given,
      const std::optional<shm::SecondLevel::LaneReduction>& reduction) {
    const std::lock_guard lock(mutex_);
    // Node by node, steps only grow; what is left of an earlier one was aborted.
    at_step_[node] = std::get<0>(key);
    auto& exchange = exchanges_[key];
    if (!exchange) {
      exchange = std::make_shared<Exchange>();
      exchange->step = std::get<0>(key);
      exchange->parts.resize(nodes_.size());
      exchange->given.resize(nodes_.size());
      exchange->polls_to_come = static_cast<int>(random_() % 6);
    }
    // What is still written late must not be what is reduced now.
    if (reduction) write_late();
    exchange->parts[node] = std::move(buffer);
    exchange->given[node].assign(given.begin(), given.end());
    exchange->reduction = reduction;
    mark_aborted();
    changed_.notify_all();
    const auto local_rank = static_cast<std::size_t>(reduction ? reduction->lane : 0);
    return std::make_unique<Stage>(*this, node, nodes_[node][local_rank], exchange);
  }

  void write_late() {
    for (const Buffer& late : late_) std::memset(late.data.get(), 0xee, late.bytes);
  }

  bool can_complete(const Exchange& exchange) const {
    if (exchange.complete || exchange.polls_to_come > 0) return false;
    if (exchange.reduction ? holds_ || failure_ : holds_gatherings_) return false;
    return is_whole(exchange);
  }
  static bool is_whole(const Exchange& exchange) {
    return std::ranges::all_of(exchange.parts, [](const auto& part) { return part.has_value(); });
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (!stops_) {
      std::vector<Exchange*> ready;
      for (const auto& [_, exchange] : exchanges_) {
        if (can_complete(*exchange)) ready.push_back(exchange.get());
      }
      if (ready.empty()) {
        changed_.wait(lock);
      } else {
        complete(*ready[random_() % ready.size()]);
      }
    }
  }

  static void complete(Exchange& exchange) {
    exchange.complete = true;
    if (exchange.reduction) {
      std::vector<const void*> from;
      std::vector<void*> to;
      for (const auto& part : exchange.parts) from.push_back(to.emplace_back(part->data.get()));
      shm::reduce(exchange.reduction->type, exchange.reduction->op, from, to,
                  exchange.reduction->count);
    } else {
      std::vector<std::byte> all;
      for (const auto& given : exchange.given) all.insert(all.end(), given.begin(), given.end());
      for (const auto& part : exchange.parts) {
        std::memcpy(part->data.get(), all.data(), all.size());
      }
    }
    for (auto& part : exchange.parts) part->data.reset();
  }

  int lanes_;
  std::vector<std::vector<int>> nodes_;  // the places of their ranks in the job
  std::vector<int> global_ranks_;
  std::vector<int> nodes_of_ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, std::shared_ptr<Exchange>> exchanges_;
  std::vector<std::uint32_t> at_step_;  // by node
  // By node: the steps that a rank of it aborted, and the ranks at fault.
  std::vector<std::map<std::uint32_t, shm::RankSet>> aborted_;
  std::vector<Buffer> late_;
  std::exception_ptr failure_;
  std::optional<std::size_t> fails_at_;  // all nodes, if there is none
  std::mt19937 random_{1};
  std::optional<int> hangs_at_;
  bool hung_ = false;
  std::function<void(int)> on_awaited_;
  shm::RankSet silent_leaders_;
  std::atomic<int> destroyed_ = 0;
  std::atomic<int> aborts_ = 0;
  bool holds_ = false;
  bool holds_gatherings_ = false;
  bool stops_ = false;
  std::thread worker_;
};

// Runs `body(region, node, place in the job)` for each rank of each node, and rethrows the
// exception of the lowest that threw. Nodes have regions of their own.
inline void run_nodes(FakeNetwork& network,
                      const std::function<void(std::shared_ptr<shm::Region>, int, int)>& body,
                      std::chrono::milliseconds timeout = std::chrono::minutes(1)) {
  std::vector<std::exception_ptr> errors(64);
  std::vector<std::thread> threads;
  for (std::size_t node = 0; node < network.nodes().size(); ++node) {
    const auto& here = network.nodes()[node];
    shm::RegionOptions options = small_region(timeout);
    options.global_ranks = shm::GlobalRanks(network.global_ranks_of(static_cast<int>(node)));
    auto regions = make_thread_regions(static_cast<int>(here.size()), options);
    for (std::size_t rank = 0; rank < here.size(); ++rank) {
      threads.emplace_back([&, node, index = here[rank], region = std::move(regions[rank])] {
        try {
          body(region, static_cast<int>(node), index);
        } catch (...) {
          errors[static_cast<std::size_t>(index)] = std::current_exception();
        }
      });
    }
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace paceline::test
