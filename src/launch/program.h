#pragma once

#include <string>

#include <paceline/error.h>

namespace paceline::launch {

// The program cannot be started. exit_code() is a shell's: 127 if there is no such program, 126 if
// it cannot be executed.
class ProgramError : public UsageError {
 public:
  ProgramError(const std::string& message, int exit_code)
      : UsageError(message), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

// The file that a shell would execute for `name`: itself if it contains a slash, else the first
// executable of that name on `path`, or on PATH. Throws ProgramError.
std::string find_program(const std::string& name, const std::string& path);
std::string find_program(const std::string& name);

}  // namespace paceline::launch
