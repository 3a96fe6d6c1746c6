#include "distributed/rendezvous/tcp_store.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <paceline/error.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

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
        "rank 0 cannot listen at {} for the rendezvous (does another job use the port, or "
        "another process of this job, as rank 0 of an earlier world?)",
        place));
  }
  return socket;
}

// Rank 0's stores. A store outlives its world: a rank that is faster to the next world would
// connect to the server of the last one just before it ends. So the last ones are kept, and those
// at ports of their own choice. A forked child has none of them.
class ServedStores {
 public:
  static ServedStores& instance() {
    static auto* const stores = new ServedStores;
    return *stores;
  }
  template <typename Make>
  StorePtr find_or_make(const base::Address& address, bool is_chosen, Make make) {
    const std::lock_guard lock(mutex_);
    const std::string place = address.to_string();
    const auto found = std::ranges::find_if(stores_, [&](const Served& one) {
      return one.process == ::getpid() && one.address == place;
    });
    if (found != stores_.end()) {
      std::rotate(found, found + 1, stores_.end());
      return stores_.back().store;
    }
    stores_.push_back({::getpid(), place, is_chosen, make()});
    StorePtr made = stores_.back().store;
    drop_old();
    return made;
  }

 private:
  struct Served {
    pid_t process;
    std::string address;
    bool is_chosen;
    StorePtr store;
  };

  // Never a parent's, whose thread this process does not have.
  void drop_old() {
    constexpr int kKept = 2;
    int newer = 0;
    for (auto one = stores_.end(); one != stores_.begin();) {
      --one;
      if (one->process != ::getpid() || one->is_chosen || ++newer <= kKept) continue;
      one = stores_.erase(one);
    }
  }

  std::mutex mutex_;
  std::vector<Served> stores_;  // in the order of their last use
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

// Where the launcher does not say whether ranks are on other machines.
void warn_of_loopback(const Plan& plan, const base::Address& address) {
  const bool is_known = plan.one_machine || plan.size == 1 || base::names_loopback(plan.host);
  if (is_known || !address.is_loopback()) return;
  base::log(LogLevel::warning,
            "rank 0: {} resolves to {} on this machine (/etc/hosts), where ranks on other machines "
            "cannot reach it: if there are any, use this machine's address in the network as "
            "MASTER_ADDR or in the init_method",
            plan.host, address.host());
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
  return ServedStores::instance().find_or_make(address, false, [&] {
    warn_of_loopback(plan, address);
    const std::string place = base::join_host_port(plan.host, plan.port);
    return make_tcp_store(plan, timeout, listen_at(address, place).release());
  });
}

int serve_at_free_port(const base::Address& address, std::chrono::milliseconds timeout) {
  auto& stores = ServedStores::instance();
  StorePtr store = stores.find_or_make(address.with_port(0), true, [&] {
    base::UniqueFd listener = listen_at(address.with_port(0), address.host());
    Plan plan;
    plan.host = address.host();
    plan.port = base::local_address(listener.get()).port();
    return make_tcp_store(plan, timeout, listener.release());
  });
  const int port = static_cast<const c10d::TCPStore&>(*store).getPort();
  stores.find_or_make(address.with_port(port), true, [&] { return store; });
  return port;
}

}  // namespace paceline::distributed
