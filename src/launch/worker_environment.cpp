#include "launch/worker_environment.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include <paceline/error.h>

#include "base/parse.h"

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

std::string text_of(const Variables& variables, const char* name) {
  const auto found = variables.find(name);
  return found == variables.end() ? "" : found->second;
}

std::string trim(std::string_view text) {
  constexpr const char* kSpace = " \t\n\r\f\v";
  const std::size_t begin = std::min(text.find_first_not_of(kSpace), text.size());
  return std::string(text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin));
}

// Leaves to a rank the device that its local rank numbers, as torchrun does. HIP's variable counts
// before CUDA's.
void narrow_devices(Variables& variables, int local_rank) {
  const bool is_hip = !text_of(variables, "HIP_VISIBLE_DEVICES").empty();
  const char* const name = is_hip ? "HIP_VISIBLE_DEVICES" : "CUDA_VISIBLE_DEVICES";
  std::string device = std::to_string(local_rank);
  if (variables.contains(name)) {
    const std::string visible = variables[name];
    const auto devices = base::split_at_commas(visible);
    if (static_cast<std::size_t>(local_rank) >= devices.size()) {
      throw UsageError(
          fmt::format("{}={} names no device for local rank {}, and with --virtual-local-rank each "
                      "process has one of its own: start at most {}, or name more devices",
                      name, visible, local_rank, devices.size()));
    }
    device = trim(devices[static_cast<std::size_t>(local_rank)]);
  }
  variables["CUDA_VISIBLE_DEVICES"] = device;
  if (is_hip) variables["HIP_VISIBLE_DEVICES"] = device;
}

}  // namespace

std::filesystem::path error_file_path(const JobIdentity& job, int rank) {
  return job.directory.empty() ? "" : job.directory / std::to_string(rank) / "error.json";
}

std::vector<std::string> worker_environment(const JobSpec& spec, const JobIdentity& job,
                                            int local_rank,
                                            const std::vector<int>& bootstrap_sockets, int store_fd,
                                            const char* const* inherited) {
  Variables variables = parse_variables(inherited);
  // An outer torchrun's store, an outer job's sockets and screen are not this job's; and programs
  // log their variables.
  for (const char* name :
       {"TORCHELASTIC_USE_AGENT_STORE", "PACELINE_BOOTSTRAP_SOCKETS", "PACELINE_STORE_FD",
        "PACELINE_TERMINAL", "PACELINE_SPAWN", "PACELINE_ERROR_FD", "PACELINE_SECRET",
        "PACELINE_MAX_REPLACEMENTS", "PACELINE_REPLACEMENT"}) {
    variables.erase(name);
  }
  for (const auto& [name, value] : spec.environment) variables[name] = value;

  const auto set = [&](const char* name, std::string value) {
    variables.insert_or_assign(name, std::move(value));
  };
  const auto set_number = [&](const char* name, int value) { set(name, std::to_string(value)); };
  const int rank = spec.first_rank + local_rank;
  const int world_size = spec.world_size != 0 ? spec.world_size : spec.processes;
  set_number("RANK", rank);
  set_number("WORLD_SIZE", world_size);
  set_number("ROLE_RANK", spec.first_role_rank + local_rank);
  set_number("ROLE_WORLD_SIZE", spec.role_world_size != 0 ? spec.role_world_size : world_size);
  set_number("LOCAL_RANK", spec.virtual_local_rank ? 0 : local_rank);
  if (spec.virtual_local_rank) narrow_devices(variables, local_rank);
  set_number("LOCAL_WORLD_SIZE", spec.processes);
  set_number("GROUP_RANK", spec.node);
  set_number("GROUP_WORLD_SIZE", spec.nodes);
  set("ROLE_NAME", spec.role);
  set("MASTER_ADDR", spec.master_addr);
  set("MASTER_PORT", std::to_string(job.master_port));
  set("TORCHELASTIC_RESTART_COUNT", std::to_string(spec.restart));
  set("TORCHELASTIC_MAX_RESTARTS", std::to_string(spec.max_restarts));
  if (spec.max_replacements > 0) set_number("PACELINE_MAX_REPLACEMENTS", spec.max_replacements);
  set("TORCHELASTIC_RUN_ID", job.run_id);
  set("TORCHELASTIC_ERROR_FILE", error_file_path(job, local_rank).string());
  variables.emplace("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
  if (store_fd >= 0) set_number("PACELINE_STORE_FD", store_fd);
  if (!bootstrap_sockets.empty())
    set("PACELINE_BOOTSTRAP_SOCKETS", fmt::format("{}", fmt::join(bootstrap_sockets, ",")));

  std::vector<std::string> entries;
  entries.reserve(variables.size());
  for (const auto& [name, value] : variables) entries.push_back(fmt::format("{}={}", name, value));
  return entries;
}

}  // namespace paceline::launch
