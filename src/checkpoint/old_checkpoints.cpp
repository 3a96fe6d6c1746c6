#include "checkpoint/old_checkpoints.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include <paceline/error.h>

namespace paceline::checkpoint {
namespace {

namespace fs = std::filesystem;

std::optional<double> metric_of(const Place& place) {
  try {
    return read_manifest(place, 0).metric;
  } catch (const Error&) {
    return std::nullopt;  // it is damaged
  }
}

}  // namespace

// What is newer than `step` is of a run that began anew, or damaged: it does not count.
std::vector<Place> old_places(const fs::path& directory, std::int64_t step,
                              const CheckpointOptions& options) {
  std::vector<Place> old;
  std::vector<Place> named;
  for (const Place& place : places_in(directory)) {
    if (place.is_hidden()) {
      old.push_back(place);
    } else if (place.step <= step) {
      named.push_back(place);
    }
  }
  if (options.keep_last == 0) return old;
  std::vector<std::pair<double, std::int64_t>> best;
  for (const Place& place : named) {
    const auto metric = metric_of(place);
    if (metric) best.emplace_back(options.lower_is_better ? *metric : -*metric, -place.step);
  }
  std::ranges::sort(best);
  best.resize(std::min(best.size(), static_cast<std::size_t>(options.keep_best)));
  const auto is_best = [&](const Place& place) {
    return std::ranges::count(best, -place.step, &std::pair<double, std::int64_t>::second) > 0;
  };
  const auto kept = std::min<std::ptrdiff_t>(options.keep_last, std::ssize(named));
  std::remove_copy_if(named.begin() + kept, named.end(), std::back_inserter(old), is_best);
  return old;
}

void remove(const Place& place) {
  if (place.is_hidden()) {
    fs::remove_all(place.path);
    return;
  }
  const Place hidden = place_of(place.path.parent_path(), place.step, kReplaced);
  fs::rename(place.path, hidden.path);
  try {
    // What is left after this, if the rest fails, is not complete.
    fs::remove(hidden.path / part_name(0, "json"));
    fs::remove_all(hidden.path);
  } catch (const fs::filesystem_error&) {
    if (is_complete(hidden)) fs::rename(hidden.path, place.path);
    throw;
  }
}

}  // namespace paceline::checkpoint
