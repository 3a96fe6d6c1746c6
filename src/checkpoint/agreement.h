#pragma once

#include <string>

#include <paceline/distributed.h>

#include "distributed/translate.h"

namespace paceline::checkpoint {

// What the function throws, as text; empty if it returns.
template <typename Function>
std::string attempt(Function function) {
  try {
    function();
    return "";
  } catch (...) {
    const std::string text = distributed::current_exception_text();
    return text.empty() ? "an exception" : text;
  }
}

// "rank 2: TEXT" of the lowest rank whose own text is not empty; empty if there is none.
// Collective.
std::string first_problem(const std::string& own, const ProcessGroup& group);

}  // namespace paceline::checkpoint
