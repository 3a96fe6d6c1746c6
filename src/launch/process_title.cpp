#include "launch/process_title.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

namespace paceline::launch {

void set_process_title(const std::string& title) {
  ::prctl(PR_SET_NAME, title.c_str());
  // The kernel reads the command line from where it put it, one block that starts at argv[0].
  std::ifstream file("/proc/self/cmdline");
  const std::string old(std::istreambuf_iterator<char>(file), {});
  if (old.compare(0, old.find('\0'), ::program_invocation_name) != 0) return;
  std::memset(::program_invocation_name, 0, old.size());
  std::memcpy(::program_invocation_name, title.data(), std::min(title.size(), old.size() - 1));
}

}  // namespace paceline::launch
