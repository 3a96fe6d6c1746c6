#include "trace/cpu_use.h"

#include <fmt/format.h>
#include <unistd.h>

#include <ctime>
#include <fstream>

namespace paceline::trace {
namespace {

std::int64_t microseconds(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return std::int64_t{time.tv_sec} * 1'000'000 + time.tv_nsec / 1000;
}

}  // namespace

CpuMeter::CpuMeter() : thread_(::gettid()), begin_(now()) {}

std::optional<CpuUse> CpuMeter::now() const {
  std::int64_t running = 0;
  std::int64_t queued = 0;
  std::ifstream file(fmt::format("/proc/self/task/{}/schedstat", thread_));
  if (!(file >> running >> queued)) return std::nullopt;
  return CpuUse{microseconds(CLOCK_MONOTONIC), microseconds(CLOCK_PROCESS_CPUTIME_ID),
                running / 1000, queued / 1000};
}

std::optional<CpuUse> CpuMeter::read() const {
  const auto use = now();
  if (!use || !begin_) return std::nullopt;
  return CpuUse{use->wall - begin_->wall, use->used - begin_->used, use->running - begin_->running,
                use->queued - begin_->queued};
}

}  // namespace paceline::trace
