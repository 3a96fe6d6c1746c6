#include "distributed/debug/http_request.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace paceline::distributed {
namespace {

std::string_view take_until(std::string_view& text, std::string_view end) {
  const std::size_t at = std::min(text.find(end), text.size());
  const std::string_view taken = text.substr(0, at);
  text.remove_prefix(std::min(at + end.size(), text.size()));
  return taken;
}

// "a%20b" and "a+b" are "a b"; a malformed escape stays as it is.
std::string decode(std::string_view text) {
  std::string decoded;
  for (std::size_t i = 0; i < text.size(); ++i) {
    unsigned char byte = 0;
    const bool escaped =
        text[i] == '%' && i + 2 < text.size() &&
        std::from_chars(&text[i + 1], &text[i + 1] + 2, byte, 16).ptr == &text[i + 1] + 2;
    if (escaped) i += 2;
    decoded += escaped ? static_cast<char>(byte) : text[i] == '+' ? ' ' : text[i];
  }
  return decoded;
}

bool is_named(std::string_view header, std::string_view name) {
  return std::ranges::equal(header, name, [](char a, char b) {
    return (a >= 'A' && a <= 'Z' ? static_cast<char>(a - 'A' + 'a') : a) == b;
  });
}

bool read_header(std::string_view line, HttpRequest& request) {
  const std::string_view name = take_until(line, ":");
  line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
  line = line.substr(0, line.find_last_not_of(" \t") + 1);
  if (is_named(name, "transfer-encoding")) return false;
  if (is_named(name, "origin")) request.is_from_page = true;
  if (is_named(name, "host")) return std::exchange(request.host, line).empty();
  if (!is_named(name, "content-length")) return true;
  const auto [end, error] =
      std::from_chars(line.data(), line.data() + line.size(), request.body_size);
  return error == std::errc() && end == line.data() + line.size();
}

}  // namespace

std::optional<HttpRequest> parse_head(std::string_view head) {
  std::string_view line = take_until(head, "\r\n");
  HttpRequest request;
  request.method = take_until(line, " ");
  std::string_view target = take_until(line, " ");
  if (!line.starts_with("HTTP/1.") || !target.starts_with('/')) return std::nullopt;
  request.path = decode(take_until(target, "?"));
  while (!target.empty()) {
    std::string_view value = take_until(target, "&");
    const std::string key = decode(take_until(value, "="));
    if (!key.empty()) request.params.emplace(key, decode(value));
  }
  while (!head.empty()) {
    if (!read_header(take_until(head, "\r\n"), request)) return std::nullopt;
  }
  return request;
}

std::string_view name_in_host(std::string_view host) {
  if (host.starts_with('[')) return host.substr(1, host.find(']') - 1);
  return host.substr(0, host.find(':'));
}

}  // namespace paceline::distributed
