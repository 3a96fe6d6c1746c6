#include "checkpoint/checkpoint_place.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <string_view>
#include <tuple>
#include <utility>

#include <paceline/error.h>

#include "base/mapped_file.h"
#include "base/parse.h"
#include "checkpoint/file_writer.h"

namespace paceline::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStepPrefix = "step-";

void check_exists(const fs::path& path) {
  if (!fs::exists(path)) throw CorruptFile(fmt::format("{}: is missing", path.string()));
}

}  // namespace

Place place_of(const fs::path& directory, std::int64_t step, const std::string& id) {
  const std::string name = fmt::format("{}{:012}", kStepPrefix, step);
  return {step, id, directory / (id.empty() ? name : fmt::format(".{}.{}", name, id))};
}

std::vector<Place> places_in(const fs::path& directory) {
  std::vector<Place> places;
  for (const auto& entry : fs::directory_iterator(directory)) {
    std::string name = entry.path().filename().string();
    std::string id;
    if (!entry.is_directory()) continue;
    if (name.starts_with('.')) {
      const std::size_t dot = name.find('.', 1);
      if (dot == std::string::npos) continue;
      id = name.substr(dot + 1);
      if (id.find_first_not_of("0123456789abcdef-old") != std::string::npos) continue;
      name = name.substr(1, dot - 1);
    }
    if (!name.starts_with(kStepPrefix)) continue;
    const auto step =
        base::parse_number<std::int64_t>(std::string_view(name).substr(kStepPrefix.size()), 0,
                                         std::numeric_limits<std::int64_t>::max());
    if (step) places.push_back({*step, id, entry.path()});
  }
  const auto order = [](const Place& place) {
    const int kind = !place.is_hidden() ? 1 : place.id.ends_with(kReplaced) ? 2 : 0;
    return std::tuple(-place.step, kind, place.id);
  };
  std::ranges::sort(places, std::less(), order);
  return places;
}

std::string part_name(int rank, const char* extension) {
  return fmt::format("rank-{}.{}", rank, extension);
}

Manifest read_manifest(const Place& place, int rank) {
  const fs::path path = place.path / part_name(rank, "json");
  const base::MappedFile file(path);
  return parse_manifest(file.content(), path.string());
}

bool is_complete(const Place& place) {
  try {
    const int parts = read_manifest(place, 0).world_size;
    for (int rank = 1; rank < parts; ++rank) {
      if (!fs::exists(place.path / part_name(rank, "json"))) return false;
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void check_parts(const Place& place, int rank, int size) {
  const auto read = [&](int part) {
    check_exists(place.path / part_name(part, "json"));
    return read_manifest(place, part);
  };
  const Manifest first = read(0);
  for (int part = rank; part < first.world_size; part += size) {
    const Manifest manifest = read(part);
    const auto has = [&](const std::string& name) {
      return std::ranges::find(manifest.files, name, &Manifest::File::name) != manifest.files.end();
    };
    if (!has(part_name(part, "pt")) || (part == 0 && !has(kSharedFile)) || manifest.rank != part ||
        manifest.step != place.step || manifest.id != first.id ||
        manifest.world_size != first.world_size) {
      throw CorruptFile(fmt::format("{}: is of another checkpoint",
                                    (place.path / part_name(part, "json")).string()));
    }
    for (const auto& [name, expected_size, crc32] : manifest.files) {
      check_exists(place.path / name);
      const base::MappedFile file(place.path / name);
      if (file.content().size() != expected_size) {
        throw CorruptFile(fmt::format("{}: has {} bytes in place of {}",
                                      (place.path / name).string(), file.content().size(),
                                      expected_size));
      }
      if (crc32_of(file.content()) != crc32) {
        throw CorruptFile(
            fmt::format("{}: does not have its checksum", (place.path / name).string()));
      }
    }
  }
}

}  // namespace paceline::checkpoint
