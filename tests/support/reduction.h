#pragma once

#include <algorithm>

#include "node/types.h"

namespace paceline::test {

// The reduction of value(0) to value(sources - 1) in double: what results are compared with.
template <typename Value>
double reduced(node::ReduceOp op, int sources, Value&& value) {
  double result = value(0);
  for (int source = 1; source < sources; ++source) {
    const double next = value(source);
    if (op == node::ReduceOp::min) {
      result = std::min(result, next);
    } else if (op == node::ReduceOp::max) {
      result = std::max(result, next);
    } else {
      result += next;
    }
  }
  return op == node::ReduceOp::avg ? result / sources : result;
}

}  // namespace paceline::test
