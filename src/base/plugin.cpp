#include "base/plugin.h"

#include <dlfcn.h>

#include <system_error>

namespace paceline::base {
namespace {

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

}  // namespace

std::filesystem::path plugin_path(const std::string& name) {
  const auto here = own_path().parent_path();
  const std::string file = "paceline/" + name + ".so";
  std::error_code error;
  for (const auto& directory :
       {here, here.parent_path() / "lib", here.parent_path().parent_path() / "lib"}) {
    if (std::filesystem::exists(directory / file, error)) return directory / file;
  }
  return {};
}

}  // namespace paceline::base
