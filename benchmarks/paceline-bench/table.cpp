#include "table.h"

#include <fmt/format.h>

#include <array>
#include <string_view>
#include <vector>

#include "measure/statistics.h"

namespace paceline::bench {
namespace {

// What the rows of a table are compared with, and what its columns say.
struct Yardstick {
  std::string_view implementation;
  std::string_view heading;
};

std::vector<Yardstick> yardsticks(const Options& options) {
  const Benchmark benchmark = options.benchmark;
  if (benchmark == Benchmark::accumulation) return {{"accumulation", "over accumulation"}};
  if (benchmark == Benchmark::launch) return {{"torchrun", "over torchrun"}};
  if (benchmark == Benchmark::ddp) {
    return {{"barrier", "over barrier"},
            {"c10d_reducer_gloo", "over c10d_reducer"},
            {"python_ddp_gloo", "over python_ddp"}};
  }
  if (options.nodes > 1) return {{"gloo", "over gloo"}, {"link", "over link"}};
  return {{"gloo", "over gloo"}, {"best_mpi", "over best MPI"}, {"streaming", "over streaming"}};
}

const Series* find(const Result& result, std::string_view implementation) {
  if (implementation == "best_mpi") return best_mpi(result);
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

constexpr const char* kCells = "{:<14} {:<8} {:<21} {:>8} {:>8}";

std::string line(std::string text, const std::vector<std::string>& ratios) {
  for (const std::string& ratio : ratios) text += fmt::format("  {:<17}", ratio);
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

std::string table_heading(const Options& options, int ranks) {
  const Benchmark benchmark = options.benchmark;
  const bool is_ddp = benchmark != Benchmark::collectives;
  std::vector<std::string> headings;
  for (const Yardstick& one : yardsticks(options)) headings.emplace_back(one.heading);
  const std::string where =
      options.nodes == 1 ? ""
                         : fmt::format(" on {} nodes, links of {}", options.nodes, options.link);
  return fmt::format("\n{}, {} rank{}{}\n",
                     benchmark == Benchmark::ddp      ? "A training step"
                     : benchmark == Benchmark::launch ? "A job"
                     : benchmark == Benchmark::accumulation
                         ? "A training step of micro-batches"
                         : "Collectives of float32, reductions with SUM",
                     ranks, ranks == 1 ? "" : "s", where) +
         line(fmt::format(kCells,
                          benchmark == Benchmark::launch ? ""
                          : is_ddp                       ? "model"
                                                         : "collective",
                          is_ddp ? "" : "size", "implementation", "median", "cpu"),
              headings);
}

std::string table_rows(const Options& options, const Result& result) {
  const auto* const bytes = std::get_if<std::int64_t>(&result.subject);
  std::string subject = bytes ? result.benchmark : std::get<std::string>(result.subject);
  std::string size = bytes ? describe_bytes(*bytes) : "";
  std::string text;
  for (const Series& one : result.series) {
    const std::string name =
        one.variant.empty() ? one.implementation : one.implementation + ' ' + one.variant;
    std::vector<std::string> ratios;
    for (const Yardstick& yardstick : yardsticks(options)) {
      ratios.push_back(speedup(result, one, yardstick.implementation));
    }
    text += line(fmt::format(kCells, subject, size, name, describe_time(quantile(one.wall_us, 0.5)),
                             describe_time(quantile(one.cpu_us, 0.5))),
                 ratios);
    subject.clear();
    size.clear();
  }
  return text;
}

}  // namespace paceline::bench
