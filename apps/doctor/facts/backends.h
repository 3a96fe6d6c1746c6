#pragma once

#include <string>

namespace paceline::doctor {

struct BackendFacts {
  std::string name{};
  bool available = false;  // in this build and, for nccl, on this machine
  std::string why_not{};   // if that is known
};

}  // namespace paceline::doctor
