#include <algorithm>
#include <array>
#include <cmath>

#include "drawing/canvas.h"
#include "drawing/span_chart.h"
#include "drawing/span_chart_scale.h"
#include "drawing/text.h"

namespace paceline::drawing {
namespace {

constexpr int kLeastTextColumns = 40;
constexpr int kColumnsOfTick = 8;
// What fills the spans of each kind.
constexpr std::array<char, 8> kFills{'=', '#', '-', '+', '%', '~', '*', ':'};

char text_fill_of(std::size_t kind) {
  return kFills[kind % kFills.size()];
}

// A bar where it begins, its label if it fits, and then its fill: "|7===".
std::string text_of(const Span& span, int columns) {
  std::string text = columns >= 3 ? "|" : "";
  const int label = columns_of(span.label);
  const int free = columns - static_cast<int>(text.size());
  const bool fits = label < free || (columns == 1 && label == 1);
  if (fits) text += cut_to(span.label, label);
  const int filled = free - (fits ? label : 0);
  return text + std::string(static_cast<std::size_t>(filled), text_fill_of(span.kind));
}

void put_span(Canvas& canvas, const Scale& scale, const Span& span, int left) {
  const auto column = [&](double value) {
    return left + static_cast<int>(std::lround(scale.position(value) * (canvas.columns() - left)));
  };
  const int begin = std::min(column(span.begin), canvas.columns() - 1);
  canvas.put(canvas.rows() - 1, begin, text_of(span, std::max(column(span.end) - begin, 1)));
}

void put_ticks(Canvas& canvas, const Scale& scale, int left) {
  const int row = canvas.rows();
  int free_from = left;
  for (const double tick : scale.ticks()) {
    const std::string text = tick_text(tick);
    const auto at = static_cast<int>(std::lround(scale.position(tick) * (canvas.columns() - left)));
    const int begin = std::min(left + at, canvas.columns() - columns_of(text));
    if (begin < free_from) continue;
    canvas.put(row, begin, text);
    free_from = begin + columns_of(text) + 1;
  }
}

}  // namespace

std::string SpanChart::to_terminal(int columns) const {
  Canvas canvas(std::max(columns, kLeastTextColumns));
  canvas.append(words_of(title), 1);
  int left = 0;
  for (const SpanRow& row : rows) left = std::max(left, columns_of(row.name));
  left = std::min(left, canvas.columns() / 3) + 1;
  const Scale scale = scale_of(*this, std::max((canvas.columns() - left) / kColumnsOfTick, 2));
  for (const SpanRow& row : rows) {
    canvas.put(canvas.rows(), 0, cut_to(row.name, left - 1));
    for (const Span& span : row.spans) {
      if (is_shown(span)) put_span(canvas, scale, span, left);
    }
  }
  put_ticks(canvas, scale, left);
  canvas.append({axis_label}, 0);
  std::vector<std::string> kinds;
  for (const std::string& name : legend) {
    kinds.push_back(std::string(3, text_fill_of(kinds.size())) + ' ' + name);
  }
  canvas.append(kinds, 3);
  canvas.append(words_of(note), 1);
  return canvas.str();
}

}  // namespace paceline::drawing
