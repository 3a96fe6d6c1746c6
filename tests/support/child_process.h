#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "base/pipe.h"
#include "support/eventually.h"

namespace paceline::test {

// The state letter of /proc/PID/stat; 0 if there is no such process.
char process_state(pid_t pid);

// There is no such process, not even a zombie.
inline bool is_gone(pid_t pid) {
  return process_state(pid) == 0;
}

// There is no such process, or only a zombie.
inline bool has_ended(pid_t pid) {
  return is_gone(pid) || process_state(pid) == 'Z';
}

// The two ends of a terminal: the read end yields what is written to the write end. nullopt, with
// the reason in errno, if there are no terminals: a bare container may lack devpts.
std::optional<base::Pipe> open_terminal(unsigned short columns);

// A program under test in its own session, and its output so far. The destructor kills it.
class ChildProcess {
 public:
  // `environment` is added to this process's. Standard output is `out`, whose read end may be
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
  // Reads until standard output or error contains `text`. Throws std::runtime_error, with all
  // output, if the program ends first or after kTestTimeout.
  void wait_for(const std::string& text);
  // Reads to the end and returns the exit code, 128 + N if signal N ended the program. Throws as
  // above after kTestTimeout.
  int wait();

 private:
  bool read_some();

  pid_t pid_ = -1;
  base::UniqueFd out_fd_;
  base::UniqueFd err_fd_;
  std::string out_;
  std::string err_;
};

// All numbers, from 0, that follow `label` and "=" in `text`.
std::vector<int> numbers_after(const std::string& text, const std::string& label);
// Those from 1.
std::vector<pid_t> pids_after(const std::string& text, const std::string& label);
// The only one of these. Throws std::runtime_error otherwise.
pid_t pid_after(const std::string& text, const std::string& label);

}  // namespace paceline::test
