#pragma once

#include <string>

namespace paceline::doctor {

struct BackendFacts {
  std::string name{};
  bool available = false;  // in this build
};

}  // namespace paceline::doctor
