#include "launch/held_cpus.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <set>
#include <string>

namespace paceline::launch {
namespace {

std::string name_of(int cpu) {
  return fmt::format("paceline-cpu-{}", cpu);
}

// Not a descriptor if another socket has the name.
base::UniqueFd hold(int cpu) {
  base::UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = name_of(cpu);
  std::copy(name.begin(), name.end(), address.sun_path + 1);  // after a null: an abstract name
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (!socket || ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) return {};
  return socket;
}

}  // namespace

std::optional<HeldCpus> HeldCpus::try_hold(const std::vector<int>& cpus) {
  HeldCpus held;
  for (const int cpu : cpus) {
    if (!held.sockets_.emplace_back(hold(cpu))) return std::nullopt;
  }
  return held;
}

std::vector<int> find_free(const std::vector<int>& cpus) {
  std::set<std::string> names;  // abstract ones with an @ before them, and the list's other words
  std::ifstream sockets("/proc/net/unix");
  for (std::string word; sockets >> word;) names.insert(word);
  std::vector<int> free;
  std::ranges::copy_if(cpus, std::back_inserter(free),
                       [&](int cpu) { return !names.contains('@' + name_of(cpu)); });
  return free;
}

}  // namespace paceline::launch
