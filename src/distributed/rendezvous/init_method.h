#pragma once

#include <map>
#include <optional>
#include <string>

namespace paceline::distributed {

// An init_method: scheme://rest?rank=R&world_size=N.
struct InitMethod {
  std::string text;  // the whole
  std::string scheme;
  std::string rest;
  std::map<std::string, std::string> query;
};

struct Address {
  std::string host;
  int port;
};

// Throws UsageError that quotes `text`, as the next four do. Any scheme passes.
InitMethod parse_init_method(const std::string& text);

// "rank" or "world_size", if the query has it.
std::optional<int> number_in_query(const InitMethod& method, const char* key);
// Rejects an address in env://, which has none.
void check_no_address(const InitMethod& method);
// The address in tcp://.
Address tcp_address(const InitMethod& method);
// The path in file://.
std::string file_path(const InitMethod& method);

}  // namespace paceline::distributed
