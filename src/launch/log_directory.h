#pragma once

#include <filesystem>
#include <string>

#include "base/unique_fd.h"

namespace paceline::launch {

// With the missing ones above it. Throws Error.
void make_directories(const std::filesystem::path& path);

// Makes a new directory for the files of a run, named `start` and random characters, and returns
// its absolute path. Throws Error if it cannot be made, or if nothing can be written in
// it.
std::filesystem::path make_run_directory(const std::filesystem::path& start);

// Throws Error if nothing can be written in a directory: its disk is full, say.
void check_writable(const std::filesystem::path& directory);

// The directory of a job's ranks: each has one of its own in it, named by its local rank, with
// error.json, and with stdout.log and stderr.log for streams that go to files.
class JobDirectory {
 public:
  // Makes it at `kept`, or if that is empty, a temporary one, which goes with this object. Throws
  // Error, but for a temporary one: a job can do without.
  JobDirectory(const std::filesystem::path& kept, int ranks);
  JobDirectory(const JobDirectory&) = delete;
  JobDirectory& operator=(const JobDirectory&) = delete;
  ~JobDirectory();

  // Empty if a temporary one cannot be made, as on a full disk; problem() says why.
  const std::filesystem::path& path() const { return path_; }
  const std::string& problem() const { return problem_; }
  bool is_temporary() const { return is_temporary_; }

 private:
  void remove();

  std::filesystem::path path_;
  bool is_temporary_;
  std::string problem_;
};

// One that a worker writes: it appends, so that processes which share it do not overwrite each
// other's output. One that opens it anew may truncate it. Throws Error if there is one already.
base::UniqueFd make_log_file(const std::filesystem::path& path);

// The last `size` bytes of a file at most, and not those before `begin`; empty if it cannot be
// read.
std::string read_end(const std::filesystem::path& path, std::size_t size, std::uintmax_t begin = 0);

}  // namespace paceline::launch
