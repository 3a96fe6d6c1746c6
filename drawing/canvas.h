#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace paceline::drawing {

// A page of a terminal: characters in rows and columns, both counted from 0, from the top left.
class Canvas {
 public:
  explicit Canvas(int columns) : columns_(columns) {}

  int columns() const { return columns_; }
  int rows() const { return static_cast<int>(rows_.size()); }
  // Rows are added as they are needed; what is outside of the columns is left out.
  void put(int row, int column, std::string_view text);
  // Below all rows: `items` one after the other with `gap` spaces between, in as many rows as they
  // need. An item that does not fit into a row is cut.
  void append(const std::vector<std::string>& items, int gap);

  // The rows, each ended by '\n' and without spaces before that.
  std::string str() const;

 private:
  int columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace paceline::drawing
