#include "facts/variables.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include <paceline/error.h>

namespace paceline::doctor {
namespace {

// Those of Paceline and of torchrun, and those of the libraries that decide over threads, memory,
// devices and interfaces. Those of other launchers are found by reading them.
constexpr std::string_view kFamilies[] = {
    "PACELINE_", "TORCHELASTIC_", "PET_",  "OMP_",   "KMP_",  "GOMP_",
    "MKL_",      "MALLOC_",       "ROLE_", "GROUP_", "GLOO_", "LOCAL_WORLD_SIZE"};
constexpr std::string_view kNames[] = {"RANK",
                                       "WORLD_SIZE",
                                       "LOCAL_RANK",
                                       "MASTER_ADDR",
                                       "MASTER_PORT",
                                       "GLIBC_TUNABLES",
                                       "ONEDNN_MAX_CPU_ISA",
                                       "ATEN_CPU_CAPABILITY",
                                       "CUDA_VISIBLE_DEVICES"};

bool counts_by_name(std::string_view name) {
  return std::ranges::count(kNames, name) > 0 ||
         std::ranges::any_of(kFamilies, [&](auto family) { return name.starts_with(family); });
}

bool is_open(int fd) {
  return ::fcntl(fd, F_GETFD) >= 0;
}

std::vector<std::string> find_closed(const base::Environment& environment) {
  std::vector<std::string> closed;
  if (environment.store_fd && !is_open(*environment.store_fd)) {
    closed.push_back(fmt::format("PACELINE_STORE_FD={}", *environment.store_fd));
  }
  for (const int fd : environment.bootstrap_sockets) {
    if (!is_open(fd)) closed.push_back(fmt::format("PACELINE_BOOTSTRAP_SOCKETS={}", fd));
  }
  return closed;
}

}  // namespace

VariableFacts read_variables(const Variables& all,
                             const std::function<void(const base::Environment&)>& check) {
  VariableFacts facts;
  for (const auto& one : all) {
    if (counts_by_name(one.first) && !one.second.empty()) facts.set.insert(one);
  }
  const base::Getenv read = [&](const char* name) -> const char* {
    const auto found = all.find(name);
    if (found == all.end()) return nullptr;
    if (!found->second.empty()) facts.set.insert(*found);
    return found->second.c_str();
  };
  try {
    facts.environment = base::parse_environment(read);
    check(*facts.environment);
  } catch (const UsageError& error) {
    facts.error = error.what();
  }
  // Reports of this command end in logs.
  if (const auto secret = facts.set.find("PACELINE_SECRET"); secret != facts.set.end()) {
    secret->second = "(set)";
  }
  if (facts.environment) facts.closed = find_closed(*facts.environment);
  return facts;
}

Variables all_variables() {
  Variables all;
  for (const char* const* entry = ::environ; *entry != nullptr; ++entry) {
    const char* const equals = std::strchr(*entry, '=');
    if (equals != nullptr) all.emplace(std::string(*entry, equals), equals + 1);
  }
  return all;
}

}  // namespace paceline::doctor
