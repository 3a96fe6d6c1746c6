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

// The fewest lanes that keep bars apart. Place them in the order of their begins.
class Lanes {
 public:
  // The number of a lane that is free; kMaxLanes if there is none.
  std::size_t place(Interval when) {
    const auto lane = std::ranges::find_if(free_, [&](double free) { return free <= when.begin; });
    const auto number = static_cast<std::size_t>(lane - free_.begin());
    if (lane == free_.end() && free_.size() < kMaxLanes) free_.push_back(0);
    if (number < kMaxLanes) free_[number] = when.end;
    return number;
  }
  std::size_t count() const { return free_.size(); }

 private:
  std::vector<double> free_;  // when each is free again
};

// The rows of the drawing of one step, over the time in which any rank was in it.
class StepDrawing {
 public:
  StepDrawing(const Job& job, const Step& step, int named) : job_(job), step_(step), named_(named) {
    begin_ = step.ranks.front().step.begin;
    end_ = step.ranks.front().step.end;
    for (const RankStep& rank : step.ranks) {
      begin_ = std::min(begin_, rank.step.begin);
      end_ = std::max(end_, rank.step.end);
      // The accelerator may end the step later.
      for (const DeviceWork& work : rank.device) end_ = std::max(end_, work.when.end);
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
    const std::string device = draw_device(rank, height);
    std::string html = fmt::format(R"(<div class="row{}"><div>rank {}</div><svg height="{}">)",
                                   job_.ranks[index].rank == named_ ? " named" : "",
                                   job_.ranks[index].rank, height);
    for (const double tick : axis_ticks(end_ - begin_)) {
      html += fmt::format(R"(<line class="grid" x1="{0}" x2="{0}" y1="0" y2="100%"/>)",
                          percent(tick / (end_ - begin_)));
    }
    return html + draw_work(rank) + buckets + device + "</svg></div>\n";
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

  // Below the work; adds to `height` what they need.
  std::string draw_buckets(const RankStep& rank, double& height) const {
    auto buckets = rank.buckets;
    std::ranges::sort(buckets, {}, [](const OpenBucket& one) { return one.when.begin; });
    std::string svg;
    Lanes lanes;
    for (const OpenBucket& bucket : buckets) {
      const std::size_t lane = lanes.place(bucket.when);
      if (lane < kMaxLanes) svg += draw_bucket(bucket, height + offset_of(lane));
    }
    height += offset_of(lanes.count());
    return svg;
  }

  double offset_of(std::size_t lane) const {
    return static_cast<double>(lane) * (lane_height_ + 1);
  }

  // Below all that the CPU did; adds to `height` what it needs.
  std::string draw_device(const RankStep& rank, double& height) const {
    if (rank.device.empty()) return "";
    height += 4;
    auto device = rank.device;
    std::ranges::sort(device, {}, [](const DeviceWork& work) { return work.when.begin; });
    std::string svg;
    for (const DeviceWork& work : device) {
      if (work.kind == Kind::device_forward) {
        svg += bar_of(work.when, height, kBarHeight, "forward", "forward on the device");
      } else if (work.kind == Kind::device_backward) {
        svg += bar_of(work.when, height, kBarHeight, "backward", "backward on the device");
      }
    }
    height += kBarHeight + 3;
    Lanes lanes;
    for (const DeviceWork& work : device) {
      const std::size_t lane =
          work.kind == Kind::device_bucket ? lanes.place(work.when) : kMaxLanes;
      if (lane == kMaxLanes) continue;
      const double y = height + offset_of(lane);
      svg += bar_of(work.when, y, lane_height_, "comm",
                    fmt::format("bucket {}, until its average is on the device", work.bucket)) +
             number_in(work.when, y, work.bucket, "in");
    }
    height += offset_of(lanes.count());
    return svg;
  }

  std::string draw_bucket(const OpenBucket& bucket, double y) const {
    const std::string name = fmt::format("bucket {}", bucket.number);
    const std::string svg = bar_of({bucket.when.begin, bucket.published_by_all}, y, lane_height_,
                                   "open", name + ": other ranks' gradients are not there yet") +
                            bar_of({bucket.published_by_all, bucket.when.end}, y, lane_height_,
                                   "comm", name + ": all ranks' gradients are there");
    const bool pale = part(bucket.published_by_all) - part(bucket.when.begin) >= kLegible;
    return svg +
           (pale ? number_in({bucket.when.begin, bucket.published_by_all}, y, bucket.number, "on")
                 : number_in({bucket.published_by_all, bucket.when.end}, y, bucket.number, "in"));
  }

  // If there is room for it.
  std::string number_in(Interval bar, double y, int number, const char* style) const {
    if (part(bar.end) - part(bar.begin) < kLegible || lane_height_ < 13) return "";
    return fmt::format(R"(<text class="wide {}" x="{}" dx="3" y="{}">{}</text>)", style,
                       percent(part(bar.begin)), y + lane_height_ - 3, number);
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
