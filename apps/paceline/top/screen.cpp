#include "top/screen.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "report/units.h"

namespace paceline::top {
namespace {

using report::time_text;

// From this part of the time on it is worth a look which rank or bucket a rank waits for.
constexpr double kNotableWait = 0.01;
// Without a step for this long, and for so many periods, the figures are of the past.
constexpr double kIdle = 2;
constexpr double kIdlePeriods = 5;

// Characters of UTF-8 have one byte that does not continue another.
bool continues(char c) {
  return (static_cast<unsigned char>(c) & 0xc0) == 0x80;
}
std::size_t width_of(std::string_view text) {
  return text.size() - static_cast<std::size_t>(std::ranges::count_if(text, continues));
}

std::string cut(std::string_view text, std::size_t columns) {
  if (columns == 0 || width_of(text) <= columns) return std::string(text);
  std::size_t end = 0;
  for (std::size_t width = 0; end < text.size(); ++end) {
    if (!continues(text[end]) && width++ == columns) break;
  }
  return std::string(text.substr(0, end));
}

// Breaks at spaces; the lines after the first are indented.
void add_wrapped(const std::string& text, std::size_t columns, std::vector<std::string>& lines) {
  std::string line;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    if (columns > 0 && !line.empty() && width_of(line) + 1 + width_of(word) > columns) {
      lines.push_back(cut(line, columns));
      line = ' ';
    }
    line += line.empty() ? word : ' ' + word;
    begin = end + 1;
  }
  lines.push_back(cut(line, columns));
}

std::string number_text(double value) {
  if (std::isnan(value)) return "-";
  return value < 99.95 ? fmt::format("{:.1f}", value) : fmt::format("{:.0f}", value);
}

double all_samples(const View& view) {
  if (std::ssize(view.rates) < view.recent.group_size) return std::nan("");
  double sum = 0;
  for (const RankRate& one : view.rates) sum += one.rate ? one.rate->samples : std::nan("");
  return sum;
}

std::string head(const View& view) {
  std::string text =
      fmt::format("{}: {} rank{}", view.job, view.recent.size, view.recent.size == 1 ? "" : "s");
  const auto& rates = view.rates;
  const auto known =
      std::ranges::find_if(rates, [](const RankRate& r) { return r.rate.has_value(); });
  if (known == rates.end()) return text;
  text += fmt::format(", step {}, {} steps/s", known->step, number_text(known->rate->steps));
  const double samples = all_samples(view);
  return std::isnan(samples) ? text : text + fmt::format(", {} samples/s", number_text(samples));
}

// The rank and the bucket that the rank at `index` waited for longest.
std::string waits_for(const report::Analysis& a, std::size_t index) {
  std::map<int, double> ranks;
  std::map<int, double> buckets;
  double period = 0;
  for (const report::Step& step : a.steps) {
    period += step.ranks[index].period.length();
    for (const report::Wait& wait : step.ranks[index].waits) {
      if (wait.late_rank >= 0) ranks[wait.late_rank] += wait.late;
      if (wait.bucket >= 0) buckets[wait.bucket] += wait.when.length();
    }
  }
  std::string text;
  const auto add = [&](const auto& times, std::string_view what) {
    const auto most = std::ranges::max_element(times, {}, [](auto& one) { return one.second; });
    if (most == times.end() || most->second < kNotableWait * period) return;
    text += (text.empty() ? "" : ", ") + fmt::format("{} {}", what, most->first);
  };
  add(ranks, "rank");
  add(buckets, "bucket");
  return text.empty() ? "-" : text;
}

std::string row(const std::string& rank, const std::string& step, const std::string& computing,
                const std::string& late, const std::string& communication,
                const std::string& between, const std::string& waits, const std::string& samples,
                const std::string& queued) {
  return fmt::format("{:>4} {:>7} {:>7} {:>7} {:>7} {:>7}  {:<17} {:>9} {:>5}", rank, step,
                     computing, late, communication, between, waits, samples, queued);
}

std::string title() {
  return row("rank", "step", "compute", "late", "comm.", "between", "waits for", "samples/s",
             "queue");
}

std::string rank_row(const View& view, std::size_t index) {
  const RankRate& rate = view.rates[index];
  const std::string samples = number_text(rate.rate ? rate.rate->samples : std::nan(""));
  if (view.analysis.steps.empty()) {
    return row(std::to_string(rate.rank), "-", "-", "-", "-", "-", "-", samples, "-");
  }
  const report::RankTimes& times = view.analysis.ranks[index];
  const double period = times.computing + times.late + times.communication + times.between;
  return row(std::to_string(rate.rank), time_text(period), time_text(times.computing),
             time_text(times.late), time_text(times.communication), time_text(times.between),
             waits_for(view.analysis, index), samples,
             times.queued ? report::share_text(*times.queued) : "-");
}

void add_finding(const View& view, std::size_t columns, std::vector<std::string>& lines) {
  const report::Analysis& a = view.analysis;
  if (view.idle > std::max(kIdle, kIdlePeriods * a.period / 1e6)) {
    add_wrapped(fmt::format("No step has ended for {:.0f} s.", view.idle), columns, lines);
  }
  if (view.diagnosis.finding == report::Finding::too_few_steps) {
    add_wrapped("Too few steps to judge yet.", columns, lines);
  } else {
    add_wrapped(view.diagnosis.sentence, columns, lines);
    const auto& remedies = view.diagnosis.remedies;
    if (!remedies.empty() && remedies.front().prediction) {
      add_wrapped(text_of(*remedies.front().prediction), columns, lines);
    }
  }
  for (const std::string& note : view.recent.notes) add_wrapped(note + '.', columns, lines);
}

void add_ranks(const View& view, std::size_t columns, std::size_t room,
               std::vector<std::string>& lines) {
  const std::size_t all = view.rates.size();
  const std::size_t shown = room == 0 || all <= room ? all : std::max<std::size_t>(room, 2) - 1;
  const auto found = std::ranges::find(view.rates, view.diagnosis.rank, &RankRate::rank);
  const auto named = static_cast<std::size_t>(found - view.rates.begin());
  for (std::size_t i = 0; i < shown; ++i) {
    const bool moves_up = i + 1 == shown && named >= shown && named < all;
    lines.push_back(cut(rank_row(view, moves_up ? named : i), columns));
  }
  if (shown < all) lines.push_back(cut(fmt::format("  {} more ranks", all - shown), columns));
}

}  // namespace

std::vector<std::string> draw(const View& view, std::size_t columns, std::size_t rows) {
  std::vector<std::string> finding;
  add_finding(view, columns, finding);
  std::vector<std::string> lines{cut(head(view), columns), cut(title(), columns)};
  const std::size_t other = lines.size() + finding.size();
  add_ranks(view, columns, rows == 0 ? 0 : std::max<std::size_t>(rows, other + 2) - other, lines);
  lines.insert(lines.end(), finding.begin(), finding.end());
  if (rows > 0 && lines.size() > rows) lines.resize(rows);
  return lines;
}

}  // namespace paceline::top
