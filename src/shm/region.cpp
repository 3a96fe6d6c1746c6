#include "shm/region.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <paceline/error.h>

#include <exception>

#include "base/cores.h"
#include "shm/late_ranks.h"
#include "shm/membership/bootstrap_packets.h"
#include "shm/sync/fault_point.h"
#include "shm/sync/stop_detector.h"

namespace paceline::shm {
namespace {

// Maps the head of a group's memory, which may be possible where all of it is too much.
std::shared_ptr<GroupBlock> map_head(const base::UniqueFd& memory) {
  struct stat status {};
  if (::fstat(memory.get(), &status) != 0) return nullptr;
  if (static_cast<std::size_t>(status.st_size) < sizeof(GroupBlock)) return nullptr;
  void* const address =
      ::mmap(nullptr, sizeof(GroupBlock), PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (address == MAP_FAILED) return nullptr;
  return {static_cast<GroupBlock*>(address),
          [](GroupBlock* head) { ::munmap(head, sizeof(GroupBlock)); }};
}

std::shared_ptr<Region> enter(Membership membership, int rank, int size,
                              const RegionOptions& options) {
  const auto head = map_head(membership.memory);
  try {
    auto mapping = std::make_shared<Mapping>(std::move(membership.memory));
    return std::make_shared<Region>(mapping, std::move(membership), rank, size, options);
  } catch (const std::exception& error) {
    // The peers have joined, and this process may live on.
    const auto why = fmt::format(": {}", error.what());
    if (head) head->failure.record(lost_on_the_way(rank, options.global_ranks, why));
    throw;
  }
}

GroupMemory memory_of(const Layout& layout) {
  return {layout.total(), layout.agreed()};
}

}  // namespace

Layout Region::layout(int size, const RegionOptions& options) {
  return {size, options.staging_bytes, options.arena_bytes};
}

std::shared_ptr<Region> Region::create(Exchange& exchange, const RegionOptions& options) {
  return enter(join(exchange, memory_of(layout(exchange.size(), options)),
                    base::Deadline::after(options.timeout), options.global_ranks),
               exchange.rank(), exchange.size(), options);
}

std::shared_ptr<Region> Region::create(BootstrapSockets sockets, int rank, int size,
                                       const RegionOptions& options) {
  return enter(join(std::move(sockets), rank, size, memory_of(layout(size, options)),
                    base::Deadline::after(options.timeout), options.global_ranks),
               rank, size, options);
}

std::shared_ptr<Region> Region::create(const std::vector<Endpoint>& endpoints, int rank,
                                       base::UniqueFd listener, std::uint64_t group,
                                       const RegionOptions& options) {
  const auto size = static_cast<int>(endpoints.size());
  return enter(join(endpoints, rank, std::move(listener), group, memory_of(layout(size, options)),
                    base::Deadline::after(options.timeout), options.global_ranks),
               rank, size, options);
}

Region::Region(const std::shared_ptr<Mapping>& mapping, Membership membership, int rank, int size,
               const RegionOptions& options)
    : rank_(rank),
      size_(size),
      options_(options),
      memory_(
          std::make_unique<RegionMemory>(mapping, layout(size, options).in(mapping->size()), rank)),
      peers_(*memory_, std::move(membership), rank),
      cross_memory_(*memory_, peers_.membership(), rank),
      threads_(*memory_, rank),
      depart_at_exit_([this] { depart(); }) {
  memory_->group_block().cores.add(base::affinity(), base::core_quota());
}

Region::~Region() {
  depart();
}

void Region::depart() noexcept {
  if (in_forked_child()) return;
  departed_ = true;
  publish(memory_->rank_block(rank_).departed, 1);
}

void* Region::allocate_or_throw(std::size_t bytes, std::size_t alignment) {
  if (void* const block = memory_->allocate(bytes, alignment)) return block;
  check_usable({"allocate", 0});
  throw Error(
      fmt::format("no room for {} bytes of shared memory in group {}: {} of {} bytes are in use",
                  bytes, options_.name, memory_->bytes_in_use(), memory_->capacity()));
}

void Region::publish(Word& word, std::uint32_t value) {
  fault_point();
  // Sequentially consistent, as the sleeper's side is: either it sees the new value, or we see it.
  word.store(value, std::memory_order_seq_cst);
  if (memory_->rank_block(rank_).sleepers.load(std::memory_order_seq_cst) != 0) {
    futex_wake_all(word);
  }
}

void Region::ring_peers() {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) ring(peer);
  }
}

void Region::listen(std::uint32_t heard) {
  memory_->rank_block(rank_).doorbell.listen(heard, ladder(), [this] { return failed(); });
}

void Region::await_slowly(const Word& word, std::uint32_t target, int peer, WaitContext& context) {
  const auto ends = [&] { return reached(word, target) || failed(); };
  if (!context.poll() && ladder().spin_or_yield(ends) && reached(word, target)) return;
  auto& deadline = context.deadline.deadline;
  if (!deadline) deadline = base::Deadline::after(context.deadline.timeout);
  StopDetector detector;
  while (!reached(word, target)) {
    if (const auto stopped = detector.look(); stopped.count() > 0) {
      StopDetector::postpone(*deadline, stopped, context.deadline.timeout);
    }
    check_progress(word, target, peer, context);
    context.polls() ? poll_for_a_slice(word, target, context) : sleep(word, target, peer);
  }
}

void Region::sleep(const Word& word, std::uint32_t target, int peer) {
  Word& sleepers = memory_->rank_block(peer).sleepers;
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t seen = word.load(std::memory_order_seq_cst);
  if (static_cast<std::int32_t>(seen - target) < 0) futex_wait(word, seen, kSleepSlice);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

// For as long as a wait sleeps between two checks of its peers.
void Region::poll_for_a_slice(const Word& word, std::uint32_t target, WaitContext& context) {
  const auto slice = base::Deadline::after(kSleepSlice);
  do {
    const std::uint32_t heard = rings();
    if (context.poll()) {
      ::sched_yield();
    } else if (!reached(word, target)) {
      listen(heard);
    }
  } while (!reached(word, target) && !failed() && !slice.expired());
}

// Throws if the wait can no longer succeed.
void Region::check_progress(const Word& word, std::uint32_t target, int peer,
                            WaitContext& context) {
  // A call succeeds once all peers have done their part, even if something fails afterwards.
  if (failed() && !reached(word, target)) throw_recorded(context.op);
  context.check(peer);
  for (int other = 0; other < size_; ++other) {
    if (other == peer ? peers_.is_here(peer) : !peers_.has_died(other)) continue;
    // The peer may have written the word after we read it and before it left.
    if (reached(word, target)) continue;
    if (other == peer) context.check(peer);  // which may know more about a rank that has left
    fail_lost(other, context.describe(), context.op);
  }
  if (reached(word, target)) return;
  report_late_ranks(*this, peer, context);
  if (!context.deadline.deadline->expired() || reached(word, target)) return;
  if (!context.may_learn_more()) fail_late(peer, context);
}

void Region::fail_late(int peer, const WaitContext& context) {
  const LateRanks late = find_late_ranks(*this, peer, context);
  fail({FailureKind::timeout, late.on_other_nodes | global_ranks().of(late.ranks),
        fmt::format("{} did not arrive within the timeout of {} s at {}", late.names,
                    context.deadline.timeout.count() / 1000.0, late.where)},
       context.op);
}

bool Region::claim_report(int late, std::chrono::steady_clock::time_point since) {
  const auto ticks = [](auto time) {
    return static_cast<std::uint64_t>(time.time_since_epoch().count());
  };
  auto& claimed = memory_->rank_block(late).late_report;
  std::uint64_t last = claimed.load(std::memory_order_relaxed);
  return last <= ticks(since) &&
         claimed.compare_exchange_strong(last, ticks(std::chrono::steady_clock::now()),
                                         std::memory_order_relaxed);
}

void Region::begin_awaiting(int global_rank) {
  memory_->rank_block(rank_).awaited.store(static_cast<std::uint32_t>(global_rank + 1),
                                           std::memory_order_relaxed);
}

void Region::end_awaiting(int global_rank) {
  auto own = static_cast<std::uint32_t>(global_rank + 1);
  memory_->rank_block(rank_).awaited.compare_exchange_strong(own, 0, std::memory_order_relaxed);
}

std::optional<int> Region::awaited_by(int global_rank) const {
  if (global_rank < 0 || global_rank >= kMaxWorldSize) return std::nullopt;
  const auto here = find(global_rank);
  const auto& elsewhere = memory_->group_block().awaited_elsewhere;
  const auto& word =
      here ? memory_->rank_block(*here).awaited : elsewhere[static_cast<std::size_t>(global_rank)];
  const auto value = word.load(std::memory_order_relaxed);
  if (value == 0 || value > kMaxWorldSize) return std::nullopt;
  return static_cast<int>(value) - 1;
}

bool Region::has_left(int global_rank) const {
  if (const auto here = find(global_rank)) return peers_.has_left(*here);
  RankSet::Words words{};
  const auto& left = memory_->group_block().left_elsewhere;
  std::ranges::transform(left, words.begin(),
                         [](const auto& word) { return word.load(std::memory_order_relaxed); });
  return RankSet(words).contains(global_rank);
}

void Region::set_left_elsewhere(const RankSet& global_ranks) {
  auto& left = memory_->group_block().left_elsewhere;
  for (std::size_t i = 0; i < left.size(); ++i) {
    left[i].store(global_ranks.words()[i], std::memory_order_relaxed);
  }
}

std::optional<int> Region::find(int global_rank) const {
  for (int rank = 0; rank < size_; ++rank) {
    if (global_ranks().of(rank) == global_rank) return rank;
  }
  return std::nullopt;
}

Failure Region::failure() const {
  return failed() ? memory_->group_block().failure.read() : Failure();
}

void Region::fail(const Failure& failure, const OpContext& op) {
  memory_->group_block().failure.record(failure);
  throw_recorded(op);  // even if it is this one: a long text was cut, and all ranks throw the same
}

void Region::throw_recorded(const OpContext& op) const {
  throw_failure(memory_->group_block().failure.read(), op);
}

void Region::fail_lost(int peer, const std::string& where, const OpContext& op) {
  fail({FailureKind::peer_lost,
        {global_ranks().of(peer)},
        fmt::format("{} {} and is missing in {}", global_ranks().describe({peer}),
                    peers_.describe_loss(peer), where)},
       op);
}

void Region::check_usable(const OpContext& op) const {
  if (in_forked_child()) {
    throw UsageError(
        fmt::format("{} in a forked child of rank {}: the group belongs to the parent process. "
                    "Start new processes instead of forking.",
                    op.operation, global_ranks().of(rank_)));
  }
  if (failed()) throw_recorded(op);
  if (departed_) {
    throw UsageError(
        fmt::format("{} on group {}, which this rank has left", op.operation, options_.name));
  }
}

void Region::check_peers(const std::vector<int>& needed, const OpContext& op) {
  check_usable(op);
  for (int peer = 0; peer < size_; ++peer) {
    if (peers_.has_died(peer)) fail_lost(peer, op.operation, op);
  }
  for (const int peer : needed) {
    if (peer != rank_ && peers_.has_left(peer)) fail_lost(peer, op.operation, op);
  }
}

bool Region::has_failed() const {
  bool any = failed();
  for (int peer = 0; peer < size_ && !any; ++peer) any = peers_.has_died(peer);
  return any;
}

void Region::abort(const std::string& text) noexcept {
  if (in_forked_child()) return;
  try {
    Failure failure{FailureKind::peer_lost,
                    {global_ranks().of(rank_)},
                    fmt::format("{} left the group with an exception: {}",
                                global_ranks().describe({rank_}), text)};
    // The exception may follow from a death, in another group or during the bootstrap.
    for (int peer = 0; peer < size_; ++peer) {
      if (!peers_.has_died(peer)) continue;
      failure.ranks = {global_ranks().of(peer)};
      failure.text = fmt::format("{} {}; {}", global_ranks().describe({peer}),
                                 peers_.describe_loss(peer), failure.text);
      break;
    }
    memory_->group_block().failure.record(failure);
  } catch (const std::exception&) {
    // No memory for the text: the peers notice that this rank has departed.
  }
}

}  // namespace paceline::shm
