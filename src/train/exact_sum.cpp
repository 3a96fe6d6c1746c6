#include "train/exact_sum.h"

#include <cmath>
#include <cstddef>
#include <numeric>
#include <utility>

namespace paceline::train {

void add_exactly(std::vector<double>& partials, double value) {
  std::size_t kept = 0;
  for (double partial : partials) {
    if (std::abs(value) < std::abs(partial)) std::swap(value, partial);
    const double sum = value + partial;
    const double lost = partial - (sum - value);
    if (lost != 0 && std::isfinite(sum)) partials[kept++] = lost;
    value = sum;
  }
  if (!std::isfinite(value)) kept = 0;
  partials.resize(kept);
  partials.push_back(value);
}

double round_sum(const std::vector<double>& partials) {
  double sum = 0;
  double lost = 0;
  auto next = partials.rbegin();
  while (next != partials.rend() && lost == 0) {
    const double before = sum;
    sum += *next;
    lost = *next - (sum - before);
    ++next;
  }
  // Half of the last place was rounded to even; what is smaller may say that it had to go further.
  if (next != partials.rend() && (lost < 0) == (*next < 0)) {
    const double further = sum + 2 * lost;
    if (2 * lost == further - sum) sum = further;
  }
  return sum;
}

}  // namespace paceline::train
