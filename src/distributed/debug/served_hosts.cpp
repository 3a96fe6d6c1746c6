#include "distributed/debug/served_hosts.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <strings.h>

#include <algorithm>
#include <utility>

#include "distributed/debug/http_request.h"

namespace paceline::distributed {
namespace {

bool is_loopback_number(const std::string& name) {
  in_addr four{};
  in6_addr six{};
  if (::inet_pton(AF_INET, name.c_str(), &four) == 1) return name.starts_with("127.");
  return ::inet_pton(AF_INET6, name.c_str(), &six) == 1 && IN6_IS_ADDR_LOOPBACK(&six);
}

bool is_number(const std::string& name) {
  in6_addr any{};
  return ::inet_pton(AF_INET, name.c_str(), &any) == 1 ||
         ::inet_pton(AF_INET6, name.c_str(), &any) == 1;
}

}  // namespace

ServedHosts::ServedHosts(std::set<std::string> names, const base::Address& bound)
    : is_limited_(true), names_(std::move(names)) {
  is_any_number_ = bound.host() == "::" || bound.host() == "0.0.0.0";
  names_.insert("localhost");
  names_.insert(bound.host());
}

bool ServedHosts::contains(std::string_view host) const {
  const std::string name(name_in_host(host));
  const auto is_name = [&](const std::string& one) {
    return ::strcasecmp(one.c_str(), name.c_str()) == 0;
  };
  return !is_limited_ || is_loopback_number(name) || (is_any_number_ && is_number(name)) ||
         std::ranges::any_of(names_, is_name);
}

std::string ServedHosts::describe() const {
  return fmt::format("{}", fmt::join(names_, ", "));
}

}  // namespace paceline::distributed
