#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"

namespace paceline::checkpoint {

// A checkpoint's directory. Until the checkpoint is complete it is hidden, and has the save's id.
struct Place {
  std::int64_t step;
  std::string id;
  std::filesystem::path path;

  bool is_hidden() const { return !id.empty(); }
};

Place place_of(const std::filesystem::path& directory, std::int64_t step,
               const std::string& id = "");
// Those in a directory, the newest first: of one step first hidden ones, which were saved last, and
// at the end one that was replaced. Throws std::filesystem::filesystem_error.
std::vector<Place> places_in(const std::filesystem::path& directory);

// The file of one rank: "rank-3.json".
std::string part_name(int rank, const char* extension);
// Throws Error, or CorruptFile.
Manifest read_manifest(const Place& place, int rank);
// What is added to the id of one that is replaced or removed.
constexpr const char* kReplaced = "-old";
constexpr const char* kSharedFile = "state.pt";  // rank 0's

// Whether all ranks have written their parts, whatever these contain.
bool is_complete(const Place& place);

// Throws Error unless this rank sees the manifests that all `size` ranks have written.
void check_visible(const Place& place, int size);

// Throws CorruptFile unless the files of the ranks `rank`, `rank` + `size`, ... of the checkpoint
// are there and undamaged, and another Error if one cannot be read.
void check_parts(const Place& place, int rank, int size);

}  // namespace paceline::checkpoint
