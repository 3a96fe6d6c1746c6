#include "base/start_thread.h"

#include <string>

#include "base/errno_error.h"

namespace paceline::base {

void throw_no_thread(const std::system_error& error) {
  throw Error(
      errno_error("cannot start a thread", error.code().value()).what() +
      std::string("; raise the limit on processes (ulimit -u, or pids.max of a container)"));
}

}  // namespace paceline::base
