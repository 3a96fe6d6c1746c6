#include "launch/worker_environment.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string_view>
#include <utility>

namespace paceline::launch {
namespace {

using Variables = std::map<std::string, std::string>;

Variables parse_variables(const char* const* inherited) {
  Variables variables;
  for (; *inherited != nullptr; ++inherited) {
    const std::string_view entry = *inherited;
    const std::size_t equals = entry.find('=');
    if (equals == std::string_view::npos) continue;
    variables.emplace(entry.substr(0, equals), entry.substr(equals + 1));
  }
  return variables;
}

}  // namespace

std::filesystem::path error_file_path(const JobIdentity& job, int rank) {
  return job.directory / fmt::format("rank{}.json", rank);
}

std::vector<std::string> worker_environment(const JobSpec& spec, const JobIdentity& job, int rank,
                                            const std::vector<int>& bootstrap_sockets, int store_fd,
                                            const char* const* inherited) {
  Variables variables = parse_variables(inherited);
  // An outer torchrun's store, an outer job's sockets and screen are not this job's.
  for (const char* name :
       {"TORCHELASTIC_USE_AGENT_STORE", "PACELINE_BOOTSTRAP_SOCKETS", "PACELINE_TERMINAL"}) {
    variables.erase(name);
  }
  for (const auto& [name, value] : spec.environment) variables[name] = value;

  const auto set = [&](const char* name, std::string value) {
    variables.insert_or_assign(name, std::move(value));
  };
  for (const char* name : {"RANK", "LOCAL_RANK", "ROLE_RANK"}) set(name, std::to_string(rank));
  for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"}) {
    set(name, std::to_string(spec.processes));
  }
  set("GROUP_RANK", "0");
  set("GROUP_WORLD_SIZE", "1");
  set("ROLE_NAME", spec.role);
  set("MASTER_ADDR", spec.master_addr);
  set("MASTER_PORT", std::to_string(job.master_port));
  set("TORCHELASTIC_RESTART_COUNT", std::to_string(spec.restart));
  set("TORCHELASTIC_MAX_RESTARTS", std::to_string(spec.max_restarts));
  set("TORCHELASTIC_RUN_ID", job.run_id);
  set("TORCHELASTIC_ERROR_FILE", error_file_path(job, rank).string());
  set("PACELINE_STORE_FD", std::to_string(store_fd));
  if (!bootstrap_sockets.empty())
    set("PACELINE_BOOTSTRAP_SOCKETS", fmt::format("{}", fmt::join(bootstrap_sockets, ",")));

  std::vector<std::string> entries;
  entries.reserve(variables.size());
  for (const auto& [name, value] : variables) entries.push_back(fmt::format("{}={}", name, value));
  return entries;
}

}  // namespace paceline::launch
