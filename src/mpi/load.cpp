#include "mpi/load.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>

#include <paceline/error.h>

#include "base/plugin.h"

namespace paceline::mpi {
namespace {

// Their ABIs: "mpich" is also that of Intel MPI, MVAPICH and Cray's.
constexpr std::array kNames{"mpich", "openmpi"};

std::filesystem::path path_of(const std::string& name) {
  return base::plugin_path("mpi_" + name);
}

// The MPI that is in this process already, if there is one.
std::optional<std::string> loaded() {
  if (::dlsym(RTLD_DEFAULT, "MPI_Init") == nullptr) return std::nullopt;
  return ::dlsym(RTLD_DEFAULT, "ompi_mpi_comm_world") != nullptr ? "openmpi" : "mpich";
}

// By what each launcher sets for its processes.
std::optional<std::string> launched() {
  if (std::getenv("OMPI_COMM_WORLD_RANK") != nullptr) return "openmpi";
  if (std::getenv("PMI_RANK") != nullptr) return "mpich";
  if (std::getenv("PMIX_RANK") != nullptr) return "openmpi";
  return std::nullopt;
}

}  // namespace

std::vector<std::string> available() {
  std::vector<std::string> found;
  for (const char* const name : kNames) {
    if (!path_of(name).empty()) found.emplace_back(name);
  }
  return found;
}

Library& load(const std::optional<std::string>& name) {
  const auto plugins = available();
  const auto in_process = loaded();
  auto chosen = name ? name : in_process ? in_process : launched();
  if (plugins.size() == 1 && !name && !in_process) chosen = plugins.front();
  if (!chosen) {
    throw UsageError(
        "the backend mpi does not know which MPI to use: start the program with the mpirun of one");
  }
  if (in_process && *in_process != *chosen) {
    throw UsageError(fmt::format(
        "the backend mpi would use {}, but this program has loaded {}: use one of them only",
        *chosen, *in_process));
  }
  if (std::ranges::find(plugins, *chosen) == plugins.end()) {
    throw UsageError(
        fmt::format("this build of Paceline has no plug-in for {}, which this program is linked to "
                    "or was started by; it has those for: {}",
                    *chosen, fmt::join(plugins, ", ")));
  }
  const auto path = path_of(*chosen);
  // MPI's own plug-ins may expect its symbols to be global.
  void* const plugin = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (plugin == nullptr) {
    throw UsageError(fmt::format("the backend mpi cannot be loaded: {}", ::dlerror()));
  }
  const auto function = reinterpret_cast<PluginFunction>(::dlsym(plugin, kPluginFunction));
  if (function == nullptr) {
    throw UsageError(fmt::format("{} belongs to another version of Paceline", path.string()));
  }
  return *function();
}

}  // namespace paceline::mpi
