#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "base/pipe.h"
#include "support/eventually.h"

namespace paceline::test {

// The state header of /proc/PID/stat; 0 if there is no such process.
char process_state(pid_t pid);

// Not there, nor as a zombie.
inline bool is_gone(pid_t pid) {
  return process_state(pid) == 0;
}

// Not there, or a zombie.
inline bool has_ended(pid_t pid) {
  return is_gone(pid) || process_state(pid) == 'Z';
}

// The two ends of a terminal: what goes into the write end comes out of the read end. None, with
// the reason in errno, where there are no terminals: a bare container may lack devpts.
std::optional<base::Pipe> open_terminal(unsigned short columns);

// A program under test in its own session, with what it has written so far. Destroying it kills it.
class ChildProcess {
 public:
  // `environment` is set on top of this process's. Standard output is `out`, whose read end may be
  // missing; standard error too if `err_too`.
  explicit ChildProcess(std::vector<std::string> command,
                        const std::vector<std::pair<std::string, std::string>>& environment = {},
                        base::Pipe out = base::make_pipe(), bool err_too = false);
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  const std::string& out() const { return out_; }
  const std::string& err() const { return err_; }

  void signal(int number) const;
  // Reads until standard output or error holds `text`. Throws std::runtime_error, with all output,
  // if the program ends before or kPatience is over.
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

}  // namespace paceline::test
