#include "facts/network.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/utsname.h>

#include <algorithm>
#include <array>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "base/signals_blocked.h"

namespace paceline::doctor {
namespace {

// Empty for other families, and for addresses that mean nothing beyond one link.
std::string text_of(const sockaddr* address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* bytes = nullptr;
  if (address == nullptr) return "";
  if (address->sa_family == AF_INET) {
    bytes = &reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
  } else if (address->sa_family == AF_INET6) {
    const auto* const v6 = &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
    if (!IN6_IS_ADDR_LINKLOCAL(v6)) bytes = v6;
  }
  if (bytes == nullptr) return "";
  return ::inet_ntop(address->sa_family, bytes, text.data(), text.size());
}

std::vector<Interface> read_interfaces() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, ::freeifaddrs);
  std::vector<Interface> found;
  for (const ifaddrs* at = first; at != nullptr; at = at->ifa_next) {
    if ((at->ifa_flags & IFF_UP) == 0) continue;
    const std::string address = text_of(at->ifa_addr);
    if (address.empty()) continue;
    auto same = std::ranges::find(found, at->ifa_name, &Interface::name);
    if (same == found.end()) {
      found.push_back({at->ifa_name, {}, (at->ifa_flags & IFF_LOOPBACK) != 0});
      same = found.end() - 1;
    }
    same->addresses.push_back(address);
  }
  return found;
}

Resolution resolve_now(const std::string& name) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;  // otherwise each address comes once for each type
  addrinfo* first = nullptr;
  if (const int code = ::getaddrinfo(name.c_str(), nullptr, &hints, &first); code != 0) {
    return {.failure = ::gai_strerror(code)};
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(first, ::freeaddrinfo);
  Resolution found;
  for (const addrinfo* at = first; at != nullptr; at = at->ai_next) {
    const std::string address = text_of(at->ai_addr);
    if (!address.empty() && std::ranges::count(found.addresses, address) == 0) {
      found.addresses.push_back(address);
    }
  }
  if (found.addresses.empty()) found.failure = "it has no address that other machines may use";
  return found;
}

}  // namespace

// The thread is left behind if it takes too long: getaddrinfo cannot be interrupted.
Resolution resolve(const std::string& name, std::chrono::milliseconds timeout) {
  std::promise<Resolution> promise;
  auto answer = promise.get_future();
  const base::SignalsBlocked blocked;
  std::thread([name, promise = std::move(promise)]() mutable {
    promise.set_value(resolve_now(name));
  }).detach();
  if (answer.wait_for(timeout) == std::future_status::ready) return answer.get();
  return {.failure = fmt::format("no answer within {} s", timeout.count() / 1000.0)};
}

NetworkFacts read_network() {
  utsname system{};
  ::uname(&system);
  return {read_interfaces(), system.nodename, resolve(system.nodename, std::chrono::seconds(3))};
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1" || address.starts_with("::ffff:127.");
}

std::string reachable_address(const std::vector<Interface>& interfaces) {
  for (const Interface& one : interfaces) {
    if (!one.is_loopback) return one.addresses.front();
  }
  return "";
}

}  // namespace paceline::doctor
