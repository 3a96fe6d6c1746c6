#include "drawing/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "drawing/text.h"

namespace paceline::drawing {
namespace {

// Attributes give the colours of a light drawing, since some programs do not know style sheets.
constexpr std::string_view kStyle = R"(<style>
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) {
  .page { fill: #15171b; }
  .ink { fill: #e8e9ec; }
  .soft { fill: #a0a6b1; }
  .grid { stroke: #343941; }
}
</style>
)";

constexpr double kHeading = 1.25;  // how much wider its text is
constexpr double kLineHeight = 20;
constexpr double kGap = 22;       // between entries of a legend
constexpr double kSample = 24;    // the width of a line's sample
constexpr double kSampleGap = 6;  // between it and its name
constexpr double kFontBox = 11;   // a sample of a colour

const char* fill_of(std::string_view style) {
  return style == "inside" ? "#ffffff" : style == "soft" ? "#5d6470" : "#1d2026";
}

const char* name_of(Svg::Anchor anchor) {
  return anchor == Svg::Anchor::start ? "start" : anchor == Svg::Anchor::middle ? "middle" : "end";
}

std::string tooltip(std::string_view text) {
  return text.empty() ? "" : fmt::format("<title>{}</title>", escaped(text));
}

}  // namespace

Svg::Svg(double width, std::string title) : width_(width), title_(std::move(title)) {}

void Svg::text(std::string_view text, const Label& label) {
  const std::string turn =
      label.upwards ? fmt::format(" transform=\"rotate(-90 {:.2f} {:.2f})\"", label.x, label.y)
                    : "";
  body_ += fmt::format(
      R"(<text class="{}" x="{:.2f}" y="{:.2f}" text-anchor="{}" fill="{}" font-size="{}"{}>{}</text>)"
      "\n",
      label.style, label.x, label.y, name_of(label.anchor), fill_of(label.style), kFontSize, turn,
      escaped(text));
}

void Svg::heading(std::string_view text) {
  const std::string cut = cut_to_width(text, (width_ - 2 * kMargin) / kHeading);
  body_ += fmt::format(
      R"(<text class="ink" x="{:.2f}" y="{:.2f}" fill="{}" font-size="{}" font-weight="600">{}</text>)"
      "\n",
      kMargin, kHeadingEnd - 6, fill_of("ink"), kFontSize * kHeading, escaped(cut));
}

void Svg::grid_line(double x1, double y1, double x2, double y2) {
  body_ += fmt::format(
      R"(<line class="grid" x1="{:.2f}" y1="{:.2f}" x2="{:.2f}" y2="{:.2f}" stroke="#e2e3e0"/>)"
      "\n",
      x1, y1, x2, y2);
}

void Svg::polyline(const std::vector<std::pair<double, double>>& points, std::string_view colour,
                   bool dashed) {
  std::string list;
  for (const auto& [x, y] : points) list += fmt::format("{:.2f},{:.2f} ", x, y);
  if (!list.empty()) list.pop_back();
  body_ += fmt::format(
      R"(<polyline points="{}" fill="none" stroke="{}" stroke-width="{}" stroke-linejoin="round"{}/>)"
      "\n",
      list, colour, dashed ? 1.5 : 2, dashed ? R"( stroke-dasharray="6 4")" : "");
}

void Svg::dot(double x, double y, std::string_view colour, std::string_view hover) {
  body_ += fmt::format(R"(<circle cx="{:.2f}" cy="{:.2f}" r="3.5" fill="{}">{}</circle>)"
                       "\n",
                       x, y, colour, tooltip(hover));
}

void Svg::box(double x, double y, double width, double height, std::string_view colour,
              std::string_view hover) {
  body_ += fmt::format(
      R"(<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" rx="2" fill="{}">{}</rect>)"
      "\n",
      x, y, width, height, colour, tooltip(hover));
}

std::string Svg::str(double height) const {
  return fmt::format(
             R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:.0f} {1:.0f}" )"
             R"(width="{0:.0f}" height="{1:.0f}" role="img">)"
             "\n<title>{2}</title>\n{3}"
             R"(<rect class="page" width="{0:.0f}" height="{1:.0f}" rx="8" fill="#ffffff"/>)"
             "\n",
             width_, height, escaped(title_), kStyle) +
         body_ + "</svg>\n";
}

double draw_legend(Svg& svg, const std::vector<LegendEntry>& entries, double left, double right,
                   double y) {
  double x = left;
  for (const LegendEntry& entry : entries) {
    const double sample = entry.line ? kSample : kFontBox;
    const std::string name = cut_to_width(entry.name, right - left - sample - kSampleGap);
    const double width = sample + kSampleGap + text_width(name);
    if (x == left || x + width > right) {
      x = left;
      y += kLineHeight;
    }
    if (entry.line) {
      svg.polyline({{x, y - 4}, {x + sample, y - 4}}, entry.colour, entry.dashed);
      if (!entry.dashed) svg.dot(x + sample / 2, y - 4, entry.colour, "");
    } else {
      svg.box(x, y - kFontBox + 1, kFontBox, kFontBox, entry.colour, "");
    }
    svg.text(name, {.x = x + sample + kSampleGap, .y = y, .style = "ink"});
    x += width + kGap;
  }
  return y;
}

double draw_paragraph(Svg& svg, std::string_view text, double left, double right, double y) {
  std::string line;
  for (const std::string& word : words_of(text)) {
    if (!line.empty() && text_width(line) + text_width(' ' + word) > right - left) {
      svg.text(line, {.x = left, .y = y += kLineHeight});
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
  }
  if (!line.empty()) svg.text(line, {.x = left, .y = y += kLineHeight});
  return y;
}

double text_width(std::string_view text) {
  double width = 0;
  for (const std::string& one : characters(text)) {
    const bool wide = one.size() > 2 || one == "m" || one == "w" || one == "M" || one == "W";
    const bool narrow = one.size() == 1 &&
                        std::string_view("ijl.,:;'|I !()").find(one[0]) != std::string_view::npos;
    width += Svg::kFontSize * (wide ? 1.0 : narrow ? 0.4 : 0.65);
  }
  return width;
}

std::string cut_to_width(std::string_view text, double width) {
  int columns = columns_of(text);
  std::string result(text);
  while (columns > 0 && text_width(result) > width) result = cut_to(text, --columns);
  return result;
}

std::string_view palette(std::size_t number) {
  constexpr std::array<std::string_view, 8> kColours{"#3b74b0", "#c2571a", "#7d55b5", "#2f7f5f",
                                                     "#b5124f", "#0f7c8c", "#8d6a0a", "#5d6470"};
  return kColours[number % kColours.size()];
}

}  // namespace paceline::drawing
