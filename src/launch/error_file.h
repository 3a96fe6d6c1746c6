#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace paceline::launch {

// The content of the file that TORCHELASTIC_ERROR_FILE names, which a failed worker leaves for its
// launcher.
struct ErrorFile {
  std::string message;
  // The ranks that the error is about, where it is about other ranks: a PeerLost's, say. The
  // launcher looks among them for the one that failed first.
  std::vector<int> blamed_ranks;
};

// Writes torchrun's format, {"message": {"message": ..., "extraInfo": {"timestamp": ...}}}, with
// the blamed ranks and the rank's node in extraInfo. The file appears whole or not at all. Throws
// Error.
void write_error_file(const std::filesystem::path& path, std::string_view message,
                      std::span<const int> blamed_ranks = {}, std::optional<int> node = {});

// Reads that format, from torchrun's `record` too, and the older {"message": "text"}. Empty for
// a file that is missing, larger than 1 MiB or malformed: it only adds to a report.
std::optional<ErrorFile> read_error_file(const std::filesystem::path& path);

}  // namespace paceline::launch
