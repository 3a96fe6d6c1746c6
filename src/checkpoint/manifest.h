#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace paceline::checkpoint {

// What one rank has written to a checkpoint. A checkpoint is complete if there is one of each of
// its `world_size` ranks, all with the same `id`, and the files are as they say.
struct Manifest {
  struct File {
    std::string name;  // in the checkpoint's directory
    std::uint64_t size = 0;
    std::uint32_t crc32 = 0;
  };

  std::string id;  // of the call of save that wrote it
  std::int64_t step = 0;
  int world_size = 1;
  int rank = 0;
  std::optional<double> metric{};
  // How the rank computed; 0 and empty if it is not known.
  int threads = 0;
  std::string cpu_capability{};
  std::vector<File> files{};
};

std::string write_manifest(const Manifest& manifest);
// Throws CorruptFile, which names `path`.
Manifest parse_manifest(std::string_view text, const std::string& path);

}  // namespace paceline::checkpoint
