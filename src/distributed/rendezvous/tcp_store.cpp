#include "distributed/rendezvous/tcp_store.h"

#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "base/errno_error.h"
#include "base/unique_fd.h"

namespace paceline::distributed {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

struct AddressListDeleter {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};

// Binds the given address only; a TCPStore by itself listens on all addresses.
base::UniqueFd listen_at(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const std::string service = std::to_string(port);
  if (const int error = ::getaddrinfo(host.c_str(), service.c_str(), &hints, &found); error != 0) {
    throw UsageError(
        fmt::format("cannot resolve the rendezvous address {}: {}", host, ::gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, AddressListDeleter> list(found);
  base::UniqueFd socket(::socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, list->ai_protocol));
  const int on = 1;
  if (!socket || ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      ::bind(socket.get(), list->ai_addr, list->ai_addrlen) != 0 ||
      ::listen(socket.get(), 4096) != 0) {
    throw base::errno_error(fmt::format(
        "rank 0 cannot listen at {}:{} for the rendezvous (is another job using the port?)", host,
        port));
  }
  return socket;
}

// Rank 0's stores, for as long as the process lives: a rank that is faster to the next world would
// connect to the server of the last one just before it ends. A forked child has none of them.
StorePtr& served_store(const Plan& plan) {
  using Key = std::tuple<pid_t, std::string, int>;
  static auto* const stores = new std::map<Key, StorePtr>;
  return (*stores)[Key(::getpid(), plan.host, plan.port)];
}

StorePtr connect_tcp(const Plan& plan, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(plan.port);
  options.isServer = plan.serve;
  options.waitWorkers = false;
  options.timeout = timeout;
  // The store owns the listener, probably even if its constructor throws: leaking a descriptor is
  // better than closing it twice.
  if (plan.serve) options.masterListenFd = listen_at(plan.host, plan.port).release();
  return c10::make_intrusive<c10d::TCPStore>(plan.host, options);
}

}  // namespace

StorePtr open_tcp_store(const Plan& plan, std::chrono::milliseconds timeout) {
  if (!plan.serve) return connect_tcp(plan, timeout);
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  StorePtr& store = served_store(plan);
  if (!store) store = connect_tcp(plan, timeout);
  return store;
}

}  // namespace paceline::distributed
