#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "trace/shared_ring.h"
#include "trace/span.h"

namespace paceline::trace {

// What a process that trains shares with `paceline top`: a memfd of this name, sealed against
// resizing, which the command opens through /proc/PID/fd.
inline constexpr const char* kLiveName = "paceline-live";
inline constexpr std::uint64_t kLiveMagic = 0x4556494c4c434150;  // "PACLLIVE"
inline constexpr std::uint64_t kLiveVersion = 3;
// A process that is watched for longer at a time than this is not watched: such a word is no lease.
inline constexpr std::chrono::seconds kLongestLease{60};

// A job's name may be longer; then its beginning is all that is written.
inline constexpr std::size_t kLongestJob = 128;

// Written once, but for `place`, `node` and `identity`, which change with the world.
struct LiveHeader {
  Word magic{};  // the last word that is written
  Word version{};
  Word process{};   // its id, as itself sees it
  Word place{};     // rank, and world size in the upper half
  Word node{};      // Node::number, and Node::ranks in the upper half
  Word port{};      // MASTER_PORT, or 0
  Word identity{};  // of the world: the same in all its processes; 0 if not known
  std::array<Word, kLongestJob / sizeof(Word)>
      job{};  // how the launcher calls the job: text, with zeros after it
};

// A span: kind | bucket + 1 and peer + 1 (upper half) | model | step | begin | end | samples (a
// double: counted until the end of a step, or NaN). Or with kind kThreadRecord, a ThreadUse:
// kind | at | cpu | queued | preempted | faults. Times of the clock are in nanoseconds.
inline constexpr std::uint64_t kThreadRecord = 100;
using SpanRing = SharedRing<7, std::size_t{1} << 16>;
// model | bucket | bytes | parameters, as `job`; or model | kGroupRecord | 0 | the ranks that train
// it together, as base::list_text writes them. A viewer that starts late still finds all: large
// models have more than a thousand buckets, and pages that are not written use no memory.
inline constexpr std::uint64_t kGroupRecord = std::uint64_t{1} << 32;
using BucketRing = SharedRing<31, 4096>;

constexpr std::uint64_t pack(std::uint32_t low, std::uint32_t high) {
  return low | std::uint64_t{high} << 32;
}
constexpr std::uint32_t low_half(std::uint64_t word) {
  return static_cast<std::uint32_t>(word);
}
constexpr std::uint32_t high_half(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 32);
}

struct LiveMemory {
  static constexpr std::size_t kPage = 4096;

  alignas(kPage) LiveHeader header;
  // The time until which somebody watches, in nanoseconds of Clock. Only viewers write it; it is
  // all that the process reads.
  alignas(kPage) std::atomic<std::int64_t> watched_until{};
  alignas(kPage) BucketRing buckets;
  alignas(kPage) SpanRing spans;  // written only while somebody watches
};

inline bool is_leased(std::int64_t watched_until, Clock::time_point now) {
  const Clock::time_point end{std::chrono::nanoseconds(watched_until)};
  return now < end && end <= now + kLongestLease;
}

static_assert(Word::is_always_lock_free && std::atomic<std::int64_t>::is_always_lock_free);

}  // namespace paceline::trace
