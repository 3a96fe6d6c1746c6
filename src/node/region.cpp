#include "node/region.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <paceline/error.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <set>

#include "base/cores.h"
#include "node/fault_point.h"
#include "node/socket.h"

namespace paceline::node {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPage = 4096;
// Each rank has four staging buffers, of at most this many bytes; docs/collectives.md tells why.
constexpr std::size_t kMaxBuffer = std::size_t{1} << 20;
// How long a wait costs CPU before it sleeps in the kernel. Spinning covers the skew between ranks
// that run side by side; it is short because ranks may share a core though there are enough, and
// yielding then lets the other get on with it.
constexpr auto kSpinning = std::chrono::microseconds(2);
constexpr auto kYielding = std::chrono::microseconds(200);
// Where ranks outnumber cores: one that yields keeps the kernel from giving its core to another.
constexpr auto kYieldingOnSharedCores = std::chrono::microseconds(40);
// How long it sleeps before it looks after its peers; bounds how late a death is noticed.
constexpr auto kSleep = std::chrono::milliseconds(10);

std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

std::size_t physical_memory() {
  return static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::atomic<unsigned>& forks() {
  static std::atomic<unsigned> count{0};
  static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
  return count;
}

}  // namespace

unsigned fork_generation() {
  return forks().load(std::memory_order_relaxed);
}

struct Region::Layout {
  Layout(int size, const RegionOptions& options)
      : buffer(buffer_size(size, options.staging_bytes)),
        stride(round_up(sizeof(RankState), kPage) + 4 * buffer +
               round_up(static_cast<std::size_t>(size) * sizeof(Outbox), kPage)),
        arena(round_up(options.arena_bytes != 0 ? options.arena_bytes : arena_size(size), kPage)),
        ranks_begin(round_up(sizeof(Header), kPage)),
        arenas_begin(ranks_begin + static_cast<std::size_t>(size) * stride),
        total(arenas_begin + static_cast<std::size_t>(size) * arena) {
    if (size < 1 || size > kMaxRanks) {
      throw UsageError(
          fmt::format("a group of {} ranks on one machine: 1 to {} are allowed", size, kMaxRanks));
    }
  }
  static std::size_t buffer_size(int size, std::size_t staging) {
    const std::size_t share = staging / (4 * static_cast<std::size_t>(std::max(size, 1)));
    return std::clamp(share / kPage * kPage, kPage, kMaxBuffer);
  }
  // Twice a rank's share of the machine, which no rank can use at once with the others; not all of
  // it for each, or the groups of many ranks would use up the address space.
  static std::size_t arena_size(int size) {
    const std::size_t memory = physical_memory();
    return std::min(memory, memory / static_cast<std::size_t>(std::max(size, 1)) * 2);
  }
  std::size_t buffer, stride, arena, ranks_begin, arenas_begin, total;
};

// A process that ends in good order leaves its groups so, even if nobody destroys them.
class Region::AtExit {
 public:
  static void add(Region* region) {
    AtExit& all = of_this_process();
    std::lock_guard lock(all.mutex_);
    all.regions_.insert(region);
  }
  static void remove(Region* region) {
    AtExit& all = of_this_process();
    std::lock_guard lock(all.mutex_);
    all.regions_.erase(region);
  }

 private:
  // Never destroyed: regions may be older than it is. A forked child begins anew, with its own
  // regions: its parent's are none of its business, and the lock may be held by a thread that it
  // does not have.
  static AtExit& of_this_process() {
    static std::atomic<AtExit*> current{nullptr};
    AtExit* found = current.load(std::memory_order_acquire);
    if (found != nullptr && found->generation_ == fork_generation()) return *found;
    auto fresh = std::make_unique<AtExit>();
    if (!current.compare_exchange_strong(found, fresh.get(), std::memory_order_acq_rel)) {
      return *found;  // another thread was first
    }
    static const int registered = std::atexit([] {
      AtExit& all = of_this_process();
      std::lock_guard lock(all.mutex_);
      for (Region* const region : all.regions_) region->depart();
    });
    static_cast<void>(registered);
    return *fresh.release();
  }

  const unsigned generation_ = fork_generation();
  std::mutex mutex_;
  std::set<Region*> regions_;
};

std::shared_ptr<Region> Region::enter(Membership membership, int rank, int size,
                                      const RegionOptions& options) {
  const Layout layout(size, options);
  auto mapping = std::make_shared<Mapping>(std::move(membership.memory), layout.total);
  return std::shared_ptr<Region>(
      new Region(std::move(mapping), std::move(membership), rank, size, options, layout));
}

std::shared_ptr<Region> Region::create(Exchange& exchange, const RegionOptions& options) {
  const Layout layout(exchange.size(), options);
  return enter(
      join(exchange, layout.total, base::Deadline::after(options.timeout), options.numbers),
      exchange.rank(), exchange.size(), options);
}

std::shared_ptr<Region> Region::create(Links links, int rank, int size,
                                       const RegionOptions& options) {
  const Layout layout(size, options);
  return enter(join(std::move(links), rank, size, layout.total,
                    base::Deadline::after(options.timeout), options.numbers),
               rank, size, options);
}

std::vector<std::shared_ptr<Region>> Region::create_for_threads(int size,
                                                                const RegionOptions& options) {
  const Layout layout(size, options);
  auto mapping = std::make_shared<Mapping>(Mapping::create_memory(layout.total), layout.total);
  std::vector<std::shared_ptr<Region>> regions;
  for (int rank = 0; rank < size; ++rank) {
    Membership alone;
    alone.peers.resize(static_cast<std::size_t>(size));
    regions.emplace_back(new Region(mapping, std::move(alone), rank, size, options, layout));
  }
  return regions;
}

Region::Region(std::shared_ptr<Mapping> mapping, Membership membership, int rank, int size,
               const RegionOptions& options, const Layout& layout)
    : mapping_(std::move(mapping)),
      membership_(std::make_shared<const Membership>(std::move(membership))),
      rank_(rank),
      size_(size),
      options_(options),
      buffer_bytes_(layout.buffer),
      rank_stride_(layout.stride),
      rank_begin_(layout.ranks_begin),
      arena_stride_(layout.arena),
      arena_begin_(layout.arenas_begin),
      may_spin_(size <= base::available_cores()),
      fork_generation_(fork_generation()),
      arena_(layout.arenas_begin + static_cast<std::size_t>(rank) * layout.arena, layout.arena) {
  if (membership_->own_liveness && mapping_->mark_open(rank_)) {
    state(rank_).marked.store(1, std::memory_order_release);
  }
  AtExit::add(this);
}

Region::~Region() {
  if (in_forked_child()) return;
  AtExit::remove(this);
  depart();
}

void Region::depart() noexcept {
  if (in_forked_child()) return;
  departed_ = true;
  publish(state(rank_).departed, 1);
}

bool Region::in_forked_child() const {
  return fork_generation() != fork_generation_;
}

Region::RankState& Region::state(int rank) const {
  return *reinterpret_cast<RankState*>(mapping_->data() + rank_begin_ +
                                       static_cast<std::size_t>(rank) * rank_stride_);
}

Slot& Region::slot(int rank, std::uint32_t step) const {
  return state(rank).slots[step % 2];
}

Splits& Region::splits(int rank, std::uint32_t step) const {
  return state(rank).splits[step % 2];
}

std::byte* Region::staging(int rank, std::uint32_t index) const {
  return reinterpret_cast<std::byte*>(&state(rank)) + round_up(sizeof(RankState), kPage) +
         index * buffer_bytes_;
}

Outbox& Region::outbox(int from, int to) const {
  return reinterpret_cast<Outbox*>(staging(from, 4))[to];
}

std::byte* Region::input(int rank, std::uint32_t step) const {
  return staging(rank, step % 2);
}
std::byte* Region::output(int rank, std::uint32_t step) const {
  return staging(rank, 2 + step % 2);
}

std::size_t Region::arena_begin(int rank) const {
  return arena_begin_ + static_cast<std::size_t>(rank) * arena_stride_;
}

void* Region::allocate(std::size_t bytes) {
  if (failed() || in_forked_child()) return nullptr;
  const auto offset = arena_.allocate(bytes);
  return offset ? mapping_->data() + *offset : nullptr;
}

void* Region::allocate_or_throw(std::size_t bytes) {
  if (void* const memory = allocate(bytes)) return memory;
  check_usable({"allocate", 0});
  throw Error(
      fmt::format("no room for {} bytes of shared memory in group {}: {} of {} bytes are in "
                  "use",
                  bytes, options_.name, arena_.bytes_in_use(), arena_stride_));
}

void Region::free(void* pointer) {
  if (in_forked_child()) return;
  arena_.free(offset_in_mapping(pointer));
}

void Region::retire(void* pointer) {
  if (in_forked_child()) return;
  arena_.retire(offset_in_mapping(pointer));
}

std::size_t Region::offset_in_mapping(const void* pointer) const {
  return static_cast<std::size_t>(static_cast<const std::byte*>(pointer) - mapping_->data());
}

std::optional<std::uint64_t> Region::shared_offset(const void* pointer, std::size_t bytes) const {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  const auto begin = reinterpret_cast<std::uintptr_t>(mapping_->data()) + arena_begin(rank_);
  if (address < begin || address - begin > arena_stride_ ||
      bytes > arena_stride_ - (address - begin)) {
    return std::nullopt;
  }
  return arena_begin(rank_) + (address - begin);
}

std::byte* Region::resolve(int peer, std::uint64_t offset, std::size_t bytes) const {
  const std::size_t begin = arena_begin(peer);
  if (offset < begin || offset - begin > arena_stride_ ||
      bytes > arena_stride_ - (offset - begin)) {
    return nullptr;
  }
  return mapping_->data() + offset;
}

void Region::publish(Word& word, std::uint32_t value) {
  fault_point();
  // Sequentially consistent, as is the sleeper's side: either it sees the new value, or we see it.
  word.store(value, std::memory_order_seq_cst);
  if (state(rank_).sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(word);
}

void Region::ring(int rank) {
  fault_point();
  RankState& told = state(rank);
  told.bell.fetch_add(1, std::memory_order_seq_cst);
  if (told.listeners.load(std::memory_order_seq_cst) != 0) futex_wake_all(told.bell);
}

std::uint32_t Region::bell() const {
  return state(rank_).bell.load(std::memory_order_acquire);
}

void Region::listen(std::uint32_t heard) {
  RankState& own = state(rank_);
  if (spin_or_yield([&] { return bell() != heard || failed(); })) return;
  own.listeners.fetch_add(1, std::memory_order_seq_cst);
  if (own.bell.load(std::memory_order_seq_cst) == heard) futex_wait(own.bell, heard, kSleep);
  own.listeners.fetch_sub(1, std::memory_order_seq_cst);
}

// The cheap part of a wait: true once `done`.
template <typename Done>
bool Region::spin_or_yield(Done done) const {
  if (may_spin_) {
    for (const auto end = Clock::now() + kSpinning; Clock::now() < end;) {
      for (int i = 0; i < 8; ++i) {
        if (done()) return true;
        pause();
      }
    }
  }
  const auto yielding = may_spin_ ? kYielding : kYieldingOnSharedCores;
  for (const auto end = Clock::now() + yielding; Clock::now() < end;) {
    ::sched_yield();
    if (done()) return true;
  }
  return false;
}

void Region::await_slowly(const Word& word, std::uint32_t target, int peer, Waiting& waiting) {
  if (spin_or_yield([&] { return reached(word, target) || failed(); }) && reached(word, target)) {
    return;
  }
  auto& deadline = waiting.patience.deadline;
  if (!deadline) deadline = base::Deadline::after(waiting.patience.timeout);
  Word& sleepers = state(peer).sleepers;
  while (true) {
    check_progress(word, target, peer, waiting);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t seen = word.load(std::memory_order_seq_cst);
    const bool arrived = static_cast<std::int32_t>(seen - target) >= 0;
    if (!arrived) futex_wait(word, seen, kSleep);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (arrived || reached(word, target)) return;
  }
}

// Throws if there is no point in waiting any longer.
void Region::check_progress(const Word& word, std::uint32_t target, int peer, Waiting& waiting) {
  // A call that all peers have done their part of succeeds, whatever fails after it.
  if (failed() && !reached(word, target)) throw_recorded(waiting.activity);
  waiting.check(peer);
  for (int other = 0; other < size_; ++other) {
    if (other == peer ? is_here(peer) : !has_died(other)) continue;
    // What it did last, it may have done between our looking at the word and at the rank.
    if (reached(word, target)) continue;
    if (other == peer) waiting.check(peer);  // which may know more, of one that has left since
    fail_lost(other, waiting.describe(), waiting.activity);
  }
  const auto& deadline = waiting.patience.deadline;
  if (deadline->expired() && !reached(word, target)) {
    const std::uint64_t missing = waiting.missing() | (rank_bit(peer));
    std::string text = fmt::format("{} did not arrive within the timeout of {} s at {}",
                                   describe_ranks(numbers().list(missing)),
                                   deadline->budget().count() / 1000.0, waiting.describe());
    for (int rank = 0; rank < size_; ++rank) {
      const std::string last = waiting.last_seen(rank, ((missing >> rank) & 1) != 0);
      if (!last.empty()) text += fmt::format("; rank {}: {}", numbers().of(rank), last);
    }
    fail({FailureKind::timeout, missing, text}, waiting.activity);
  }
}

void Region::note_thread() {
  static thread_local const char here = 0;
  const void* first = thread_.load(std::memory_order_relaxed);
  if (first == &here) return;
  if (first == nullptr && thread_.compare_exchange_strong(first, &here)) return;
  note_other_thread();
}

std::optional<Call> Region::call_without_this_rank(int peer) const {
  const auto last = [&](int rank) -> const Slot& {
    const Slot& even = slot(rank, 0);
    return reached(even.step, slot(rank, 1).step.load(std::memory_order_acquire)) ? even
                                                                                  : slot(rank, 1);
  };
  const Slot& theirs = last(peer);
  const bool waits = !reached(last(rank_).step, theirs.step.load(std::memory_order_acquire));
  return waits ? std::optional(theirs.call) : std::nullopt;
}

std::optional<Call> Region::cross_call(int peer) const {
  const auto call = call_without_this_rank(peer);
  // Read after the step, before which a thread is noted.
  for (const int rank : {rank_, peer}) {
    if (state(rank).threads.load(std::memory_order_acquire) != 0) return std::nullopt;
  }
  return call;
}

void Region::fail(const Failure& failure, const Activity& activity) {
  if (header().failure.record(failure)) throw_failure(failure, activity, numbers());
  throw_recorded(activity);
}

void Region::throw_recorded(const Activity& activity) const {
  throw_failure(header().failure.read(), activity, numbers());
}

void Region::check_usable(const Activity& activity) const {
  if (in_forked_child()) {
    throw UsageError(
        fmt::format("{} in a forked child of rank {}: the group belongs to the parent "
                    "process. Start processes afresh instead of forking.",
                    activity.operation, numbers().of(rank_)));
  }
  if (failed()) throw_recorded(activity);
  if (departed_) {
    throw UsageError(
        fmt::format("{} on group {}, which this rank has left", activity.operation, options_.name));
  }
}

void Region::check_peers(const std::vector<int>& needed, const Activity& activity) {
  check_usable(activity);
  for (int peer = 0; peer < size_; ++peer) {
    if (has_died(peer)) fail_lost(peer, activity.operation, activity);
  }
  for (const int peer : needed) {
    if (peer != rank_ && has_left(peer)) fail_lost(peer, activity.operation, activity);
  }
}

bool Region::has_left(int peer) const {
  return state(peer).departed.load(std::memory_order_acquire) != 0;
}

// In this order: a rank that leaves says so before its process ends.
bool Region::has_died(int peer) const {
  const bool gone = membership_->peers[static_cast<std::size_t>(peer)].ended() || has_closed(peer);
  return gone && !has_left(peer);
}

// A process id stays valid when its process executes another program, which knows nothing of the
// group. Between ranks of one process, as tests have them, locks say nothing.
bool Region::has_closed(int peer) const {
  if (peer == rank_ || state(peer).marked.load(std::memory_order_acquire) == 0) return false;
  const pid_t pid = membership_->peers[static_cast<std::size_t>(peer)].pid;
  if (pid != 0 && pid == membership_->peers[static_cast<std::size_t>(rank_)].pid) return false;
  return !mapping_->is_open_elsewhere(peer);
}

void Region::fail_lost(int peer, const std::string& where, const Activity& activity) {
  fail({FailureKind::peer_lost, rank_bit(peer),
        fmt::format("{} and is missing in {}", describe_loss(peer), where)},
       activity);
}

std::string Region::describe_loss(int peer) const {
  if (has_left(peer)) return fmt::format("rank {} has left the group", numbers().of(peer));
  const Peer& lost = membership_->peers[static_cast<std::size_t>(peer)];
  // A process closes its files before it counts as ended.
  const bool ended =
      !lost.watch || wait_readable(lost.watch.get(), base::Deadline::after(kVerdict));
  return fmt::format("rank {} was lost (its process {}{})", numbers().of(peer),
                     lost.pid != 0 ? fmt::format("{} ", lost.pid) : "",
                     ended ? "ended" : "executes another program");
}

void Region::abort(const std::string& text) noexcept {
  if (in_forked_child()) return;
  try {
    Failure failure{
        FailureKind::peer_lost, rank_bit(rank_),
        fmt::format("rank {} left the group with an exception: {}", numbers().of(rank_), text)};
    // The exception may be what came of a death, in another group or where ranks meet.
    for (int peer = 0; peer < size_; ++peer) {
      if (!has_died(peer)) continue;
      failure.ranks = rank_bit(peer);
      failure.text = fmt::format("{}; {}", describe_loss(peer), failure.text);
      break;
    }
    header().failure.record(failure);
  } catch (const std::exception&) {
    // Without the text, then: the peers find out when this rank has departed.
  }
}

}  // namespace paceline::node
