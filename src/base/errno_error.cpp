#include "base/errno_error.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>

namespace paceline::base {

Error errno_error(const std::string& what) {
  return errno_error(what, errno);
}

Error errno_error(const std::string& what, int code) {
  const char* const name = ::strerrorname_np(code);
  const char* const text = ::strerrordesc_np(code);
  const char* const advice = code == EMFILE ? "; raise the limit with ulimit -n" : "";
  return Error(fmt::format("{}: {} ({}){}", what, text != nullptr ? text : "unknown error",
                           name != nullptr ? name : std::to_string(code).c_str(), advice));
}

}  // namespace paceline::base
