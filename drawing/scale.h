#pragma once

#include <span>
#include <string>
#include <vector>

namespace paceline::drawing {

// A dimension of a chart: where between its ends a value is drawn.
class Scale {
 public:
  enum class Kind { linear, logarithmic };
  // Whether the ends are the first and last value, or round numbers around them, and 0 if all
  // values are positive and nearer to it than to each other.
  enum class Ends { exact, round };

  // Values that the scale cannot show (infinite, or not positive on a logarithmic scale) do not
  // count. `most_ticks`: at least 2.
  Scale(std::span<const double> values, Kind kind, Ends ends, int most_ticks);

  bool shows(double value) const;
  // From 0 to 1. The value must be one that the scale shows.
  double position(double value) const;
  // Round values from end to end.
  const std::vector<double>& ticks() const { return ticks_; }

 private:
  void set_linear(Ends ends, int most_ticks);
  void set_logarithmic(Ends ends, int most_ticks);

  Kind kind_;
  double low_ = 0;
  double high_ = 1;
  std::vector<double> ticks_;
};

std::string tick_text(double value);  // "0.05", "12000", "1e-05"

}  // namespace paceline::drawing
