#include "machine.h"

#include <sys/utsname.h>
#include <torch/version.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>

#include <paceline/version.h>

#include "base/cores.h"

namespace paceline::bench {
namespace {

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

}  // namespace

nlohmann::ordered_json describe_machine() {
  utsname system{};
  ::uname(&system);
  double load = 0;
  ::getloadavg(&load, 1);
  return {{"processor", processor()},
          {"architecture", system.machine},
          {"cores", base::available_cores()},
          {"memory_bytes", std::int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE)},
          {"kernel", system.release},
          {"load_before", load},
          {"torch", TORCH_VERSION},
          {"paceline", kVersion}};
}

}  // namespace paceline::bench
