#include "distributed/rendezvous/tcp_store.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <paceline/error.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/address.h"
#include "base/deadline.h"
#include "base/errno_error.h"
#include "base/log.h"
#include "base/unique_fd.h"

namespace paceline::distributed {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Binds one address only; a TCPStore by itself listens on all addresses.
base::UniqueFd listen_at(const base::Address& address, const std::string& place) {
  base::UniqueFd socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  if (!socket || ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      ::bind(socket.get(), address.data(), address.size()) != 0 ||
      ::listen(socket.get(), 4096) != 0) {
    throw base::errno_error(fmt::format(
        "rank 0 cannot listen at {} for the rendezvous (is another job using the port?)", place));
  }
  return socket;
}

// Rank 0's stores, for as long as the process lives: a rank that is faster to the next world would
// connect to the server of the last one just before it ends. A forked child has none of them.
class ServedStores {
 public:
  static ServedStores& instance() {
    static auto* const stores = new ServedStores;
    return *stores;
  }
  template <typename Make>
  StorePtr find_or_make(const base::Address& address, Make make) {
    const std::lock_guard lock(mutex_);
    StorePtr& store = stores_[Key(::getpid(), address.to_string())];
    if (!store) store = make();
    return store;
  }

 private:
  using Key = std::pair<pid_t, std::string>;
  std::mutex mutex_;
  std::map<Key, StorePtr> stores_;
};

// A cluster may know the name of a machine only a while after it has started.
void await_name(const std::string& host, std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kLongest{60'000};
  constexpr std::chrono::milliseconds kPause{200};
  const auto limit = base::Deadline::after(std::min(timeout, kLongest));
  for (bool is_reported = false;;) {
    try {
      base::resolve(host, 0);
      return;
    } catch (const UsageError& error) {
      if (limit.expired()) throw;
      if (!std::exchange(is_reported, true)) {
        base::log(LogLevel::warning, "rank 0: {}; trying again for {} s", error.what(),
                  limit.budget().count() / 1000.0);
      }
    }
    std::this_thread::sleep_for(std::min(kPause, limit.remaining()));
  }
}

// `listener`: if this rank serves the store.
StorePtr make_tcp_store(const Plan& plan, std::chrono::milliseconds timeout,
                        std::optional<int> listener) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(plan.port);
  options.isServer = listener.has_value();
  options.waitWorkers = false;
  options.timeout = timeout;
  options.masterListenFd = listener;
  return c10::make_intrusive<c10d::TCPStore>(plan.host, options);
}

}  // namespace

// The store owns the listener, probably even if its constructor throws: leaking a descriptor is
// better than closing it twice.
StorePtr open_tcp_store(const Plan& plan, std::chrono::milliseconds timeout) {
  if (!plan.serve) return make_tcp_store(plan, timeout, std::nullopt);
  await_name(plan.host, timeout);
  const auto find_address =
      plan.several_machines ? base::listening_address_for_machines : base::listening_address;
  const base::Address address = find_address(plan.host, plan.port);
  return ServedStores::instance().find_or_make(address, [&] {
    const std::string place = base::join_host_port(plan.host, plan.port);
    return make_tcp_store(plan, timeout, listen_at(address, place).release());
  });
}

int serve_at_free_port(const base::Address& address, std::chrono::milliseconds timeout) {
  auto& stores = ServedStores::instance();
  StorePtr store = stores.find_or_make(address.with_port(0), [&] {
    base::UniqueFd listener = listen_at(address.with_port(0), address.host());
    Plan plan;
    plan.host = address.host();
    plan.port = base::local_address(listener.get()).port();
    return make_tcp_store(plan, timeout, listener.release());
  });
  const int port = static_cast<const c10d::TCPStore&>(*store).getPort();
  stores.find_or_make(address.with_port(port), [&] { return store; });
  return port;
}

}  // namespace paceline::distributed
