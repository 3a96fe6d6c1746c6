#include "facts/versions.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <gnu/libc-version.h>
#include <link.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cstdlib>
#include <system_error>

namespace paceline::doctor {
namespace {

namespace fs = std::filesystem;

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

std::vector<std::string> split_at_any(const std::string& text, const char* separators) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find_first_of(separators, begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

// A file that is loaded; null stands for this program.
const link_map* find_loaded(const char* name) {
  link_map* map = nullptr;
  void* const handle = ::dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
  const bool is_found =
      handle != nullptr && ::dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0;
  return is_found ? map : nullptr;
}

// The RUNPATH or RPATH of this program, as it was linked.
std::string linked_runpath() {
  const link_map* const map = find_loaded(nullptr);
  if (map == nullptr) return "";
  const char* strings = nullptr;
  std::size_t offset = 0;
  for (const ElfW(Dyn)* entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the loader has made it an address
    if (entry->d_tag == DT_STRTAB) strings = reinterpret_cast<const char*>(entry->d_un.d_ptr);
    if (entry->d_tag == DT_RUNPATH || entry->d_tag == DT_RPATH) offset = entry->d_un.d_val;
  }
  return strings != nullptr && offset != 0 ? strings + offset : "";
}

bool is_same_directory(const fs::path& one, const fs::path& other) {
  std::error_code ignored;
  return fs::equivalent(one, other, ignored);
}

std::string compiler_version() {
#ifdef __clang__
  return "clang " __clang_version__;
#else
  return "g++ " __VERSION__;
#endif
}

}  // namespace

VersionFacts read_system_versions() {
  utsname system{};
  ::uname(&system);
  VersionFacts facts;
  facts.compiler = compiler_version();
  facts.glibc = ::gnu_get_libc_version();
  facts.kernel = fmt::format("{} {} {}", system.sysname, system.release, system.machine);
  return facts;
}

fs::path path_of_loaded(const char* library) {
  const link_map* const map = find_loaded(library);
  if (map == nullptr) return "";
  std::error_code error;
  const fs::path path = fs::canonical(map->l_name, error);
  return error ? fs::path(map->l_name) : path;
}

LoaderPaths read_loader_paths() {
  LoaderPaths paths{variable("LD_PRELOAD"), variable("LD_LIBRARY_PATH"), {}};
  std::error_code ignored;
  const std::string origin = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  for (std::string entry : split_at_any(linked_runpath(), ":")) {
    const std::string name = "$ORIGIN";
    if (entry.starts_with(name)) entry.replace(0, name.size(), origin);
    paths.runpath.emplace_back(entry);
  }
  return paths;
}

std::string found_by(const fs::path& library, const LoaderPaths& paths) {
  std::error_code ignored;
  for (const std::string& file : split_at_any(paths.preload, " :")) {
    if (fs::equivalent(file, library, ignored)) return "LD_PRELOAD";
  }
  const auto holds = [&](const fs::path& directory) {
    return is_same_directory(directory, library.parent_path());
  };
  if (std::ranges::any_of(split_at_any(paths.library_path, ":;"), holds)) return "LD_LIBRARY_PATH";
  if (std::ranges::any_of(paths.runpath, holds)) return "RUNPATH";
  return "the system's directories";
}

}  // namespace paceline::doctor
