#include "distributed/rendezvous/init_method.h"

#include <fmt/format.h>

#include <paceline/error.h>

#include <algorithm>
#include <charconv>
#include <string_view>

namespace paceline::distributed {
namespace {

int parse_number(std::string_view text, const std::string& what, int high) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 || value > high) {
    throw UsageError(fmt::format("{}: '{}' is not a whole number from 0 to {}", what, text, high));
  }
  return value;
}

std::map<std::string, std::string> parse_query(std::string_view query, const std::string& method) {
  std::map<std::string, std::string> values;
  while (!query.empty()) {
    const std::string_view pair = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(pair.size() + 1, query.size()));
    const auto equals = pair.find('=');
    const std::string key(pair.substr(0, equals));
    if (equals == std::string_view::npos || (key != "rank" && key != "world_size")) {
      throw UsageError(
          fmt::format("init_method '{}': '{}' is neither rank=R nor world_size=N", method, pair));
    }
    values[key] = std::string(pair.substr(equals + 1));
  }
  return values;
}

}  // namespace

InitMethod parse_init_method(const std::string& text) {
  const auto colon = text.find("://");
  const std::string scheme = colon == std::string::npos ? "" : text.substr(0, colon);
  if (scheme != "env" && scheme != "tcp" && scheme != "file") {
    throw UsageError("init_method '" + text + "' is none of env://, tcp://host:port, file:///path");
  }
  InitMethod method{text, scheme, text.substr(colon + 3), {}};
  const auto question = method.rest.find('?');
  if (question == std::string::npos) return method;
  method.query = parse_query(std::string_view(method.rest).substr(question + 1), text);
  method.rest.resize(question);
  return method;
}

std::optional<int> number_in_query(const InitMethod& method, const char* key) {
  const auto found = method.query.find(key);
  if (found == method.query.end()) return std::nullopt;
  return parse_number(found->second, fmt::format("init_method '{}', {}", method.text, key),
                      1 << 20);
}

Address tcp_address(const InitMethod& method) {
  const auto colon = method.rest.rfind(':');
  if (colon == std::string::npos || colon == 0) {
    throw UsageError("init_method '" + method.text + "' is not of the form tcp://host:port");
  }
  std::string host = method.rest.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  return {std::move(host), parse_number(std::string_view(method.rest).substr(colon + 1),
                                        "init_method '" + method.text + "', port", 65535)};
}

void check_no_address(const InitMethod& method) {
  if (method.rest.empty()) return;
  throw UsageError("init_method '" + method.text +
                   "': env:// takes its address from MASTER_ADDR and MASTER_PORT; give "
                   "tcp://host:port for another");
}

std::string file_path(const InitMethod& method) {
  if (method.rest.starts_with('/')) return method.rest;
  throw UsageError("init_method '" + method.text + "' needs an absolute path: file:///path");
}

}  // namespace paceline::distributed
