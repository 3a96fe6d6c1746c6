#include "checkpoint/manifest.h"

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>

#include <paceline/error.h>

namespace paceline::checkpoint {
namespace {

using nlohmann::json;

constexpr int kVersion = 1;

class ManifestReader {
 public:
  explicit ManifestReader(const std::string& path) : path_(path) {}

  Manifest read(std::string_view text) const {
    const json all = json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (integer(all, "version", 0) != kVersion) {
      throw CorruptFile(fmt::format("{}: is of version {}, and this Paceline reads version {}",
                                    path_, all.at("version").dump(), kVersion));
    }
    Manifest manifest;
    manifest.id = text_of(all, "id");
    manifest.step = integer(all, "step", 0);
    manifest.world_size = static_cast<int>(integer(all, "world_size", 1, kMostRanks));
    manifest.rank = static_cast<int>(integer(all, "rank", 0, manifest.world_size - 1));
    if (const json& metric = member(all, "metric"); !metric.is_null()) {
      if (!metric.is_number()) fail("'metric' is no number");
      manifest.metric = metric.get<double>();
    }
    if (all.contains("threads")) {
      manifest.threads = static_cast<int>(integer(all, "threads", 0, kMostThreads));
      manifest.cpu_capability = text_of(all, "cpu_capability");
    }
    const json& files = member(all, "files");
    if (!files.is_array()) fail("'files' is no list");
    for (const json& file : files) {
      manifest.files.push_back({text_of(file, "name"),
                                static_cast<std::uint64_t>(integer(file, "size", 0)),
                                static_cast<std::uint32_t>(integer(
                                    file, "crc32", 0, std::numeric_limits<std::uint32_t>::max()))});
      const std::string& name = manifest.files.back().name;
      if (name.empty() || name.starts_with('.') || name.find('/') != std::string::npos) {
        fail(fmt::format("'{}' is no name of a file in this directory", name));
      }
    }
    return manifest;
  }

 private:
  static constexpr std::int64_t kMostRanks = 1'000'000;
  static constexpr std::int64_t kMostThreads = 1'000'000;

  const json& member(const json& object, const char* name) const {
    const auto found = object.is_object() ? object.find(name) : object.end();
    if (found == object.end()) fail(fmt::format("has no '{}'", name));
    return *found;
  }
  std::int64_t integer(const json& object, const char* name, std::int64_t least,
                       std::int64_t most = std::numeric_limits<std::int64_t>::max()) const {
    const json& value = member(object, name);
    if (!value.is_number_integer() ||
        (value.is_number_unsigned() &&
         value.get<std::uint64_t>() > static_cast<std::uint64_t>(most)) ||
        value.get<std::int64_t>() < least || value.get<std::int64_t>() > most) {
      fail(fmt::format("'{}' is {}, and not an integer from {} to {}", name, value.dump(), least,
                       most));
    }
    return value.get<std::int64_t>();
  }
  std::string text_of(const json& object, const char* name) const {
    const json& value = member(object, name);
    if (!value.is_string()) fail(fmt::format("'{}' is no text", name));
    return value.get<std::string>();
  }
  [[noreturn]] void fail(const std::string& why) const {
    throw CorruptFile(fmt::format("{}: {}", path_, why));
  }

  const std::string& path_;
};

}  // namespace

std::string write_manifest(const Manifest& manifest) {
  json files = json::array();
  for (const auto& [name, size, crc32] : manifest.files) {
    files.push_back({{"name", name}, {"size", size}, {"crc32", crc32}});
  }
  const json all{{"version", kVersion},
                 {"id", manifest.id},
                 {"step", manifest.step},
                 {"world_size", manifest.world_size},
                 {"rank", manifest.rank},
                 {"metric", manifest.metric ? json(*manifest.metric) : json()},
                 {"threads", manifest.threads},
                 {"cpu_capability", manifest.cpu_capability},
                 {"files", files}};
  return all.dump(2) + '\n';
}

Manifest parse_manifest(std::string_view text, const std::string& path) {
  return ManifestReader(path).read(text);
}

}  // namespace paceline::checkpoint
