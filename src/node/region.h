#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "node/arena.h"
#include "node/call.h"
#include "node/failure.h"
#include "node/futex.h"
#include "node/join.h"
#include "node/mail.h"
#include "node/mapping.h"

namespace paceline::node {

struct RegionOptions {
  std::string name = "world";                                    // for messages
  RankNumbers numbers{};                                         // for messages and errors
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  // of each call
  // What the staging buffers of all ranks may take together.
  std::size_t staging_bytes = std::size_t{64} << 20;
  // What each rank can allocate; address space until it is touched. 0: as much as the machine has.
  std::size_t arena_bytes = 0;
};

// One cache line that a rank writes and all others read.
struct alignas(kCacheLine) Slot {
  Word step;
  Call call;
};
static_assert(sizeof(Slot) == kCacheLine);

// Where a rank is with its monitored barriers, by number.
struct Attendance {
  Word arrived;
  // Of rank 0, which says the other two before `over`:
  Word over;                               // the last that it no longer waits in
  Word complete;                           // the last that all ranks have passed
  std::atomic<std::uint64_t> missing = 0;  // the ranks that did not, in the last that failed
};

// Differs between a process and its forked children, from the first time that it is asked for.
unsigned fork_generation();

// How long a call may wait in all. The clock is not looked at before waiting takes time.
struct Patience {
  std::chrono::milliseconds timeout;
  std::optional<base::Deadline> deadline{};
};

// What a wait is about. Made on the stack; asked only when something went wrong.
class Waiting {
 public:
  // `shared` is that of the call, which may wait several times.
  Waiting(Activity what, Patience& shared) : activity(what), patience(shared) {}
  // A bit for each rank that has not done what is waited for.
  virtual std::uint64_t missing() const = 0;
  // "all_reduce of 10 float32, call 17 of group world".
  virtual std::string describe() const = 0;
  // What `rank` did last; empty if that is not known or of no use.
  virtual std::string last_seen(int /*rank*/, bool /*missing*/) const { return ""; }
  // Throws if waiting for `peer` is pointless for a reason that the region does not know.
  virtual void check(int /*peer*/) const {}

  Activity activity;
  Patience& patience;

 protected:
  ~Waiting() = default;
};

// The memory that the ranks of one group on one machine share, and the ways to wait for each other
// in it.
//
// Blocks allocated from it keep it alive through the shared_ptr. allocate, free, shared_offset and
// fail may be called from any thread. In a forked child check_usable throws UsageError, allocate
// has no room, free and retire do nothing, and the destructor only unmaps.
class Region : public std::enable_shared_from_this<Region> {
 public:
  // Collective over the ranks of the exchange or at the ends of the links.
  static std::shared_ptr<Region> create(Exchange& exchange, const RegionOptions& options);
  static std::shared_ptr<Region> create(Links links, int rank, int size,
                                        const RegionOptions& options);
  // For `size` ranks that are threads of this process, over one mapping, so that ThreadSanitizer
  // sees every access. For tests.
  static std::vector<std::shared_ptr<Region>> create_for_threads(int size,
                                                                 const RegionOptions& options);

  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  int rank() const { return rank_; }
  int size() const { return size_; }
  const RegionOptions& options() const { return options_; }
  const RankNumbers& numbers() const { return options_.numbers; }
  // How the other ranks' processes are watched; may be kept longer than the region.
  const std::shared_ptr<const Membership>& membership() const { return membership_; }

  // Shared memory of this rank, at Arena::kAlignment; nullptr if there is no room. After a failure
  // nothing is handed out any more: a rank that wakes up late may still write to what was.
  void* allocate(std::size_t bytes);
  // Throws the group's failure instead, or Error.
  void* allocate_or_throw(std::size_t bytes);
  void free(void* pointer);
  // For memory that a peer may still touch: never handed out again, whether freed or not.
  void retire(void* pointer);
  // Whether a block of at least `bytes` bytes that was allocated here begins at `pointer`.
  bool holds(const void* pointer, std::size_t bytes) const {
    return arena_.holds(offset_in_mapping(pointer), bytes);
  }
  std::size_t bytes_in_use() const { return arena_.bytes_in_use(); }
  // Where [pointer, pointer + bytes) lies in the region, if it lies in this rank's arena.
  std::optional<std::uint64_t> shared_offset(const void* pointer, std::size_t bytes) const;
  // The memory at an offset that `peer` published; nullptr if that is not in the peer's arena.
  std::byte* resolve(int peer, std::uint64_t offset, std::size_t bytes) const;

  // What step `step` of a rank is published with: two of each, used in turn.
  Slot& slot(int rank, std::uint32_t step) const;
  Splits& splits(int rank, std::uint32_t step) const;
  Attendance& attendance(int rank) const { return state(rank).attendance; }
  // Staging buffers.
  std::byte* input(int rank, std::uint32_t step) const;
  std::byte* output(int rank, std::uint32_t step) const;
  std::size_t buffer_bytes() const { return buffer_bytes_; }

  // Sets a word of this rank and wakes whoever sleeps on it.
  void publish(Word& word, std::uint32_t value);
  // Returns once `word`, written by `peer`, is at `target` or past it, at once if it is. Throws the
  // group's failure, or PeerLost or Timeout, which then becomes the group's failure.
  void await(const Word& word, std::uint32_t target, int peer, Waiting& waiting) {
    if (!reached(word, target)) await_slowly(word, target, peer, waiting);
  }
  // To be called by whoever makes calls or runs steps; and by who has another thread do it.
  void note_thread();
  void note_other_thread() { state(rank_).threads.store(1, std::memory_order_release); }
  // The call that `peer` has begun and waits for this rank in, if this rank has not begun one, too.
  // For a thread before whose return this rank begins none.
  std::optional<Call> call_without_this_rank(int peer) const;
  // Whether this rank, which waits for `peer` in another way, and the peer, which has begun a call
  // of the group and waits for this rank there, will wait for ever: each of them has one thread
  // that deals with the group. That call then.
  std::optional<Call> cross_call(int peer) const;
  // Bells are for waits that any of several peers may end: what a rank has been told of is looked
  // for after `bell` is read and before `listen`, which returns when the bell has been rung since,
  // and at times for nothing.
  void ring(int rank);
  std::uint32_t bell() const;
  void listen(std::uint32_t heard);
  Outbox& outbox(int from, int to) const;
  // Whether a peer has left in good order, and whether its process has ended, or executes another
  // program, though it has not.
  bool has_left(int peer) const;
  bool has_died(int peer) const;
  bool is_here(int peer) const { return !has_left(peer) && !has_died(peer); }
  // Makes the loss of a peer the group's failure; `where` says in what it is missing.
  [[noreturn]] void fail_lost(int peer, const std::string& where, const Activity& activity);

  static bool reached(const Word& word, std::uint32_t target) {
    return static_cast<std::int32_t>(word.load(std::memory_order_acquire) - target) >= 0;
  }

  bool failed() const { return header().failure.present(); }
  // The group's failure; of kind none if there is none.
  Failure failure() const { return failed() ? header().failure.read() : Failure(); }
  bool in_forked_child() const;
  // Makes this the group's failure unless there is one, and throws the one that stands.
  [[noreturn]] void fail(const Failure& failure, const Activity& activity);
  // Throws if the group has failed, this rank has left it or this process is a forked child.
  void check_usable(const Activity& activity) const;
  // Makes the death of any peer the group's failure, or that one of `needed` has left, and throws
  // the failure there is.
  void check_peers(const std::vector<int>& needed, const Activity& activity);
  // Tells the peers that this rank left because of an exception, with its text; and that another
  // has ended before, if one has.
  void abort(const std::string& text) noexcept;
  // Tells the peers that this rank makes no further call. The destructor does it too.
  void depart() noexcept;

 private:
  // At the head of each rank's part of the region.
  struct RankState {
    alignas(kCacheLine) Slot slots[2];
    alignas(kCacheLine) Splits splits[2];
    alignas(kCacheLine) Word sleepers;  // how many wait in the kernel for a word of this rank
    alignas(kCacheLine) Word departed;  // 1 once the rank has left in good order
    Word marked;                        // 1 once it has marked the memory as open
    alignas(kCacheLine) Word bell;      // how often its peers have rung
    Word listeners;                     // how many of its threads wait for that in the kernel
    alignas(kCacheLine) Attendance attendance;
    alignas(kCacheLine) Word threads;  // 1 once more than one thread has made calls
  };
  struct Header {
    FailureRecord failure;
  };
  struct Layout;
  class AtExit;

  Region(std::shared_ptr<Mapping> mapping, Membership membership, int rank, int size,
         const RegionOptions& options, const Layout& layout);
  static std::shared_ptr<Region> enter(Membership membership, int rank, int size,
                                       const RegionOptions& options);

  Header& header() const { return *reinterpret_cast<Header*>(mapping_->data()); }
  RankState& state(int rank) const;
  std::byte* staging(int rank, std::uint32_t index) const;
  std::size_t arena_begin(int rank) const;
  std::size_t offset_in_mapping(const void* pointer) const;
  bool has_closed(int peer) const;
  template <typename Done>
  bool spin_or_yield(Done done) const;
  void await_slowly(const Word& word, std::uint32_t target, int peer, Waiting& waiting);
  void check_progress(const Word& word, std::uint32_t target, int peer, Waiting& waiting);
  [[noreturn]] void throw_recorded(const Activity& activity) const;
  // "rank 1 was lost (its process 4711 ended)".
  std::string describe_loss(int peer) const;

  std::shared_ptr<Mapping> mapping_;
  std::shared_ptr<const Membership> membership_;
  int rank_;
  int size_;
  RegionOptions options_;
  std::size_t buffer_bytes_;
  std::size_t rank_stride_;
  std::size_t rank_begin_;
  std::size_t arena_stride_;
  std::size_t arena_begin_;
  bool may_spin_;
  std::atomic<const void*> thread_ = nullptr;  // the only one that has made calls
  unsigned fork_generation_;
  std::atomic<bool> departed_ = false;
  Arena arena_;
};

}  // namespace paceline::node
