#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace paceline::launch {

// Among an error's blamed ranks: one of the others, the worker does not know which.
inline constexpr int kUnknownRank = -1;

// The content of the file that TORCHELASTIC_ERROR_FILE names, which a failed worker leaves for its
// launcher.
struct ErrorFile {
  std::string message;
  // The ranks that the error is about, where it is about other ranks: a PeerLost's, say. The
  // launcher looks among them for the one that failed first.
  std::vector<int> blamed_ranks{};
  bool is_timeout = false;  // paceline::Timeout: the blamed ranks may run for ever
};

// Where the launcher keeps the error file of a process after it has replaced that process:
// DIRECTORY/error_2.json for the job's second replacement. `path` is the new process's file.
std::filesystem::path replaced_error_file(const std::filesystem::path& path, int replacement);

// In memory, in place of that file, for a process that inherits it: nothing is left of it however
// the processes end. Throws Error.
base::UniqueFd make_error_memory();
// Its name in each process that has it under the number `fd`.
std::filesystem::path error_memory_path(int fd);
// Whether this process still has it there.
bool is_error_memory(int fd);

// Writes torchrun's format, {"message": {"message": ..., "extraInfo": {"timestamp": ...}}}, with
// the rest, and the rank's node, in extraInfo. The file appears whole or not at all, unless it is
// in memory. Throws Error.
void write_error_file(const std::filesystem::path& path, const ErrorFile& error,
                      std::optional<int> node = {});

// Reads that format, from torchrun's `record` too, and the older {"message": "text"}. Empty for
// a file that is missing, larger than 1 MiB or malformed: it only adds to a report. `memory`: a
// descriptor of make_error_memory() that is read if the file is missing; -1: none.
std::optional<ErrorFile> read_error_file(const std::filesystem::path& path, int memory = -1);

}  // namespace paceline::launch
