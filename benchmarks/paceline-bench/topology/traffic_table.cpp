#include "topology/traffic_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "measure/statistics.h"
#include "table.h"

namespace paceline::bench {
namespace {

constexpr const char* kTopologyCells =
    "{:<17} {:>16} {:>10} {:>8}  {:>16} {:>10}  {:>9} {:<13} {:>9}";

std::string with_newline(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line + '\n';
}

// The range over ranks and the sum of what `member` counts; empty if nothing was counted.
struct OverRanks {
  std::int64_t smallest = 0;
  std::int64_t largest = 0;
  std::int64_t total = 0;
};
template <typename Record>
OverRanks over_ranks(const std::vector<Record>& records, std::int64_t Record::*member) {
  OverRanks result{records.front().*member, records.front().*member, 0};
  for (const Record& one : records) {
    result.smallest = std::min(result.smallest, one.*member);
    result.largest = std::max(result.largest, one.*member);
    result.total += one.*member;
  }
  return result;
}

template <typename Record>
std::array<std::string, 2> bytes_cells(const std::vector<Record>& records,
                                       std::int64_t Record::*member) {
  if (records.empty()) return {"-", "-"};
  const OverRanks bytes = over_ranks(records, member);
  return {describe_range(bytes.smallest, bytes.largest), describe_range(bytes.total, bytes.total)};
}

std::string messages_cell(const std::vector<Payload>& records) {
  if (records.empty()) return "-";
  const OverRanks count = over_ranks(records, &Payload::messages_sent);
  return count.smallest == count.largest ? std::to_string(count.largest)
                                         : fmt::format("{}-{}", count.smallest, count.largest);
}

// Without the unit: that is the median's.
std::string interval_cell(const Interval& time) {
  const double unit = time.median < 1e3 ? 1 : time.median < 1e6 ? 1e3 : 1e6;
  return fmt::format("({:.3g}-{:.3g})", time.low / unit, time.high / unit);
}

}  // namespace

std::string describe_range(std::int64_t smallest, std::int64_t largest) {
  constexpr std::array units{"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  double scale = 1;
  while (unit + 1 < units.size() && static_cast<double>(largest) >= 1024 * scale) {
    scale *= 1024;
    ++unit;
  }
  const auto in_unit = [&](std::int64_t bytes) {
    return fmt::format("{:.{}f}", static_cast<double>(bytes) / scale, unit == 0 ? 0 : 2);
  };
  const std::string low = in_unit(smallest);
  const std::string high = in_unit(largest);
  return fmt::format("{}{} {}", low == high ? "" : low + '-', high, units[unit]);
}

std::string topology_heading(const Options& options, int ranks) {
  const std::string where =
      has_links(options)
          ? fmt::format("on {} nodes, links of {}; messages over Gloo", ranks, options.link)
          : "on this machine, in shared memory";
  return fmt::format("\nAn all-reduce of {} of float32, {} ranks {}\n",
                     describe_bytes(options.bytes.front()), ranks, where) +
         with_newline(fmt::format(kTopologyCells, "algorithm", "a rank sends", "in total",
                                  "messages", "a link carries", "in total", "time", "(90 %)",
                                  "theory"));
}

std::string topology_rows(const Result& result) {
  std::string text;
  for (const Series& one : result.series) {
    const auto payload = bytes_cells(one.payload, &Payload::bytes_sent);
    const auto link = bytes_cells(one.link, &LinkBytes::sent);
    const Interval time = median_interval(one.wall_us);
    text += with_newline(fmt::format(kTopologyCells, one.implementation, payload[0], payload[1],
                                     messages_cell(one.payload), link[0], link[1],
                                     describe_time(time.median), interval_cell(time),
                                     one.theory_us > 0 ? describe_time(one.theory_us) : "-"));
  }
  return text;
}

}  // namespace paceline::bench
