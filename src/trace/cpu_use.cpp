#include "trace/cpu_use.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <ctime>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "base/cores.h"

namespace paceline::trace {
namespace {

constexpr std::chrono::milliseconds kBetweenSamples{1};

std::int64_t microseconds(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return std::int64_t{time.tv_sec} * 1'000'000 + time.tv_nsec / 1000;
}

// Lines of /proc/stat: "cpu3 user nice system idle iowait irq softirq steal ...", in ticks.
void add_machine(const std::vector<int>& cores, CpuUse& use) {
  std::ifstream file("/proc/stat");
  const std::int64_t tick = 1'000'000 / ::sysconf(_SC_CLK_TCK);
  std::int64_t busy = 0;
  std::int64_t stolen = 0;
  for (std::string line; std::getline(file, line) && line.starts_with("cpu");) {
    std::istringstream fields(line.substr(3));
    std::int64_t user = 0, nice = 0, system = 0, idle = 0, io = 0, irq = 0, soft_irq = 0, steal = 0;
    int core = -1;
    const bool all = line[3] == ' ';
    if (!all) fields >> core;
    if (!(fields >> user >> nice >> system >> idle >> io >> irq >> soft_irq >> steal)) return;
    const std::int64_t time = tick * (user + nice + system);
    if (all) use.machine = time;
    if (!std::ranges::binary_search(cores, core)) continue;
    busy += time;
    stolen += tick * steal;
  }
  if (use.machine == kUnknown) return;
  use.busy = busy;
  use.stolen = stolen;
}

// "some avg10=0.00 avg60=0.00 avg300=0.00 total=12345"
std::int64_t pressure(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  constexpr std::string_view total = "total=";
  const auto found = line.find(total);
  std::int64_t time = kUnknown;
  if (found != line.npos) {
    std::from_chars(line.data() + found + total.size(), line.data() + line.size(), time);
  }
  return time;
}

std::int64_t since(std::int64_t begin, std::int64_t now) {
  return begin == kUnknown || now == kUnknown ? kUnknown : std::max<std::int64_t>(0, now - begin);
}

}  // namespace

CpuMeter::CpuMeter() : CpuMeter(0, ::gettid()) {}

CpuMeter::CpuMeter(pid_t process) : CpuMeter(process, process) {}

CpuMeter::CpuMeter(pid_t process, pid_t thread)
    : process_(process),
      thread_(thread),
      cores_(base::affinity(thread)),
      begin_(now()),
      groups_(base::throttling(process)) {}

std::optional<CpuUse> CpuMeter::now() const {
  std::int64_t running = 0;
  std::int64_t queued = 0;
  const std::string process = process_ == 0 ? "self" : std::to_string(process_);
  std::ifstream file(fmt::format("/proc/{}/task/{}/schedstat", process, thread_));
  clockid_t used{};
  if (!(file >> running >> queued) || ::clock_getcpuclockid(process_, &used) != 0) {
    return std::nullopt;
  }
  CpuUse use{.wall = microseconds(CLOCK_MONOTONIC),
             .used = microseconds(used),
             .running = running / 1000,
             .queued = queued / 1000,
             .at = Clock::now(),
             .cpu_pressure = pressure("/proc/pressure/cpu"),
             .memory_pressure = pressure("/proc/pressure/memory")};
  add_machine(cores_, use);
  return use;
}

std::optional<CpuUse> CpuMeter::read() {
  auto use = now();
  if (!use || !begin_) return std::nullopt;
  for (std::int64_t CpuUse::*const figure :
       {&CpuUse::wall, &CpuUse::used, &CpuUse::running, &CpuUse::queued, &CpuUse::busy,
        &CpuUse::stolen, &CpuUse::machine, &CpuUse::cpu_pressure, &CpuUse::memory_pressure}) {
    (*use).*figure = since((*begin_).*figure, (*use).*figure);
  }
  auto groups = base::throttling(process_);
  const base::Throttling limit = base::most_throttled(groups_, groups);
  groups_ = std::move(groups);
  if (limit.throttled >= 0) {
    periods_ = std::max<std::int64_t>(0, periods_) + limit.periods;
    throttled_ = std::max<std::int64_t>(0, throttled_) + limit.throttled;
  }
  use->periods = periods_;
  use->throttled = throttled_;
  return use;
}

ThreadMeter::ThreadMeter()
    : thread_(std::this_thread::get_id()),
      schedstat_(::open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC)) {}

ThreadUse ThreadMeter::read() const noexcept {
  ThreadUse use{.at = Clock::now(), .cpu = microseconds(CLOCK_THREAD_CPUTIME_ID)};
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  use.preempted = usage.ru_nivcsw;
  use.faults = usage.ru_majflt;
  // "running queued slices", in nanoseconds.
  std::array<char, 80> text;
  const ssize_t size = ::pread(schedstat_.get(), text.data(), text.size(), 0);
  const char* const end = text.data() + std::max<ssize_t>(0, size);
  const char* const space = std::find(text.data(), const_cast<char*>(end), ' ');
  std::int64_t queued = 0;
  if (space != end && std::from_chars(space + 1, end, queued).ec == std::errc()) {
    use.queued = queued / 1000;
  }
  return use;
}

std::optional<ThreadUse> ThreadSampler::sample(Moment moment) noexcept {
  if (!meter_) meter_.emplace();
  if (!meter_->is_of_this_thread()) return std::nullopt;
  if (moment == Moment::begin) {
    const auto now = Clock::now();
    sampled_begin_ = now >= next_;
    if (!sampled_begin_) return std::nullopt;
    next_ = now + kBetweenSamples;
  } else if (!std::exchange(sampled_begin_, false)) {
    return std::nullopt;
  }
  return meter_->read();
}

}  // namespace paceline::trace
