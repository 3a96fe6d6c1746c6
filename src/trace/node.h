#pragma once

namespace paceline::trace {

// Where a rank runs.
struct Node {
  int number = 0;
  int ranks = 0;  // 0: not known
};

}  // namespace paceline::trace
