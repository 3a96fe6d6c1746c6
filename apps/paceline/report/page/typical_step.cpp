#include <fmt/format.h>

#include <algorithm>

#include "report/page/axis.h"
#include "report/page/html.h"
#include "report/page/page.h"
#include "report/units.h"

namespace paceline::report {
namespace {

constexpr std::size_t kMaxRows = 16;   // more would not be read
constexpr std::size_t kMaxLanes = 24;  // of buckets, in a row
constexpr double kBarHeight = 24;
constexpr double kLegible = 0.022;  // of the width, for two digits

std::string bar(double begin, double end, double y, double height, const char* colour,
                const std::string& title) {
  return fmt::format(
      R"(<rect class="{}" x="{}" width="{}" y="{}" height="{}"><title>{}</title></rect>)", colour,
      percent(begin), percent(end - begin), y, height, escaped(title));
}

// The rows of the drawing of one step, over the time in which any rank was in it.
class StepDrawing {
 public:
  StepDrawing(const Job& job, const Step& step, int named) : job_(job), step_(step), named_(named) {
    begin_ = step.ranks.front().step.begin;
    end_ = step.ranks.front().step.end;
    for (const RankStep& rank : step.ranks) {
      begin_ = std::min(begin_, rank.step.begin);
      end_ = std::max(end_, rank.step.end);
    }
    end_ = std::max(end_, begin_ + 0.001);
    lane_height_ = step.ranks.size() <= 4 ? 13 : 7;
  }

  std::string draw() const {
    std::string html;
    std::size_t rows = 0;
    for (std::size_t i = 0; i < step_.ranks.size(); ++i) {
      if (rows + 1 > kMaxRows && job_.ranks[i].rank != named_) continue;
      html += row(i);
      ++rows;
    }
    html += axis();
    if (rows < step_.ranks.size()) {
      html += fmt::format("<p class=soft>{} of {} ranks are drawn.</p>", rows, step_.ranks.size());
    }
    return html;
  }

 private:
  double part(double moment) const { return (moment - begin_) / (end_ - begin_); }
  std::string since(double moment) const { return time_text(moment - begin_); }

  std::string bar_of(Interval when, double y, double height, const char* colour,
                     const std::string& what) const {
    if (when.length() == 0) return "";
    return bar(part(when.begin), part(when.end), y, height, colour,
               fmt::format("{}: {}, from {} to {}", what, time_text(when.length()),
                           since(when.begin), since(when.end)));
  }

  std::string row(std::size_t index) const {
    const RankStep& rank = step_.ranks[index];
    double height = kBarHeight + 3;
    const std::string buckets = draw_buckets(rank, height);
    std::string html = fmt::format(R"(<div class="row{}"><div>rank {}</div><svg height="{}">)",
                                   job_.ranks[index].rank == named_ ? " named" : "",
                                   job_.ranks[index].rank, height);
    for (const double tick : axis_ticks(end_ - begin_)) {
      html += fmt::format(R"(<line class="grid" x1="{0}" x2="{0}" y1="0" y2="100%"/>)",
                          percent(tick / (end_ - begin_)));
    }
    return html + draw_work(rank) + buckets + "</svg></div>\n";
  }

  std::string draw_work(const RankStep& rank) const {
    std::string svg =
        bar_of({begin_, rank.step.begin}, 0, kBarHeight, "between", "before its step");
    for (const auto& when : rank.forward) svg += bar_of(when, 0, kBarHeight, "forward", "forward");
    for (const auto& when : rank.backward) {
      svg += bar_of(when, 0, kBarHeight, "backward", "backward");
    }
    for (const Wait& wait : rank.waits) {
      const double divided = wait.when.begin + wait.late;
      const std::string bucket = wait.bucket < 0 ? "" : fmt::format(" with bucket {}", wait.bucket);
      svg += bar_of({wait.when.begin, divided}, 0, kBarHeight, "late",
                    fmt::format("waiting for rank {}{}", wait.late_rank, bucket));
      svg += bar_of({divided, wait.when.end}, 0, kBarHeight, "comm",
                    "waiting for communication" + bucket);
    }
    return svg;
  }

  // Below the work, in as few lanes as keep them apart; adds to `height` what they need.
  std::string draw_buckets(const RankStep& rank, double& height) const {
    auto buckets = rank.buckets;
    std::ranges::sort(buckets, {}, [](const OpenBucket& one) { return one.when.begin; });
    std::string svg;
    std::vector<double> lanes;  // when each is free again
    for (const OpenBucket& bucket : buckets) {
      auto lane =
          std::ranges::find_if(lanes, [&](double free) { return free <= bucket.when.begin; });
      if (lane == lanes.end() && lanes.size() == kMaxLanes) continue;
      if (lane == lanes.end()) lane = lanes.insert(lane, 0);
      *lane = bucket.when.end;
      const auto number = static_cast<double>(lane - lanes.begin());
      svg += draw_bucket(bucket, kBarHeight + 3 + number * (lane_height_ + 1));
    }
    height += static_cast<double>(lanes.size()) * (lane_height_ + 1);
    return svg;
  }

  std::string draw_bucket(const OpenBucket& bucket, double y) const {
    const std::string name = fmt::format("bucket {}", bucket.number);
    std::string svg = bar_of({bucket.when.begin, bucket.published_by_all}, y, lane_height_, "open",
                             name + ": other ranks' gradients are not there yet") +
                      bar_of({bucket.published_by_all, bucket.when.end}, y, lane_height_, "comm",
                             name + ": all ranks' gradients are there");
    const bool pale = part(bucket.published_by_all) - part(bucket.when.begin) >= kLegible;
    if ((pale || part(bucket.when.end) - part(bucket.published_by_all) >= kLegible) &&
        lane_height_ >= 13) {
      const double begin = pale ? bucket.when.begin : bucket.published_by_all;
      svg +=
          fmt::format(R"(<text class="wide {}" x="{}" dx="3" y="{}">{}</text>)", pale ? "on" : "in",
                      percent(part(begin)), y + lane_height_ - 3, bucket.number);
    }
    return svg;
  }

  std::string axis() const {
    std::string html = R"(<div class="row"><div></div><svg class="loose" height="16">)";
    const auto label = [&](double at, const char* anchor, const std::string& text) {
      html += fmt::format(R"(<text x="{}" y="11" text-anchor="{}">{}</text>)", percent(at), anchor,
                          text);
    };
    for (const double tick : axis_ticks(end_ - begin_)) {
      const double at = tick / (end_ - begin_);
      if (at < .85) label(at, at == 0 ? "start" : "middle", tick_text(tick));
    }
    label(1, "end", time_text(end_ - begin_));
    return html + "</svg></div>\n";
  }

  const Job& job_;
  const Step& step_;
  int named_;
  double begin_ = 0;
  double end_ = 0;
  double lane_height_ = 0;
};

}  // namespace

std::string typical_step(const Job& job, const Analysis& analysis, const Diagnosis& diagnosis) {
  return StepDrawing(job, analysis.steps[analysis.typical], diagnosis.rank).draw();
}

}  // namespace paceline::report
