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
  std::string host{};         // the Host header; empty if there is none
  bool is_from_page = false;  // it has an Origin header, as what a page in a browser sends
  std::string body{};
  std::size_t body_size = 0;  // that it announces
};

// The size of a request's head and of its body, at most.
inline constexpr std::size_t kLongestHead = std::size_t{16} << 10;
inline constexpr std::size_t kLongestBody = std::size_t{1} << 20;

// `head`: the request's lines before the empty one. Empty if it is malformed, or if it has no
// Content-Length but another encoding, or several hosts.
std::optional<HttpRequest> parse_head(std::string_view head);

// The name or address in a Host header: "node7" of "node7:8080", "::1" of "[::1]:8080".
std::string_view name_in_host(std::string_view host);

}  // namespace paceline::distributed
