#pragma once

#include <sys/socket.h>

#include <optional>
#include <string>
#include <vector>

namespace paceline::base {

// An IPv4 or IPv6 address with a port.
class Address {
 public:
  Address(const sockaddr* address, socklen_t size);

  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t size() const { return size_; }
  int family() const { return storage_.ss_family; }
  int port() const;
  Address with_port(int port) const;
  bool is_loopback() const;
  std::string host() const;       // "10.0.0.1", "fe80::1%eth0"
  std::string to_string() const;  // with the port: "10.0.0.1:29500", "[::1]:29500"

 private:
  sockaddr_storage storage_{};
  socklen_t size_;
};

// All addresses of a host, which is a name or a number, IPv4 first. May take as long as the system
// asks its name servers. Throws UsageError if there is none.
std::vector<Address> resolve(const std::string& host, int port);

// The addresses of this machine's interfaces that are up and connected, or of one of them, with
// port 0. Empty if the system does not list interfaces.
std::vector<Address> own_addresses(const std::string& interface = "");

// Those by which other machines may reach this one: IPv6 only if there is no IPv4.
std::vector<Address> addresses_in_network(const std::string& interface = "");

// Whether this machine has it.
bool is_own(const Address& address);

// Where a server listens that others reach at `host`: at that address if this machine has it. Else
// something between the machines leads here, such as a service of Kubernetes, and the server
// listens at all addresses. Throws UsageError.
Address listening_address(const std::string& host, int port);

// The same for a job on several machines: throws UsageError, too, if `host` is a name that means
// the loopback on this machine only.
Address listening_address_for_machines(const std::string& host, int port);

// "10.0.0.1:29500", "[::1]:29500", "node0:29500"
std::string join_host_port(const std::string& host, int port);

// Whether `host` means the loopback on every machine.
bool names_loopback(const std::string& host);

// This machine's address on the way to `remote`, with port 0; nullopt if there is no way.
std::optional<Address> source_address(const Address& remote);

// This machine's address on the way to host:port, by which the other processes that meet there
// reach it. `host` itself if it means the loopback; empty if the address is unknown. Throws
// UsageError if `host` cannot be resolved.
std::string host_towards(const std::string& host, int port);

// Where the socket is bound. Throws Error.
Address local_address(int socket);

// The host at the other end of a connected socket, for messages.
std::string peer_host(int socket);

// This machine's name; empty if it has none.
std::string host_name();

}  // namespace paceline::base
