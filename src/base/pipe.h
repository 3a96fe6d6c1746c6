#pragma once

#include "base/unique_fd.h"

namespace paceline::base {

struct Pipe {
  UniqueFd read_end;
  UniqueFd write_end;
};

// Both ends are closed on exec. Throws Error.
Pipe make_pipe();

}  // namespace paceline::base
