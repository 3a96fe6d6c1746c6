#pragma once

#include <gmock/gmock.h>

#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/pipe.h"
#include "support/child_process.h"
#include "support/temporary_directory.h"

namespace paceline::test {

// The real `paceline` with small shell programs as workers.
class Launcher : public ::testing::Test {
 protected:
  using Environment = std::vector<std::pair<std::string, std::string>>;

  void TearDown() override;

  // Starts `script` as the program of `ranks` workers; `flags` go before it.
  ChildProcess run(int ranks, const std::string& script, std::vector<std::string> flags = {},
                   Environment environment = {}, base::Pipe out = base::make_pipe(),
                   bool err_too = false);
  static ChildProcess paceline(std::vector<std::string> arguments);

  // The launcher's directory goes last, a moment after a launcher that was killed.
  std::vector<std::string> left_behind() const;

  TemporaryDirectory temporary_;
};

// The launcher's child, which is the parent of the supervisor that a worker has written.
pid_t guard_of(const ChildProcess& job);

// A part of a worker's script: writes guard=PID to standard error.
inline constexpr const char* kNameGuard =
    "awk '/PPid/ {print \"guard=\" $2}' /proc/$PPID/status >&2; ";

// How many lines `fd` gives until it ends, or until these are `enough`. Fails if it waits for a
// minute.
std::ptrdiff_t read_lines(int fd,
                          std::ptrdiff_t enough = std::numeric_limits<std::ptrdiff_t>::max());

}  // namespace paceline::test
