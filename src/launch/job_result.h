#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/error_file.h"

namespace paceline::launch {

struct RankResult {
  int status = 0;        // as wait() gives it
  int order = 0;         // 0 for the rank that ended first, and so on
  bool stopped = false;  // it ended after the job was asked to stop
  std::optional<ErrorFile> error;
  std::vector<std::string> last_lines;
};

struct JobResult {
  std::vector<RankResult> ranks;
  int signal = 0;  // the signal that was passed on and ended the job, if one did

  // The rank whose failure ended the job; empty if no rank failed before the job was asked to stop.
  // A rank that loses a peer may end before the peer does. So if the error file of the first failed
  // rank blames a rank that failed by itself too, this is the blamed rank. A blamed rank that ended
  // with code 0 failed the others by ending early.
  std::optional<int> first_failed() const;

  // 0, or the code of the rank that failed first, or 128 + signal. If that rank ended with code 0,
  // the code of the first rank that did not.
  int exit_code() const;
};

// The code for a status as wait() gives it: 128 + signal for a death by a signal.
int exit_code_of(int status);

}  // namespace paceline::launch
