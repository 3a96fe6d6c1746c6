#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace paceline::base {

// Lets a debugger see the state of an object of this process, for as long as both live. Make it the
// object's last member.
class StateSource {
 public:
  // `describe` is called on any thread, at any time, also while other threads of the process hang.
  // So it must not wait. `kind`: which list it is in.
  StateSource(std::string kind, std::function<std::string()> describe);
  StateSource(const StateSource&) = delete;
  StateSource& operator=(const StateSource&) = delete;
  // Waits while the object is described.
  ~StateSource();

  // The descriptions of all objects of a kind, in the order in which they were made. Those that
  // throw are left out.
  static std::vector<std::string> describe_all(const std::string& kind);

 private:
  std::string kind_;
  std::function<std::string()> describe_;
  pid_t process_;  // a forked child leaves the list alone: its mutex may be held for ever there
};

}  // namespace paceline::base
