#pragma once

#include <paceline/distributed.h>

#include "base/environment.h"

namespace paceline::train {

// That of this process, which the launcher says before a world is formed.
inline int own_rank() {
  return is_initialized() ? get_rank() : base::environment().rank.value_or(0);
}

}  // namespace paceline::train
