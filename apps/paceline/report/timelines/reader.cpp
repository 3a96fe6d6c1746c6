#include "report/timelines/reader.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <optional>
#include <utility>

#include <paceline/error.h>

#include "base/errno_error.h"
#include "base/number_list.h"
#include "base/unique_fd.h"
#include "report/timelines/event_parser.h"
#include "trace/format.h"

namespace paceline::report {
namespace {

constexpr double kMaxNanoseconds = 4e18;
constexpr int kMaxRanks = 1 << 16;
constexpr int kMaxBuckets = 1 << 20;
constexpr int kMaxCores = 1 << 16;
// A short text may name as many ranks as a world has.
constexpr std::size_t kMaxGrouped = std::size_t{1} << 22;
constexpr auto kMaxFile = std::int64_t{1} << 30;

// Translates events into a RankTrace.
class Collector {
 public:
  explicit Collector(const std::string& path) { trace_.path = path; }

  void take(const Event& event) {
    const std::string_view phase = event.text(Field::ph);
    const bool understood = phase == "X"   ? take_span(event)
                            : phase == "M" ? take_fact(event, event.text(Field::name))
                                           : false;
    if (!understood) ++trace_.foreign;
  }

  RankTrace finish(bool truncated) {
    if (trace_.rank < 0) {
      throw CorruptFile(
          fmt::format("{}: no event paceline_job, which names the rank (at byte 0)", trace_.path));
    }
    trace_.truncated = truncated;
    return std::move(trace_);
  }

 private:
  bool take_span(const Event& event) {
    const auto kind = trace::kind_of(event.text(Field::cat));
    const double begin = event.number(Field::ts).value_or(-1) * 1000;
    const double length = event.number(Field::dur).value_or(-1) * 1000;
    const auto model = event.integer(Field::model, 0, kMaxCount);
    const auto step = event.integer(Field::step, 0, kMaxCount);
    const bool sane = begin >= 0 && length >= 0 && begin + length <= kMaxNanoseconds;
    if (!kind || !sane || !model || !step) return false;
    Span span{.kind = *kind,
              .model = static_cast<std::uint64_t>(*model),
              .step = static_cast<std::uint64_t>(*step)};
    span.bucket = static_cast<int>(event.integer(Field::bucket, 0, kMaxBuckets).value_or(-1));
    span.peer = static_cast<int>(event.integer(Field::peer, 0, kMaxRanks).value_or(-1));
    if (trace::is_of_bucket(span.kind) && span.bucket < 0) return false;
    span.begin = at(begin);
    span.end = at(begin + length);
    (trace::is_on_device(span.kind) ? trace_.device_spans : trace_.spans).push_back(span);
    return true;
  }

  bool take_fact(const Event& event, std::string_view name) {
    if (name == "paceline_job") return take_job(event);
    if (name == "paceline_bucket") return take_bucket(event);
    if (name == "paceline_reduction") return take_reduction(event);
    if (name == "paceline_group") return take_group(event);
    if (name == "paceline_lost") {
      trace_.dropped +=
          static_cast<std::uint64_t>(event.integer(Field::spans, 0, kMaxCount).value_or(0));
    }
    if (name == "paceline_full") trace_.full = true;
    if (name == "paceline_cpu") return take_cpu(event);
    if (name == "paceline_thread") return take_thread(event);
    return true;  // others are for viewers
  }

  bool take_job(const Event& event) {
    if (trace_.size > 0) return false;  // the first counts
    const auto version = event.integer(Field::version, 0, kMaxCount);
    if (version != trace::kFormatVersion) {
      throw CorruptFile(
          fmt::format("{}: format version {}, expected {}: use the paceline that wrote it "
                      "(at byte 0)",
                      trace_.path, version.value_or(0), trace::kFormatVersion));
    }
    const auto rank = event.integer(Field::rank, 0, kMaxRanks - 1);
    const auto size = event.integer(Field::size, 1, kMaxRanks);
    if (!rank || !size || *rank >= *size || trace_.rank >= 0) return false;
    trace_.rank = static_cast<int>(*rank);
    trace_.size = static_cast<int>(*size);
    trace_.local_size = static_cast<int>(event.integer(Field::local_size, 0, *size).value_or(0));
    const auto cores = base::parse_list(event.text(Field::affinity), kMaxCores);
    trace_.affinity = {cores.begin(), cores.end()};
    trace_.cores = static_cast<int>(event.integer(Field::cores, 0, kMaxRanks).value_or(0));
    trace_.started = event.integer(Field::started, 0, kMaxCount).value_or(0);
    trace_.boot = event.text(Field::boot);
    return true;
  }

  bool take_cpu(const Event& event) {
    CpuUse use;
    for (const auto& [field, value] : {std::pair(Field::wall, &use.wall),
                                       {Field::used, &use.used},
                                       {Field::running, &use.running},
                                       {Field::queued, &use.queued}}) {
      const auto count = event.integer(field, 0, kMaxCount);
      if (!count) return false;
      *value = *count;
    }
    for (const auto& [field, value] : {std::pair(Field::periods, &use.periods),
                                       {Field::throttled, &use.throttled},
                                       {Field::busy, &use.busy},
                                       {Field::stolen, &use.stolen},
                                       {Field::machine, &use.machine},
                                       {Field::cpu_pressure, &use.cpu_pressure},
                                       {Field::memory_pressure, &use.memory_pressure}}) {
      *value = event.integer(field, 0, kMaxCount).value_or(trace::kUnknown);
    }
    use.at = moment(event).value_or(Clock::time_point());
    if (!trace_.cpu.empty() && use.at < trace_.cpu.back().at) return false;
    trace_.cpu.push_back(use);
    return true;
  }

  bool take_thread(const Event& event) {
    const auto at = moment(event);
    const auto cpu = event.integer(Field::cpu, 0, kMaxCount);
    if (!at || !cpu || (!trace_.thread.empty() && *at < trace_.thread.back().at)) return false;
    trace_.thread.push_back(
        {.at = *at,
         .cpu = *cpu,
         .queued = event.integer(Field::queued, 0, kMaxCount).value_or(trace::kUnknown),
         .preempted = event.integer(Field::preempted, 0, kMaxCount).value_or(0),
         .faults = event.integer(Field::faults, 0, kMaxCount).value_or(0)});
    return true;
  }

  bool take_bucket(const Event& event) {
    const auto model = event.integer(Field::model, 0, kMaxCount);
    const auto bucket = event.integer(Field::bucket, 0, kMaxBuckets);
    const auto bytes = event.integer(Field::bytes, 0, kMaxCount);
    if (!model || !bucket || !bytes) return false;
    trace_.buckets[{static_cast<std::uint64_t>(*model), static_cast<int>(*bucket)}] = {
        static_cast<std::uint64_t>(*bytes), std::string(event.text(Field::parameters))};
    return true;
  }

  bool take_reduction(const Event& event) {
    const auto model = event.integer(Field::model, 0, kMaxCount);
    const double latency = event.number(Field::latency).value_or(-1);
    const double rate = event.number(Field::rate).value_or(-1);
    if (!model || !(latency >= 0) || !(rate >= 0)) return false;
    trace_.reductions[static_cast<std::uint64_t>(*model)] = {latency, rate};
    return true;
  }

  bool take_group(const Event& event) {
    const auto model = event.integer(Field::model, 0, kMaxCount);
    auto ranks = base::parse_list(event.text(Field::ranks), kMaxRanks);
    grouped_ += ranks.size();
    if (!model || ranks.empty() || grouped_ > kMaxGrouped) return false;
    trace_.groups[static_cast<std::uint64_t>(*model)] = std::move(ranks);
    return true;
  }

  static std::optional<Clock::time_point> moment(const Event& event) {
    const double nanoseconds = event.number(Field::at).value_or(-1) * 1000;
    if (nanoseconds < 0 || nanoseconds > kMaxNanoseconds) return std::nullopt;
    return at(nanoseconds);
  }
  static Clock::time_point at(double nanoseconds) {
    const std::int64_t count = std::llround(nanoseconds);
    return Clock::time_point(std::chrono::nanoseconds(count));
  }

  RankTrace trace_;
  std::size_t grouped_ = 0;  // ranks in groups
};

std::string read_whole(const std::filesystem::path& path) {
  const base::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0)
    throw base::errno_error("cannot open " + path.string());
  if (!S_ISREG(status.st_mode)) throw Error(path.string() + " is not a regular file");
  if (status.st_size > kMaxFile) {
    throw Error(fmt::format("{} has {} bytes; expected at most {}", path.string(), status.st_size,
                            kMaxFile));
  }
  std::string text(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t have = 0;
  while (have < text.size()) {
    const ssize_t count = ::read(fd.get(), text.data() + have, text.size() - have);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw base::errno_error("cannot read " + path.string());
    if (count == 0) break;
    have += static_cast<std::size_t>(count);
  }
  text.resize(have);
  return text;
}

}  // namespace

RankTrace parse_timeline(std::string_view text, const std::string& path) {
  Collector collector(path);
  const bool truncated =
      parse_events(text, path, [&](const Event& event) { collector.take(event); });
  return collector.finish(truncated);
}

RankTrace read_timeline(const std::filesystem::path& path) {
  return parse_timeline(read_whole(path), path.string());
}

}  // namespace paceline::report
