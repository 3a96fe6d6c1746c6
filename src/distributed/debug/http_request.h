#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace paceline::distributed {

struct HttpRequest {
  std::string method;
  std::string path;  // decoded
  std::multimap<std::string, std::string> params{};
  std::string body{};
  std::size_t body_size = 0;  // that it announces
};

// The size of a request's head and of its body, at most.
inline constexpr std::size_t kLongestHead = std::size_t{16} << 10;
inline constexpr std::size_t kLongestBody = std::size_t{1} << 20;

// `head`: the request's lines before the empty one. Empty if it is malformed, or if it has no
// Content-Length but another encoding.
std::optional<HttpRequest> parse_head(std::string_view head);

}  // namespace paceline::distributed
