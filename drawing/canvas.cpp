#include "drawing/canvas.h"

#include <algorithm>

#include "drawing/text.h"

namespace paceline::drawing {

void Canvas::put(int row, int column, std::string_view text) {
  if (row < 0) return;
  const auto needed = static_cast<std::size_t>(row) + 1;
  if (rows_.size() < needed) {
    rows_.resize(needed, std::vector<std::string>(static_cast<std::size_t>(columns_), " "));
  }
  for (const std::string& one : characters(text)) {
    if (column >= 0 && column < columns_) {
      rows_[static_cast<std::size_t>(row)][static_cast<std::size_t>(column)] = one;
    }
    ++column;
  }
}

void Canvas::append(const std::vector<std::string>& items, int gap) {
  int row = rows() - 1;
  int column = columns_;
  for (const std::string& item : items) {
    const int width = columns_of(item);
    if (column + gap + width > columns_) {
      ++row;
      column = -gap;
    }
    put(row, column + gap, cut_to(item, columns_));
    column += gap + std::min(width, columns_);
  }
}

std::string Canvas::str() const {
  std::string result;
  for (const auto& row : rows_) {
    std::string line;
    for (const std::string& one : row) line += one;
    line.erase(line.find_last_not_of(' ') + 1);
    result += line + '\n';
  }
  return result;
}

}  // namespace paceline::drawing
