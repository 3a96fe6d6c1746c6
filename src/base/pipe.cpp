#include "base/pipe.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>

#include "base/errno_error.h"

namespace paceline::base {

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw errno_error("cannot make a pipe");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

}  // namespace paceline::base
