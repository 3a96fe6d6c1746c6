#include "base/address.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>

#include "base/errno_error.h"
#include "base/unique_fd.h"

namespace paceline::base {
namespace {

UniqueFd datagram_socket(const Address& address) {
  return UniqueFd(::socket(address.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
}

}  // namespace

Address::Address(const sockaddr* address, socklen_t size)
    : size_(std::min<socklen_t>(size, sizeof(storage_))) {
  std::memcpy(&storage_, address, size_);
}

int Address::port() const {
  if (family() == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(data())->sin6_port);
  if (family() == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(data())->sin_port);
  return 0;
}

Address Address::with_port(int port) const {
  Address result = *this;
  const auto network = htons(static_cast<std::uint16_t>(port));
  if (family() == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&result.storage_)->sin6_port = network;
  } else if (family() == AF_INET) {
    reinterpret_cast<sockaddr_in*>(&result.storage_)->sin_port = network;
  }
  return result;
}

bool Address::is_loopback() const {
  const std::string text = host();
  return text.starts_with("127.") || text == "::1" || text.starts_with("::ffff:127.");
}

std::string Address::host() const {
  std::array<char, NI_MAXHOST> text{};
  const int error = ::getnameinfo(data(), size_, text.data(), text.size(), nullptr, 0,
                                  NI_NUMERICHOST | NI_NUMERICSERV);
  return error == 0 ? text.data() : "a local socket";
}

std::string Address::to_string() const {
  const bool has_port = family() == AF_INET || family() == AF_INET6;
  return has_port ? join_host_port(host(), port()) : host();
}

std::vector<Address> resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &list);
  if (error != 0) {
    throw UsageError(fmt::format("cannot resolve {}: {}", host, ::gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, ::freeaddrinfo);
  std::vector<Address> addresses;
  for (; list != nullptr; list = list->ai_next) {
    if (list->ai_family != AF_INET && list->ai_family != AF_INET6) continue;
    addresses.push_back(Address(list->ai_addr, list->ai_addrlen).with_port(port));
  }
  std::stable_partition(addresses.begin(), addresses.end(),
                        [](const Address& one) { return one.family() == AF_INET; });
  if (addresses.empty()) throw UsageError(fmt::format("{} has no IP address", host));
  return addresses;
}

std::vector<Address> own_addresses(const std::string& interface) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  std::vector<Address> found;
  for (; list != nullptr; list = list->ifa_next) {
    if (list->ifa_addr == nullptr || (list->ifa_flags & IFF_RUNNING) == 0) continue;
    if (!interface.empty() && interface != list->ifa_name) continue;
    const int family = list->ifa_addr->sa_family;
    if (family == AF_INET) found.emplace_back(list->ifa_addr, sizeof(sockaddr_in));
    if (family == AF_INET6) found.emplace_back(list->ifa_addr, sizeof(sockaddr_in6));
  }
  return found;
}

std::vector<Address> addresses_in_network(const std::string& interface) {
  std::vector<Address> found = own_addresses(interface);
  std::erase_if(found, [](const Address& one) {
    return one.is_loopback() || one.host().starts_with("fe80:");
  });
  const auto is_ipv4 = [](const Address& one) { return one.family() == AF_INET; };
  if (std::ranges::any_of(found, is_ipv4)) std::erase_if(found, std::not_fn(is_ipv4));
  return found;
}

// bind() may accept foreign addresses, too (net.ipv4.ip_nonlocal_bind). No interface has those of
// the loopback, such as 127.0.0.2.
bool is_own(const Address& address) {
  const auto source = source_address(address);
  if (source && source->is_loopback()) return true;
  return std::ranges::any_of(own_addresses(), [&](const Address& own) {
    return own.family() == address.family() && own.host() == address.host();
  });
}

Address listening_address(const std::string& host, int port) {
  const std::vector<Address> found = resolve(host, port);
  const auto in_network = std::ranges::find_if(
      found, [](const Address& one) { return is_own(one) && !one.is_loopback(); });
  if (in_network != found.end()) return *in_network;
  const auto own = std::ranges::find_if(found, is_own);
  if (own != found.end()) return *own;
  return resolve(found.front().family() == AF_INET6 ? "::" : "0.0.0.0", port).front();
}

Address listening_address_for_machines(const std::string& host, int port) {
  const Address address = listening_address(host, port);
  if (!address.is_loopback() || names_loopback(host)) return address;
  throw UsageError(fmt::format(
      "{} resolves to {} on this machine (/etc/hosts), where other machines cannot reach it: use "
      "this machine's address in the network as MASTER_ADDR, --master-addr or --rdzv-endpoint",
      host, address.host()));
}

std::string join_host_port(const std::string& host, int port) {
  const bool is_ipv6 = host.find(':') != host.npos;
  return is_ipv6 ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

bool names_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

// Connecting a datagram socket sends nothing; it asks the kernel's routes.
std::optional<Address> source_address(const Address& remote) {
  const UniqueFd socket = datagram_socket(remote);
  const Address target = remote.port() != 0 ? remote : remote.with_port(1);
  if (!socket || ::connect(socket.get(), target.data(), target.size()) != 0) return std::nullopt;
  return local_address(socket.get()).with_port(0);
}

std::string host_towards(const std::string& host, int port) {
  if (names_loopback(host)) return host;
  // The address that the machine with `host` has there is its own way to it.
  const auto source = source_address(resolve(host, port).front());
  return source && !source->is_loopback() ? source->host() : "";
}

Address local_address(int socket) {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  auto* const generic = reinterpret_cast<sockaddr*>(&storage);
  if (::getsockname(socket, generic, &size) != 0) {
    throw errno_error("cannot read a socket's address");
  }
  return {generic, size};
}

std::string peer_host(int socket) {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  auto* const generic = reinterpret_cast<sockaddr*>(&storage);
  const bool is_known = ::getpeername(socket, generic, &size) == 0;
  return is_known ? Address(generic, size).host() : "an unknown address";
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

}  // namespace paceline::base
