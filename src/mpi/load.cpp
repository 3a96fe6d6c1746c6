#include "mpi/load.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>

#include <paceline/error.h>

namespace paceline::mpi {
namespace {

// Their ABIs: "mpich" is also that of Intel MPI, MVAPICH and Cray's.
constexpr std::array kNames{"mpich", "openmpi"};

// The shared library, or the program, that contains this.
std::filesystem::path own_path() {
  Dl_info info{};
  std::error_code error;
  // Of a program this is how it was called.
  if (::dladdr(reinterpret_cast<const void*>(&own_path), &info) != 0 && info.dli_fname[0] == '/') {
    auto path = std::filesystem::canonical(info.dli_fname, error);
    if (!error) return path;
  }
  return std::filesystem::read_symlink("/proc/self/exe", error);
}

// In lib/paceline: the shared library is in lib, programs are in bin or libexec/paceline beside it.
std::filesystem::path path_of(const std::string& name) {
  const auto here = own_path().parent_path();
  const std::string file = "paceline/mpi_" + name + ".so";
  std::error_code error;
  for (const auto& directory :
       {here, here.parent_path() / "lib", here.parent_path().parent_path() / "lib"}) {
    if (std::filesystem::exists(directory / file, error)) return directory / file;
  }
  return {};
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
