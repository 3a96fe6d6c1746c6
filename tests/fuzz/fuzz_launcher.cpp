#include <paceline/error.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>

#include "base/environment.h"

// Lines of NAME=value, whatever they are: ranks below sizes, or an error that says what is wrong.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(bytes), size);
  std::map<std::string, std::string> variables;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::size_t equals = text.find('=', begin);
    if (equals < end) {
      variables[text.substr(begin, equals - begin)] = text.substr(equals + 1, end - equals - 1);
    }
    begin = end + 1;
  }
  variables.erase("PMI_FD");  // a descriptor of this process
  try {
    const auto environment = paceline::base::parse_environment([&](const char* name) {
      const auto found = variables.find(name);
      return found == variables.end() ? nullptr : found->second.c_str();
    });
    if (environment.rank && environment.world_size &&
        *environment.rank >= *environment.world_size) {
      std::abort();
    }
  } catch (const paceline::UsageError&) {  // as it should be
  }
  return 0;
}
