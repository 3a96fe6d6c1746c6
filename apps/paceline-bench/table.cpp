#include "table.h"

#include <fmt/format.h>

#include <array>
#include <string_view>

#include "statistics.h"

namespace paceline::bench {
namespace {

// What a table compares with; there may be no second.
struct Yardsticks {
  std::string_view first;
  std::string_view second;
};

Yardsticks yardsticks(std::string_view benchmark) {
  return benchmark == "ddp" ? Yardsticks{"barrier", "c10d_reducer_gloo"} : Yardsticks{"gloo", ""};
}

const Series* find(const Result& result, std::string_view implementation) {
  for (const Series& one : result.series) {
    if (one.implementation == implementation) return &one;
  }
  return nullptr;
}

// "1.62x (1.58-1.66)", nothing where there is no such series or it is this one.
std::string speedup(const Result& result, const Series& ours, std::string_view over) {
  const Series* const theirs = find(result, over);
  if (theirs == nullptr || theirs->implementation == ours.implementation) return "";
  const auto digits = [](double x) { return x < 10 ? 2 : x < 100 ? 1 : 0; };
  const Interval ratio = paired_speedup(ours.wall_us, theirs->wall_us);
  return fmt::format("{:.{}f}x ({:.{}f}-{:.{}f})", ratio.median, digits(ratio.median), ratio.low,
                     digits(ratio.low), ratio.high, digits(ratio.high));
}

constexpr const char* kLine = "{:<12} {:<19} {:>7} {:>7} {:>7} {:>7} {:<17} {:<17}";

std::string line(auto... cells) {
  std::string text = fmt::format(fmt::runtime(kLine), cells...);
  text.erase(text.find_last_not_of(' ') + 1);
  return text + '\n';
}

}  // namespace

std::string describe_bytes(std::int64_t bytes) {
  constexpr std::array units{"B", "KiB", "MiB", "GiB"};
  std::size_t unit = 0;
  while (unit + 1 < units.size() && bytes >= 1024 && bytes % 1024 == 0) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{} {}", bytes, units[unit]);
}

std::string describe_time(double us) {
  const char* unit = "us";
  if (us >= 1e6) {
    us /= 1e6;
    unit = "s";
  } else if (us >= 1e3) {
    us /= 1e3;
    unit = "ms";
  }
  return fmt::format("{:.{}f} {}", us, us < 9.995 ? 2 : us < 99.95 ? 1 : 0, unit);
}

std::string table_heading(const std::string& benchmark, int ranks) {
  const std::string on = fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s");
  if (benchmark == "ddp") {
    return fmt::format("\nA training step, {}\n", on) + line("model", "implementation", "median",
                                                             "p10", "p90", "cpu", "over barrier",
                                                             "over c10d_reducer");
  }
  return fmt::format("\nall_reduce of float32, SUM, {}\n", on) +
         line("size", "implementation", "median", "p10", "p90", "cpu", "over gloo", "");
}

std::string table_rows(const Result& result) {
  const auto [first, second] = yardsticks(result.benchmark);
  const auto* const bytes = std::get_if<std::int64_t>(&result.subject);
  std::string subject = bytes ? describe_bytes(*bytes) : std::get<std::string>(result.subject);
  std::string text;
  for (const Series& one : result.series) {
    const std::string name =
        one.variant.empty() ? one.implementation : one.implementation + ' ' + one.variant;
    text +=
        line(subject, name, describe_time(quantile(one.wall_us, 0.5)),
             describe_time(quantile(one.wall_us, 0.1)), describe_time(quantile(one.wall_us, 0.9)),
             describe_time(quantile(one.cpu_us, 0.5)), speedup(result, one, first),
             speedup(result, one, second));
    subject.clear();
  }
  return text;
}

}  // namespace paceline::bench
