#include "report/analysis/machine_use.h"

#include <algorithm>
#include <map>

namespace paceline::report {
namespace {

using Figure = std::int64_t CpuUse::*;

// The figures of one rank in the window.
class RankUse {
 public:
  RankUse(const RankTrace& trace, Interval window, Clock::time_point origin)
      : samples_(trace.cpu), window_(window), origin_(origin) {}

  // In microseconds; empty if it is not reported.
  std::optional<double> within(Figure figure) const {
    if (samples_.empty() || samples_.back().*figure == trace::kUnknown) return std::nullopt;
    if (!timed()) return static_cast<double>(samples_.back().*figure);
    return std::max(0.0, until(window_.end, figure) - until(window_.begin, figure));
  }
  // The same, as a part of what `whole` has within the window.
  std::optional<double> part(Figure figure, Figure whole = &CpuUse::wall) const {
    const auto value = within(figure);
    const double all = within(whole).value_or(0);
    return value && all > 0 ? std::optional(*value / all) : std::nullopt;
  }

 private:
  bool timed() const { return samples_.front().at != Clock::time_point(); }
  double moment(const CpuUse& use) const {
    return std::chrono::duration<double, std::micro>(use.at - origin_).count();
  }
  double until(double time, Figure figure) const {
    const auto after = std::ranges::upper_bound(samples_, time, {},
                                                [&](const CpuUse& use) { return moment(use); });
    if (after == samples_.begin()) return static_cast<double>(samples_.front().*figure);
    const CpuUse& before = *(after - 1);
    const auto value = static_cast<double>(before.*figure);
    if (after == samples_.end()) return value;
    const double step = (time - moment(before)) / (moment(*after) - moment(before));
    return value + step * (static_cast<double>(*after.*figure) - value);
  }

  const std::vector<CpuUse>& samples_;
  Interval window_;
  Clock::time_point origin_;
};

void keep_most(std::optional<double>& most, std::optional<double> value) {
  if (value) most = std::max(most.value_or(0), *value);
}

// Adds up what each set of cores reports once, whichever ranks share it.
class Cores {
 public:
  void add(const std::set<int>& cores, const RankUse& use) {
    keep_most(busy_[cores], use.part(&CpuUse::busy));
    keep_most(stolen_[cores], use.part(&CpuUse::stolen));
  }
  std::optional<double> busy() const { return sum(busy_); }
  std::optional<double> stolen() const { return sum(stolen_); }

 private:
  using Figures = std::map<std::set<int>, std::optional<double>>;

  // Empty if sets of cores overlap.
  static std::optional<double> sum(const Figures& figures) {
    std::set<int> seen;
    double sum = 0;
    for (const auto& [cores, value] : figures) {
      for (const int core : cores) {
        if (!seen.insert(core).second) return std::nullopt;
      }
      if (!value || cores.empty()) return std::nullopt;
      sum += *value;
    }
    return sum;
  }

  Figures busy_;
  Figures stolen_;
};

}  // namespace

MachineUse machine_use(const Job& job, int local_size, Interval window, Clock::time_point origin) {
  MachineUse use;
  Cores cores;
  std::optional<double> machine;
  const auto traces = all_traces(job);
  bool all_tell = std::ssize(traces) >= local_size;
  double all_used = 0;
  for (const RankTrace* const trace : traces) {
    const RankUse rank(*trace, window, origin);
    const auto used = rank.part(&CpuUse::used);
    all_tell = all_tell && used;
    all_used += used.value_or(0);
    cores.add(trace->affinity, rank);
    keep_most(use.throttled, rank.part(&CpuUse::throttled, &CpuUse::periods));
    keep_most(use.cpu_pressure, rank.part(&CpuUse::cpu_pressure));
    keep_most(use.memory_pressure, rank.part(&CpuUse::memory_pressure));
    keep_most(machine, rank.part(&CpuUse::machine));
  }
  use.stolen = cores.stolen();
  const auto busy = cores.busy();
  if (!all_tell) return use;
  use.used = all_used;
  if (busy && machine) use.elsewhere = std::max(0.0, *machine - *busy);
  if (busy) use.foreign = std::max(0.0, *busy - all_used);
  return use;
}

}  // namespace paceline::report
