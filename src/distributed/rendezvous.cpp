#include "distributed/rendezvous.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <torch/csrc/distributed/c10d/exception.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <array>
#include <charconv>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <tuple>

#include "base/deadline.h"
#include "base/errno_error.h"
#include "distributed/store_calls.h"
#include "distributed/store_exchange.h"
#include "distributed/translate.h"
#include "shm/membership/rank_set.h"

namespace paceline::distributed {
namespace {

int parse_number(std::string_view text, const std::string& what, int high) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 || value > high) {
    throw UsageError(fmt::format("{}: '{}' is not a whole number from 0 to {}", what, text, high));
  }
  return value;
}

// scheme://rest?key=value&key=value
struct Url {
  std::string scheme;
  std::string rest;
  std::map<std::string, std::string> query;
};

Url parse_url(const std::string& method) {
  const auto colon = method.find("://");
  if (colon == std::string::npos) {
    throw UsageError("init_method '" + method +
                     "' is invalid; expected env://, tcp://host:port or file:///path");
  }
  Url url{method.substr(0, colon), method.substr(colon + 3), {}};
  const auto question = url.rest.find('?');
  if (question == std::string::npos) return url;
  std::string_view query = std::string_view(url.rest).substr(question + 1);
  while (!query.empty()) {
    const std::string_view pair = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(pair.size() + 1, query.size()));
    const auto equals = pair.find('=');
    const std::string key(pair.substr(0, equals));
    if (equals == std::string_view::npos || (key != "rank" && key != "world_size")) {
      throw UsageError(
          fmt::format("init_method '{}': '{}' is neither rank=R nor world_size=N", method, pair));
    }
    url.query[key] = std::string(pair.substr(equals + 1));
  }
  url.rest.resize(question);
  return url;
}

// The first that is set: the option, the URL, the environment.
int resolve(std::optional<int> option, const Url& url, const char* key, std::optional<int> variable,
            const char* variable_name, const std::string& method) {
  if (option) {
    if (*option >= 0) return *option;
    throw UsageError(
        fmt::format("init_process_group({{.{} = {}}}): it must not be negative; leave it "
                    "out to take it from the init_method",
                    key, *option));
  }
  if (const auto found = url.query.find(key); found != url.query.end()) {
    return parse_number(found->second, fmt::format("init_method '{}', {}", method, key), 1 << 20);
  }
  if (variable) return *variable;
  throw UsageError(
      fmt::format("init_process_group does not know the {0}: give .{0}, ?{0}= in the "
                  "init_method, or set {1} (a launcher such as `paceline run` does)",
                  key, variable_name));
}

void read_address(const Url& url, const std::string& method, Plan& plan) {
  const auto colon = url.rest.rfind(':');
  if (colon == std::string::npos || colon == 0) {
    throw UsageError("init_method '" + method + "' is not of the form tcp://host:port");
  }
  plan.host = url.rest.substr(0, colon);
  if (plan.host.size() > 2 && plan.host.front() == '[' && plan.host.back() == ']') {
    plan.host = plan.host.substr(1, plan.host.size() - 2);
  }
  plan.port = parse_number(std::string_view(url.rest).substr(colon + 1),
                           "init_method '" + method + "', port", 65535);
}

// For env:// with neither RANK nor WORLD_SIZE, as an option or a variable.
void check_alone(const base::Environment& environment) {
  if (!environment.other_launcher) return;
  throw UsageError(fmt::format(
      "init_process_group: this looks like one of several processes ({}), but RANK and WORLD_SIZE "
      "are not set, and each process would train alone. Start the program with `paceline run`, or "
      "set {}, MASTER_ADDR=<rank 0's machine> and MASTER_PORT=<a free port there> for each "
      "process. For a process that is to be alone, call init_process_group({{.world_size = 1, "
      ".rank = 0}})",
      environment.other_launcher->found, environment.other_launcher->mapping));
}

void read_environment(const base::Environment& environment, bool first, Plan& plan) {
  if (plan.size == 1) return;  // a world of one needs no rendezvous
  if (environment.store_fd) {
    plan.means = Plan::Means::inherited;
    plan.path = fmt::format("/proc/self/fd/{}", *environment.store_fd);
    plan.take_sockets = first;
    if (first && (plan.rank != environment.rank.value_or(plan.rank) ||
                  plan.size != environment.world_size.value_or(plan.size))) {
      throw UsageError(
          fmt::format("init_process_group was asked for rank {} of {}, but `paceline run` started "
                      "this process as rank {} of {} (RANK, WORLD_SIZE): leave .rank and "
                      ".world_size out, or give an init_method or a store where such ranks meet",
                      plan.rank, plan.size, environment.rank.value_or(plan.rank),
                      environment.world_size.value_or(plan.size)));
    }
    return;
  }
  plan.means = Plan::Means::tcp;
  if (!environment.master_addr || !environment.master_port) {
    throw UsageError(
        fmt::format("env:// with RANK and WORLD_SIZE needs {} too: the address of rank "
                    "0's machine and a free port there",
                    environment.master_addr ? "MASTER_PORT" : "MASTER_ADDR"));
  }
  plan.host = *environment.master_addr;
  plan.port = *environment.master_port;
  plan.agent = environment.use_agent_store;
  plan.serve = plan.rank == 0 && !plan.agent;
}

struct AddressListDeleter {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

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

using StorePtr = c10::intrusive_ptr<c10d::Store>;

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

StorePtr open_tcp(const Plan& plan, std::chrono::milliseconds timeout) {
  if (!plan.serve) return connect_tcp(plan, timeout);
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  StorePtr& store = served_store(plan);
  if (!store) store = connect_tcp(plan, timeout);
  return store;
}

// Whether the file has the format of c10d::FileStore: alternating keys and values, each after its
// length; the first value is a count. FileStore would read other files for ever, or until memory
// runs out.
bool holds_store(int fd) {
  constexpr std::string_view kFirstKey = "refcount/";
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) return false;
  std::array<char, kFirstKey.size()> first{};
  off_t at = 0;
  bool is_key = true;
  for (std::uint32_t length = 0; at < status.st_size; is_key = !is_key) {
    if (::pread(fd, &length, sizeof(length), at) != sizeof(length)) return false;
    at += static_cast<off_t>(sizeof(length));
    if (at == sizeof(length) &&
        (length != first.size() || ::pread(fd, first.data(), first.size(), at) != first.size() ||
         std::string_view(first.data(), first.size()) != kFirstKey)) {
      return false;
    }
    at += static_cast<off_t>(length);
  }
  return at == status.st_size && is_key;
}

// FileStore itself would retry failed calls, and wait for locks.
void check_file(const Plan& plan, const std::string& what, const base::Deadline& deadline) {
  const base::UniqueFd file(
      ::open(plan.path.c_str(), O_RDWR | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0644));
  if (!file) throw base::errno_error("cannot use " + what + " for the rendezvous");
  while (::flock(file.get(), LOCK_SH | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) throw base::errno_error("cannot lock " + what);
    if (deadline.expired()) {
      throw Timeout(fmt::format("{} stayed locked for the timeout of {} s by another process, "
                                "which may be stopped; this is rank {} of {}",
                                what, deadline.budget().count() / 1000.0, plan.rank, plan.size),
                    {}, "connect", 0);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!holds_store(file.get())) {
    throw UsageError(what +
                     " is not a c10d::FileStore: give a path that does not exist yet, or remove "
                     "the file if a killed job left it");
  }
}

// A file outlives killed ranks, whose counters it then has.
void claim_rank(c10d::Store& store, const Plan& plan) {
  if (store.add(fmt::format("claimed/{}", plan.rank), 1) == 1) return;
  throw UsageError(
      fmt::format("file://{} has been joined by a rank {} before: an earlier job that was killed "
                  "left the file, or two processes have the same rank. Remove the file before a "
                  "job starts (rm {})",
                  plan.path, plan.rank, plan.path));
}

StorePtr open_store(const Plan& plan, const StorePtr& given, std::chrono::milliseconds timeout,
                    const std::string& prefix, const base::Deadline& deadline) {
  const auto with_prefix = [&](StorePtr store) {
    store->setTimeout(timeout);
    return c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store));
  };
  switch (plan.means) {
    case Plan::Means::given_store:
      return with_prefix(given);
    case Plan::Means::alone:
      break;
    case Plan::Means::inherited:
      check_file(plan, fmt::format("{} (PACELINE_STORE_FD, from `paceline run`)", plan.path),
                 deadline);
      return with_prefix(c10::make_intrusive<c10d::FileStore>(plan.path, plan.size));
    case Plan::Means::tcp:
      return with_prefix(open_tcp(plan, timeout));
    case Plan::Means::file: {
      check_file(plan, "file://" + plan.path, deadline);
      auto store = with_prefix(c10::make_intrusive<c10d::FileStore>(plan.path, plan.size));
      claim_rank(*store, plan);
      return store;
    }
  }
  return with_prefix(c10::make_intrusive<c10d::HashStore>());
}

// The server of the store, for messages.
std::vector<int> server_of(const Plan& plan) {
  const bool by_rank_0 = plan.means == Plan::Means::tcp && !plan.agent && !plan.serve;
  return by_rank_0 ? std::vector<int>{0} : std::vector<int>{};
}

std::string place_of(const Plan& plan) {
  switch (plan.means) {
    case Plan::Means::given_store:
      return "the store that was given";
    case Plan::Means::tcp:
      return fmt::format("the rendezvous at {}:{}, which {} serves,", plan.host, plan.port,
                         plan.agent ? "the launcher" : "rank 0");
    case Plan::Means::alone:
    case Plan::Means::inherited:
    case Plan::Means::file:
      break;
  }
  return "the rendezvous at file://" + plan.path;
}

// Without rank 0, the others connect in vain. While it is there, the store tells who is lost.
void check_server(const shm::Membership& processes) {
  if (!processes.peers[0].ended()) return;
  shm::RankSet ended;
  for (std::size_t rank = 0; rank < processes.peers.size(); ++rank) {
    if (processes.peers[rank].ended()) ended.insert(static_cast<int>(rank));
  }
  throw_lost({}, ended);
}

void take_sockets(const base::Environment& environment, Rendezvous& result) {
  const std::size_t expected = result.rank == 0 ? static_cast<std::size_t>(result.size) - 1 : 1;
  if (environment.bootstrap_sockets.size() != expected) {
    throw UsageError(
        fmt::format("PACELINE_BOOTSTRAP_SOCKETS names {} descriptors, rank {} of {} needs {}",
                    environment.bootstrap_sockets.size(), result.rank, result.size, expected));
  }
  for (const int fd : environment.bootstrap_sockets) {
    if (::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
      throw UsageError(
          fmt::format("PACELINE_BOOTSTRAP_SOCKETS names descriptor {}, which is not open: start "
                      "this program directly under `paceline run`, or through "
                      "something that does not close descriptors",
                      fd));
    }
    result.sockets.emplace_back(fd);
  }
}

}  // namespace

Plan plan_rendezvous(const InitOptions& options, const base::Environment& environment, bool first) {
  Plan plan;
  Url url;
  if (options.store) {
    plan.means = Plan::Means::given_store;
    if (!options.rank || !options.world_size) {
      throw UsageError("init_process_group with a store needs .rank and .world_size");
    }
  } else {
    url = parse_url(options.init_method);
    const bool unlaunched =
        !environment.rank && !environment.world_size && !options.rank && !options.world_size;
    if (url.scheme == "env" && unlaunched) {
      check_alone(environment);
      return plan;
    }
  }
  plan.rank = resolve(options.rank, url, "rank", environment.rank, "RANK", options.init_method);
  plan.size = resolve(options.world_size, url, "world_size", environment.world_size, "WORLD_SIZE",
                      options.init_method);
  if (plan.size > shm::kMaxWorldSize) {
    throw UsageError(
        fmt::format("a world of {} ranks: 1 to {} are allowed", plan.size, shm::kMaxWorldSize));
  }
  if (plan.rank >= plan.size) {
    throw UsageError(fmt::format("rank {} of a world of {}: ranks run from 0 to {}", plan.rank,
                                 plan.size, plan.size - 1));
  }
  plan.launched = plan.rank == environment.rank && plan.size == environment.world_size;
  if (options.store) return plan;
  if (url.scheme == "env") {
    read_environment(environment, first, plan);
  } else if (url.scheme == "tcp") {
    plan.means = Plan::Means::tcp;
    plan.serve = plan.rank == 0;
    read_address(url, options.init_method, plan);
  } else if (url.scheme == "file") {
    plan.means = Plan::Means::file;
    plan.path = url.rest;
    if (!plan.path.starts_with('/')) {
      throw UsageError("init_method '" + options.init_method +
                       "' needs an absolute path: file:///path");
    }
  } else {
    throw UsageError("init_method '" + options.init_method +
                     "' is none of env://, tcp://host:port, file:///path");
  }
  return plan;
}

Rendezvous rendezvous(const Plan& plan, const InitOptions& options,
                      const base::Environment& environment, int attempt,
                      const shm::Membership* processes) {
  Rendezvous result{plan.rank, plan.size, nullptr, {}, ""};
  // Each attempt and each world of a process has keys of its own in a store that outlives it.
  const std::string prefix =
      fmt::format("paceline/{}/{}", environment.restart_count.value_or(0), attempt);
  const auto deadline = base::Deadline::after(options.timeout);
  const auto too_late = [&] {
    const char* const advice = plan.means == Plan::Means::tcp
                                   ? ": see that it runs and that nothing else holds the port"
                                   : "";
    return Timeout(
        fmt::format("{} did not answer within the timeout of {} s; this is rank {} of {}{}",
                    place_of(plan), deadline.budget().count() / 1000.0, plan.rank, plan.size,
                    advice),
        server_of(plan), "connect", 0);
  };
  try {
    const auto opened = call_store(
        deadline,
        [=, given = options.store, timeout = options.timeout](const auto&) {
          return open_store(plan, given, timeout, prefix, deadline);
        },
        [&] {
          if (processes != nullptr && !server_of(plan).empty()) check_server(*processes);
        });
    if (!opened) throw too_late();
    result.store = *opened;
  } catch (const c10d::TimeoutError&) {
    throw too_late();
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    throw Error(fmt::format("rank {} of {} cannot use {}: {}", plan.rank, plan.size, place_of(plan),
                            current_exception_text()));
  }
  if (plan.take_sockets) take_sockets(environment, result);
  const bool here = plan.means == Plan::Means::alone || plan.means == Plan::Means::inherited;
  if (here) result.host = "127.0.0.1";
  if (is_loopback(plan.host)) result.host = plan.host;
  return result;
}

}  // namespace paceline::distributed
