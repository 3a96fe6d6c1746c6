#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace paceline::launch {

// What a failed worker leaves for its launcher, in the file that TORCHELASTIC_ERROR_FILE names.
struct ErrorFile {
  std::string message;
  // The ranks that the error is about, where it is about other ranks: a PeerLost's, say. The
  // launcher looks there for the one that failed first.
  std::vector<int> blamed_ranks;
};

// Writes torchrun's format, {"message": {"message": ..., "extraInfo": {"timestamp": ...}}}, with
// the blamed ranks in extraInfo. The file appears whole or not at all. Throws Error.
void write_error_file(const std::filesystem::path& path, std::string_view message,
                      std::span<const int> blamed_ranks = {});

// Reads that format, from torchrun's `record` too, and the older {"message": "text"}. Nothing for a
// file that is missing, larger than 1 MiB or not of this form: it only decorates a report.
std::optional<ErrorFile> read_error_file(const std::filesystem::path& path);

}  // namespace paceline::launch
