#include "checkpoint/checkpoint_place.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <string_view>
#include <tuple>
#include <utility>

#include <paceline/error.h>

#include "base/input_file.h"
#include "base/parse.h"
#include "checkpoint/file_writer.h"

namespace paceline::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStepPrefix = "step-";

// Reads it, and does not map it: if the disk fails, a read is an error, and an access to mapped
// memory is SIGBUS.
std::uint32_t checksum_of(base::InputFile& file) {
  constexpr std::size_t kChunk = std::size_t{1} << 20;
  std::uint32_t crc32 = 0;
  std::vector<std::uint8_t> chunk;
  do {
    chunk.clear();
    file.read(chunk, kChunk);
    crc32 = crc32_of({reinterpret_cast<const char*>(chunk.data()), chunk.size()}, crc32);
  } while (!chunk.empty());
  return crc32;
}

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
  const std::vector<std::uint8_t> text = base::read_file(path);
  return parse_manifest({reinterpret_cast<const char*>(text.data()), text.size()}, path.string());
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

void check_visible(const Place& place, int size) {
  for (int rank = 0; rank < size; ++rank) {
    const fs::path manifest = place.path / part_name(rank, "json");
    if (fs::exists(manifest)) continue;
    throw Error(
        fmt::format("{} is not there, which rank {} has written: all ranks must see the "
                    "directory, which on several machines is in a shared file system",
                    manifest.string(), rank));
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
      base::InputFile file(place.path / name);
      if (file.size() != expected_size) {
        throw CorruptFile(fmt::format("{}: has {} bytes in place of {}",
                                      (place.path / name).string(), file.size(), expected_size));
      }
      if (checksum_of(file) != crc32) {
        throw CorruptFile(
            fmt::format("{}: does not have its checksum", (place.path / name).string()));
      }
    }
  }
}

}  // namespace paceline::checkpoint
