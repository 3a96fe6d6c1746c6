#include "shm/membership/endpoint.h"

#include <fmt/format.h>
#include <sys/random.h>
#include <unistd.h>

#include <paceline/error.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <sstream>

#include "base/errno_error.h"
#include "base/parse.h"

namespace paceline::shm {
namespace {

std::string name_of_namespace(const char* which) {
  std::array<char, 64> name{};
  const ssize_t length = ::readlink(which, name.data(), name.size());
  return {name.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0))};
}

std::string random_name() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw base::errno_error("cannot get random bytes");
  }
  std::string name = "paceline-";
  for (const unsigned char byte : bytes) name += fmt::format("{:02x}", byte);
  return name;
}

}  // namespace

std::string machine_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot + " " + name_of_namespace("/proc/self/ns/net");
}

std::string pid_namespace() {
  return name_of_namespace("/proc/self/ns/pid");
}

Endpoint Endpoint::own(bool listens) {
  return {::getpid(), pid_namespace(), machine_identity(), listens ? random_name() : ""};
}

std::string Endpoint::encode() const {
  return fmt::format("{}\n{}\n{}\n{}", pid, pids, machine, socket);
}

Endpoint Endpoint::decode(const std::string& text) {
  std::array<std::string, 4> lines;
  std::istringstream stream(text);
  for (std::string& line : lines) std::getline(stream, line);
  const auto pid = base::parse_number<pid_t>(lines[0], 1, std::numeric_limits<pid_t>::max());
  if (!pid || lines[2].empty()) throw Error("malformed bootstrap record");
  return {*pid, lines[1], lines[2], lines[3]};
}

}  // namespace paceline::shm
