#include "top/live_reader.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

#include <paceline/error.h>

#include "base/errno_error.h"
#include "base/number_list.h"
#include "report/timelines/event_parser.h"

namespace paceline::top {
namespace {

using report::kMaxCount;
using trace::high_half;
using trace::LiveMemory;
using trace::low_half;

constexpr std::uint32_t kMaxRanks = 1 << 16;
constexpr std::uint32_t kMaxBuckets = 1 << 20;
// Clocks of cores may differ a little.
constexpr std::chrono::seconds kAhead{1};

// Up to the first zero byte.
template <typename Words>
std::string text_of(const Words& words) {
  std::string text;
  for (const auto& each : words) {
    const std::uint64_t word = each;
    text.append(reinterpret_cast<const char*>(&word), sizeof(word));
  }
  return text.substr(0, text.find('\0'));
}

std::optional<Clock::time_point> moment_of(std::uint64_t nanoseconds) {
  const auto now = Clock::now() + kAhead;
  if (nanoseconds > static_cast<std::uint64_t>(now.time_since_epoch().count())) return std::nullopt;
  return Clock::time_point(std::chrono::nanoseconds(nanoseconds));
}

bool are_counts(std::initializer_list<std::uint64_t> values) {
  return std::ranges::all_of(values, [](std::uint64_t value) { return value <= kMaxCount; });
}

bool add_thread(const trace::SpanRing::Values& words, LiveRecords& records) {
  const auto at = moment_of(words[1]);
  const bool is_queue_known = words[3] != static_cast<std::uint64_t>(trace::kUnknown);
  if (!at || !are_counts({words[2], is_queue_known ? words[3] : 0, words[4], words[5]})) {
    return false;
  }
  records.thread.push_back({.at = *at,
                            .cpu = static_cast<std::int64_t>(words[2]),
                            .queued = static_cast<std::int64_t>(words[3]),
                            .preempted = static_cast<std::int64_t>(words[4]),
                            .faults = static_cast<std::int64_t>(words[5])});
  return true;
}

bool add_span(const trace::SpanRing::Values& words, LiveRecords& records) {
  const std::uint32_t bucket = low_half(words[1]);
  const std::uint32_t peer = high_half(words[1]);
  const auto begin = moment_of(words[4]);
  const auto end = moment_of(words[5]);
  const bool sane = words[0] <= static_cast<std::uint64_t>(trace::Kind::bucket) && begin && end &&
                    *begin <= *end && are_counts({words[2], words[3]}) && bucket <= kMaxBuckets &&
                    peer <= kMaxRanks;
  const auto kind = static_cast<trace::Kind>(words[0]);
  if (!sane || (kind == trace::Kind::bucket && bucket == 0)) return false;
  const auto samples = std::bit_cast<double>(words[6]);
  records.spans.push_back({{.kind = kind,
                            .model = words[2],
                            .step = words[3],
                            .bucket = static_cast<int>(bucket) - 1,
                            .peer = static_cast<int>(peer) - 1,
                            .begin = *begin,
                            .end = *end},
                           samples >= 0 && samples <= static_cast<double>(kMaxCount)
                               ? samples
                               : std::numeric_limits<double>::quiet_NaN()});
  return true;
}

LiveMemory* map_memory(int fd) {
  struct stat status {};
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(fd, &status) != 0 ||
      status.st_size != sizeof(LiveMemory)) {
    throw Error("its memory for `paceline top` is that of another version of Paceline");
  }
  void* const address =
      ::mmap(nullptr, sizeof(LiveMemory), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) throw base::errno_error("cannot map its memory");
  return static_cast<LiveMemory*>(address);
}

}  // namespace

LiveReader::LiveReader(int fd) : memory_(map_memory(fd)) {
  const std::uint64_t magic = memory_->header.magic.load(std::memory_order_acquire);
  const std::uint64_t version = memory_->header.version;
  // Without a magic, the process is still at it; its place makes no sense then.
  if (magic != 0 && (magic != trace::kLiveMagic || version != trace::kLiveVersion)) {
    ::munmap(memory_, sizeof(LiveMemory));
    throw Error(
        fmt::format("its memory for `paceline top` has version {}, expected {}: use the "
                    "paceline that it was built with",
                    version, trace::kLiveVersion));
  }
  using Start = trace::RingReader<trace::SpanRing>::Start;
  spans_.emplace(memory_->spans, Start::next);
  buckets_.emplace(memory_->buckets, trace::RingReader<trace::BucketRing>::Start::oldest);
}

LiveReader::~LiveReader() {
  ::munmap(memory_, sizeof(LiveMemory));
}

std::optional<LiveReader::Place> LiveReader::place() const {
  const std::uint64_t place = memory_->header.place;
  const std::uint64_t node = memory_->header.node;
  const std::uint32_t size = high_half(place);
  if (size == 0 || size > kMaxRanks || low_half(place) >= size || low_half(node) >= kMaxRanks ||
      high_half(node) > size) {
    return std::nullopt;
  }
  return Place{static_cast<int>(low_half(place)),
               static_cast<int>(size),
               {static_cast<int>(low_half(node)), static_cast<int>(high_half(node))}};
}

pid_t LiveReader::process() const {
  return static_cast<pid_t>(memory_->header.process.load());
}

std::string LiveReader::job() const {
  return text_of(memory_->header.job);
}

std::uint64_t LiveReader::identity() const {
  return memory_->header.identity;
}

int LiveReader::port() const {
  return static_cast<int>(low_half(memory_->header.port));
}

void LiveReader::watch_until(Clock::time_point until) {
  const std::int64_t wanted = until.time_since_epoch().count();
  const std::int64_t latest = (Clock::now() + trace::kLongestLease).time_since_epoch().count();
  auto& word = memory_->watched_until;
  std::int64_t now = word.load(std::memory_order_relaxed);
  while ((now < wanted || now > latest) &&
         !word.compare_exchange_weak(now, wanted, std::memory_order_relaxed)) {
  }
}

LiveRecords LiveReader::read() {
  LiveRecords records;
  spans_->read([&](const trace::SpanRing::Values& words) {
    const bool valid =
        words[0] == trace::kThreadRecord ? add_thread(words, records) : add_span(words, records);
    if (!valid) ++records.invalid;
  });
  buckets_->read([&](const trace::BucketRing::Values& words) {
    const std::string text = text_of(std::span(words).subspan<3>());
    if (are_counts({words[0]}) && words[1] == trace::kGroupRecord) {
      if (auto ranks = base::parse_list(text, kMaxRanks); !ranks.empty()) {
        records.groups[words[0]] = std::move(ranks);
      } else {
        ++records.invalid;
      }
      if (records.groups.size() > kMaxGroups) records.groups.erase(records.groups.begin());
      return;
    }
    if (!are_counts({words[0], words[2]}) || words[1] >= kMaxBuckets) {
      ++records.invalid;
      return;
    }
    records.buckets[{words[0], static_cast<int>(words[1])}] = {words[2], text};
  });
  return records;
}

}  // namespace paceline::top
