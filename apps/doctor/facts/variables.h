#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/environment.h"
#include "facts/network.h"

namespace paceline::doctor {

using Variables = std::map<std::string, std::string>;

struct VariableFacts {
  Variables set{};                                 // those that have an effect here
  std::optional<base::Environment> environment{};  // unset if they are invalid
  std::string error{};                    // why they are, or why init_process_group refuses them
  std::vector<std::string> closed{};      // "PACELINE_STORE_FD=5": no such descriptor is open
  std::optional<Resolution> master{};     // of rank 0's host
  std::vector<std::string> interfaces{};  // that are up
  int cores = 1;                          // that this process may use
};

// `all`: this process's variables. `check` throws UsageError if init_process_group would.
VariableFacts read_variables(const Variables& all,
                             const std::function<void(const base::Environment&)>& check);

Variables all_variables();

}  // namespace paceline::doctor
