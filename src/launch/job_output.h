#pragma once

#include <poll.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "launch/job.h"
#include "launch/tail_buffer.h"

namespace paceline::launch {

// The output of a job's ranks on its way to the console and to files.
class JobOutput {
 public:
  // Neither is copied. `directory`: of the ranks.
  JobOutput(const JobSpec& spec, const std::filesystem::path& directory)
      : spec_(spec), directory_(directory), last_lines_(static_cast<std::size_t>(spec.processes)) {}

  // What a worker writes to. To be called once for each stream. Throws Error.
  base::UniqueFd open(int rank, Stream stream);
  Destination destination(int rank, Stream stream) const;

  // Adds what to wait for, and returns for how many milliseconds at most, as for poll().
  int prepare_poll(std::vector<pollfd>& fds) const;
  // Passes on some of what is there now; `fds` are the ones added, after the wait.
  void read_ready(std::span<const pollfd> fds);
  // After the end of the job: all that the pipes hold, which is little.
  void read_pipes();
  // Some of what the files hold; false if nothing is left.
  bool read_files();

  // Another process takes the rank's place: ends the line that the one before has not ended, and
  // forgets its last lines.
  void begin_process(int rank);

  // Of the rank's process. Call after the end of the job.
  std::vector<std::string> last_lines(int rank) const;

 private:
  // A pipe, or a file that the rank appends to.
  struct Source {
    int rank;
    Stream stream;
    base::UniqueFd fd;
    bool is_file;
    bool in_line = false;
  };

  std::filesystem::path log_file(int rank, Stream stream) const;
  base::UniqueFd open_pipe(int rank, Stream stream);
  bool read_some(Source& source);

  const JobSpec& spec_;
  const std::filesystem::path& directory_;
  std::vector<Source> sources_;
  std::vector<TailBuffer> last_lines_;
  std::map<std::filesystem::path, std::uintmax_t> begins_;  // of the process, in its log files
  bool file_has_more_ = false;
};

}  // namespace paceline::launch
