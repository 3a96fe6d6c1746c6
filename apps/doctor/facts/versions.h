#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace paceline::doctor {

struct VersionFacts {
  std::string libtorch{};           // the version that runs; empty if it does not say
  std::string libtorch_compiled{};  // the version whose headers Paceline was compiled with
  std::filesystem::path library{};  // libtorch_cpu.so, as it was loaded
  std::string found_by{};           // see below
  std::string compiler{};
  std::string glibc{};
  std::string kernel{};
};

// The compiler, glibc and the kernel; facts/libtorch.h has the rest.
VersionFacts read_system_versions();

// The file of a library that is loaded; empty if there is none of that name.
std::filesystem::path path_of_loaded(const char* library);

// Where the loader looks for the libraries of this program, in its order.
struct LoaderPaths {
  std::string preload{};                         // LD_PRELOAD
  std::string library_path{};                    // LD_LIBRARY_PATH
  std::vector<std::filesystem::path> runpath{};  // this program's RUNPATH or RPATH
};
LoaderPaths read_loader_paths();

// What made the loader take `library`: "LD_PRELOAD", "LD_LIBRARY_PATH", "RUNPATH", or "the system's
// directories" for anything else.
std::string found_by(const std::filesystem::path& library, const LoaderPaths& paths);

}  // namespace paceline::doctor
