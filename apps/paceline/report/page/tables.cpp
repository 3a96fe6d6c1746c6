#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "report/page/html.h"
#include "report/page/page.h"
#include "report/units.h"

namespace paceline::report {
namespace {

constexpr std::size_t kMaxMatrix = 16;
constexpr std::size_t kMaxPairs = 20;
constexpr std::size_t kMaxBucketRows = 40;

std::string cell(const std::string& text) {
  return "<td>" + text + "</td>";
}

std::string header(std::initializer_list<const char*> names, std::size_t text_column) {
  std::string html = "<div class=scroll><table><tr>";
  std::size_t column = 0;
  for (const char* const name : names) {
    html += fmt::format("<th{}>{}</th>", column++ == text_column ? " class=text" : "", name);
  }
  return html + "</tr>\n";
}

std::string longest_pairs(const Analysis& analysis) {
  std::vector<std::pair<std::pair<int, int>, double>> pairs(analysis.waits.begin(),
                                                            analysis.waits.end());
  std::ranges::sort(pairs, std::greater(), [](const auto& entry) { return entry.second; });
  pairs.resize(std::min(pairs.size(), kMaxPairs));
  std::string html = header({"rank", "waits for", "a step"}, 9);
  for (const auto& [ranks, time] : pairs) {
    html += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td></tr>\n", ranks.first, ranks.second,
                        time_text(time));
  }
  return html + "</table></div>";
}

}  // namespace

std::string rank_table(const Analysis& analysis) {
  std::string html =
      header({"rank", "computing", "waiting for late ranks", "waiting for communication",
              "between steps", "communication hidden", "waiting for a core", "share of the stall"},
             9);
  for (const RankTimes& one : analysis.ranks) {
    const auto stall = analysis.settled.stall_causes.find(one.rank);
    html += "<tr>" + cell(fmt::format("rank {}", one.rank)) + cell(time_text(one.computing)) +
            cell(time_text(one.late)) + cell(time_text(one.communication)) +
            cell(time_text(one.between)) +
            cell(one.under_way > 0 ? share_text(one.hidden / one.under_way) : "-") +
            cell(one.queued ? share_text(*one.queued) : "unknown") +
            cell(stall == analysis.settled.stall_causes.end() ? "0 %" : share_text(stall->second)) +
            "</tr>\n";
  }
  return html + "</table></div>";
}

std::string wait_table(const Analysis& analysis) {
  if (analysis.waits.empty()) return "<p>No rank waited.</p>";
  if (analysis.ranks.size() > kMaxMatrix) return longest_pairs(analysis);
  double most = 0;
  for (const auto& [pair, time] : analysis.waits) most = std::max(most, time);
  std::string html = "<div class=scroll><table class=pairs><tr><th></th>";
  for (const RankTimes& one : analysis.ranks) {
    html += fmt::format("<th>for rank {}</th>", one.rank);
  }
  html += "</tr>\n";
  for (const RankTimes& one : analysis.ranks) {
    html += fmt::format("<tr><th>rank {} waits</th>", one.rank);
    for (const RankTimes& other : analysis.ranks) {
      const auto found = analysis.waits.find({one.rank, other.rank});
      const double time = found == analysis.waits.end() ? 0 : found->second;
      html += fmt::format(R"-(<td style="background:rgba(221,116,51,{:.2f})">{}</td>)-",
                          most > 0 ? 0.5 * time / most : 0, time > 0 ? time_text(time) : "");
    }
    html += "</tr>\n";
  }
  return html + "</table></div>";
}

std::string bucket_table(const Analysis& analysis) {
  auto buckets = analysis.buckets;
  if (buckets.size() > kMaxBucketRows) {
    std::ranges::sort(buckets, std::greater(),
                      [](const BucketTimes& one) { return one.late + one.communication; });
    buckets.resize(kMaxBucketRows);
  }
  std::string html = header({"bucket", "size", "under way", "waiting for late ranks",
                             "waiting for communication", "parameters"},
                            5);
  for (const BucketTimes& one : buckets) {
    html += "<tr>" + cell(std::to_string(one.number)) +
            cell(one.info.bytes > 0 ? bytes_text(one.info.bytes) : "-") +
            cell(time_text(one.under_way)) + cell(time_text(one.late)) +
            cell(time_text(one.communication)) + "<td class=text>" + escaped(one.info.parameters) +
            "</td></tr>\n";
  }
  html += "</table></div>";
  if (analysis.buckets.size() > kMaxBucketRows) {
    html += fmt::format("<p class=soft>The {} of {} buckets that ranks waited for longest.</p>",
                        kMaxBucketRows, analysis.buckets.size());
  }
  return html;
}

}  // namespace paceline::report
