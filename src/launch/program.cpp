#include "launch/program.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>

namespace paceline::launch {
namespace {

namespace fs = std::filesystem;

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored) && !fs::is_directory(path, ignored);
}

bool is_executable(const fs::path& path) {
  return is_file(path) && ::access(path.c_str(), X_OK) == 0;
}

std::string check_executable(const std::string& file) {
  std::error_code ignored;
  if (fs::is_directory(file, ignored)) {
    throw ProgramError(fmt::format("{} is a directory, not a program", file), 126);
  }
  if (!is_file(file)) throw ProgramError(fmt::format("program {} not found", file), 127);
  if (!is_executable(file)) {
    const bool python = fs::path(file).extension() == ".py";
    throw ProgramError(fmt::format("{} is not executable: {}", file,
                                   python ? fmt::format("write python3 {}", file)
                                          : fmt::format("try chmod +x {}", file)),
                       126);
  }
  return file;
}

std::optional<std::string> find_on_path(const std::string& name, const std::string& path) {
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    const fs::path directory = path.substr(begin, end - begin);
    const fs::path file = (directory.empty() ? fs::path(".") : directory) / name;
    if (is_executable(file)) return file.string();
    begin = end + 1;
  }
  return std::nullopt;
}

}  // namespace

std::string find_program(const std::string& name, const std::string& path) {
  if (name.find('/') != std::string::npos) return check_executable(name);
  if (auto file = name.empty() ? std::nullopt : find_on_path(name, path)) return *file;
  std::string message = fmt::format("program '{}' not found on PATH", name);
  if (fs::path(name).extension() == ".py" && is_file(name)) {
    message += fmt::format("; to run the script in this directory, write python3 {}", name);
  } else if (!name.empty() && is_file(name)) {
    message += fmt::format("; to run the one in this directory, write ./{}", name);
  }
  throw ProgramError(message, 127);
}

std::string find_program(const std::string& name) {
  const char* const path = std::getenv("PATH");
  return find_program(name, path != nullptr ? path : "/usr/local/bin:/usr/bin:/bin");
}

}  // namespace paceline::launch
