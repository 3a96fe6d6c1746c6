#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace paceline::support {

// Generous: it only bounds how long a broken test hangs.
constexpr std::chrono::seconds kPatience{20};

// Waits until `condition` holds, asking often; false if it does not within kPatience.
bool eventually(const std::function<bool()>& condition);

// The state letter of /proc/PID/stat; 0 if there is no such process.
char process_state(pid_t pid);

// Not there, nor as a zombie.
inline bool is_gone(pid_t pid) {
  return process_state(pid) == 0;
}

// Not there, or a zombie.
inline bool has_ended(pid_t pid) {
  return is_gone(pid) || process_state(pid) == 'Z';
}

// A program under test in its own session, with what it has written so far. Destroying it kills it.
class ChildProcess {
 public:
  // `environment` is set on top of this process's.
  explicit ChildProcess(std::vector<std::string> command,
                        const std::vector<std::pair<std::string, std::string>>& environment = {});
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  const std::string& out() const { return out_; }
  const std::string& err() const { return err_; }

  void signal(int number) const;
  // Reads until standard output holds `text`. Throws std::runtime_error, with all output, if the
  // program ends before or kPatience is over.
  void wait_for(const std::string& text);
  // Reads to the end and returns the exit code, 128 + signal for a death by a signal. Throws as
  // above if kPatience is over.
  int wait();

 private:
  bool read_some();

  pid_t pid_ = -1;
  base::UniqueFd out_fd_;
  base::UniqueFd err_fd_;
  std::string out_;
  std::string err_;
};

}  // namespace paceline::support
