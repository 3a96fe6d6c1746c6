#include "launch/error_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "base/errno_error.h"

namespace paceline::launch {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxBytes = 1 << 20;
constexpr std::size_t kLongestMessage = 1 << 16;  // in JSON, a byte may take six
const std::filesystem::path kDescriptors = "/proc/self/fd";
constexpr const char* kMemory = "paceline-error";
constexpr const char* kTimeout = "Timeout";

// A worker may have put anything there, even a FIFO: only a regular file is read, without blocking.
std::optional<std::string> read_small_file(const std::filesystem::path& path) {
  const base::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info {};
  if (!fd || ::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode) ||
      static_cast<std::size_t>(info.st_size) > kMaxBytes) {
    return std::nullopt;
  }
  std::string text(static_cast<std::size_t>(info.st_size), '\0');
  ssize_t size = 0;
  do {
    size = ::read(fd.get(), text.data(), text.size());
  } while (size < 0 && errno == EINTR);  // file systems in user space may cause it
  if (size < 0) return std::nullopt;
  text.resize(static_cast<std::size_t>(size));
  return text;
}

std::optional<std::string> text_of(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) return std::nullopt;
  return found->get<std::string>();
}

std::vector<int> blamed_ranks_of(const json& extra) {
  std::vector<int> ranks;
  const auto blamed = extra.find("blamed_ranks");
  if (blamed == extra.end() || !blamed->is_array()) return ranks;
  for (const json& rank : *blamed) {
    if (!rank.is_number_integer()) continue;
    const auto number = rank.get<std::int64_t>();
    if (number >= kUnknownRank && std::in_range<int>(number))
      ranks.push_back(static_cast<int>(number));
  }
  return ranks;
}

}  // namespace

base::UniqueFd make_error_memory() {
  base::UniqueFd memory(::memfd_create(kMemory, MFD_CLOEXEC));
  if (!memory) throw base::errno_error("cannot make a file in memory for a rank's error");
  return memory;
}

std::filesystem::path replaced_error_file(const std::filesystem::path& path, int replacement) {
  return path.parent_path() / fmt::format("error_{}.json", replacement);
}

std::filesystem::path error_memory_path(int fd) {
  return kDescriptors / std::to_string(fd);
}

bool is_error_memory(int fd) {
  std::error_code ignored;
  return std::filesystem::read_symlink(error_memory_path(fd), ignored).string() ==
         fmt::format("/memfd:{} (deleted)", kMemory);
}

void write_error_file(const std::filesystem::path& path, const ErrorFile& error,
                      std::optional<int> node) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  json extra = {
      {"timestamp", std::to_string(std::chrono::duration_cast<std::chrono::seconds>(now).count())}};
  if (!error.blamed_ranks.empty()) extra["blamed_ranks"] = error.blamed_ranks;
  if (error.is_timeout) extra["error"] = kTimeout;
  if (node) extra["node"] = *node;
  const json content = {
      {"message", {{"message", error.message.substr(0, kLongestMessage)}, {"extraInfo", extra}}}};

  const bool is_in_memory = path.parent_path() == kDescriptors;
  std::filesystem::path temporary = path;
  if (!is_in_memory) temporary += fmt::format(".{}", ::getpid());
  std::ofstream file(temporary);
  file << content.dump(-1, ' ', false, json::error_handler_t::replace);
  file.close();
  if (!file || (!is_in_memory && ::rename(temporary.c_str(), path.c_str()) != 0)) {
    const int code = errno;
    if (!is_in_memory) ::unlink(temporary.c_str());
    throw base::errno_error(fmt::format("cannot write the error file {}", path.string()), code);
  }
}

std::optional<ErrorFile> read_error_file(const std::filesystem::path& path, int memory) {
  const auto text = read_small_file(path);
  if (!text) return memory >= 0 ? read_error_file(error_memory_path(memory)) : std::nullopt;
  const json content = json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!content.is_object()) return std::nullopt;
  if (auto message = text_of(content, "message")) return ErrorFile{std::move(*message)};
  const auto inner = content.find("message");
  if (inner == content.end() || !inner->is_object()) return std::nullopt;
  auto message = text_of(*inner, "message");
  if (!message) return std::nullopt;
  const auto extra = inner->find("extraInfo");
  if (extra == inner->end() || !extra->is_object()) return ErrorFile{std::move(*message)};
  return ErrorFile{std::move(*message), blamed_ranks_of(*extra),
                   text_of(*extra, "error") == kTimeout};
}

}  // namespace paceline::launch
