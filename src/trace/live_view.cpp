#include "trace/live_view.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <string>

#include "base/environment.h"
#include "base/errno_error.h"
#include "base/log.h"
#include "base/number_list.h"

namespace paceline::trace {
namespace {

constexpr std::size_t kBytes = sizeof(LiveMemory);

std::uint64_t nanoseconds_of(Clock::time_point moment) {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(moment.time_since_epoch()).count());
}

// Longer text is cut.
template <typename Words>
void put_text(std::string_view text, Words words) {
  for (std::size_t i = 0; i < words.size(); ++i) {
    std::uint64_t word = 0;
    const std::string_view part = text.substr(std::min(i * sizeof(word), text.size()));
    std::memcpy(&word, part.data(), std::min(part.size(), sizeof(word)));
    words[i] = word;
  }
}

base::UniqueFd make_memory() {
  // A larger file than the limit allows is a signal that ends the process.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < kBytes) {
    throw base::errno_error("cannot make a file in memory", EFBIG);
  }
  base::UniqueFd fd(::memfd_create(kLiveName, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd || ::ftruncate(fd.get(), kBytes) != 0 ||
      ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw base::errno_error("cannot make a file in memory");
  }
  return fd;
}

// What the launcher calls the job.
std::string job_name(const base::Environment& environment) {
  if (environment.run_id) return *environment.run_id;
  return environment.launched ? environment.launched->job : "";
}

}  // namespace

std::atomic<LiveView*> LiveView::current_{nullptr};

LiveView* LiveView::watched() noexcept {
  LiveView* const view = current();
  if (view == nullptr) return nullptr;
  const std::int64_t until = view->memory_->watched_until.load(std::memory_order_relaxed);
  return until != 0 && is_leased(until, Clock::now()) ? view : nullptr;
}

void LiveView::start(int rank, int size, const Node& node, std::uint64_t identity) noexcept {
  static std::atomic<bool> refused{false};
  try {
    if (current() == nullptr && !refused.load()) {
      // Never destroyed, as threads that outlive main may still record.
      std::unique_ptr<LiveView> made(new LiveView);
      LiveView* none = nullptr;
      if (current_.compare_exchange_strong(none, made.get())) static_cast<void>(made.release());
      static const int registered =
          ::pthread_atfork(nullptr, nullptr, [] { current_.store(nullptr); });
      static_cast<void>(registered);
    }
  } catch (const std::exception& error) {
    refused = true;
    base::log(LogLevel::warning, "`paceline top` cannot watch this process: {}", error.what());
  }
  if (LiveView* const view = current()) view->set_place(rank, size, node, identity);
}

LiveView::LiveView() : fd_(make_memory()), samples_(std::numeric_limits<double>::quiet_NaN()) {
  const base::Environment& environment = base::environment();
  void* const address =
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_.get(), 0);
  if (address == MAP_FAILED) throw base::errno_error("cannot map a file in memory");
  ::madvise(address, kBytes, MADV_DONTFORK);
  memory_ = static_cast<LiveMemory*>(address);
  spans_.emplace(memory_->spans);
  buckets_.emplace(memory_->buckets);
  LiveHeader& header = memory_->header;
  header.version = kLiveVersion;
  header.process = static_cast<std::uint64_t>(::getpid());
  header.port = static_cast<std::uint64_t>(environment.master_port.value_or(0));
  put_text(job_name(environment), std::span(header.job));
}

LiveView::~LiveView() {
  ::munmap(memory_, kBytes);
}

void LiveView::set_place(int rank, int size, const Node& node, std::uint64_t identity) noexcept {
  LiveHeader& header = memory_->header;
  if (identity != 0) header.identity = identity;
  header.place = pack(static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(size));
  header.node =
      pack(static_cast<std::uint32_t>(node.number), static_cast<std::uint32_t>(node.ranks));
  header.magic.store(kLiveMagic, std::memory_order_release);
}

void LiveView::record(const Span& span, double samples) noexcept {
  if (current() != this) return;  // a forked child does not have the memory
  const double counted = samples_.load(std::memory_order_relaxed);
  const SpanRing::Values values{
      static_cast<std::uint64_t>(span.kind),
      pack(static_cast<std::uint32_t>(span.bucket + 1), static_cast<std::uint32_t>(span.peer + 1)),
      span.model,
      span.step,
      nanoseconds_of(span.begin),
      nanoseconds_of(span.end),
      std::bit_cast<std::uint64_t>(std::isnan(counted) ? samples : counted)};
  const std::lock_guard lock(mutex_);
  spans_->write(values);
}

void LiveView::sample_thread(ThreadSampler::Moment moment) noexcept {
  if (current() != this) return;
  const std::lock_guard lock(mutex_);
  const auto use = thread_.sample(moment);
  if (!use) return;
  spans_->write({kThreadRecord, nanoseconds_of(use->at), static_cast<std::uint64_t>(use->cpu),
                 static_cast<std::uint64_t>(use->queued),
                 static_cast<std::uint64_t>(use->preempted),
                 static_cast<std::uint64_t>(use->faults), 0});
}

void LiveView::describe_bucket(std::uint64_t model, int bucket, std::uint64_t bytes,
                               std::string_view parameters) noexcept {
  if (current() != this) return;
  BucketRing::Values values{model, static_cast<std::uint64_t>(bucket), bytes};
  put_text(parameters, std::span(values).subspan<3>());
  const std::lock_guard lock(mutex_);
  buckets_->write(values);
}

void LiveView::describe_group(std::uint64_t model, std::span<const int> ranks) noexcept {
  if (current() != this) return;
  BucketRing::Values values{model, kGroupRecord};
  const auto words = std::span(values).subspan<3>();
  try {
    const std::string text = base::list_text(ranks);
    if (text.size() > words.size_bytes()) return;
    put_text(text, words);
  } catch (const std::bad_alloc&) {
    return;
  }
  const std::lock_guard lock(mutex_);
  buckets_->write(values);
}

void LiveView::count_samples(double count) noexcept {
  const double before = samples_.load(std::memory_order_relaxed);
  samples_.store((std::isnan(before) ? 0 : before) + count, std::memory_order_relaxed);
}

}  // namespace paceline::trace
