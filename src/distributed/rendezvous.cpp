#include "distributed/rendezvous.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <charconv>
#include <map>
#include <memory>
#include <optional>
#include <string_view>

#include "base/errno_error.h"
#include "distributed/translate.h"

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
                     "' is none of env://, tcp://host:port, file:///path");
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

// The first that is said of: the option, the URL, the environment.
int resolve(int option, const Url& url, const char* key, std::optional<int> variable,
            const char* variable_name, const std::string& method) {
  if (option >= 0) return option;
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

void read_environment(const base::Environment& environment, Plan& plan) {
  if (environment.store_fd) {
    plan.means = Plan::Means::inherited;
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
  plan.serve = plan.rank == 0 && !environment.use_agent_store;
}

struct AddressListDeleter {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

// Bound to the address given and no other; a TCPStore left to itself listens on all.
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

c10::intrusive_ptr<c10d::Store> connect_tcp(const Plan& plan, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(plan.port);
  options.isServer = plan.serve;
  options.waitWorkers = false;
  options.timeout = timeout;
  base::UniqueFd listener;
  if (plan.serve) {
    listener = listen_at(plan.host, plan.port);
    options.masterListenFd = listener.get();
  }
  auto store = translate(
      fmt::format("rank {} cannot reach the rendezvous at {}:{}", plan.rank, plan.host, plan.port)
          .c_str(),
      [&] { return c10::make_intrusive<c10d::TCPStore>(plan.host, options); });
  listener.release();  // the store's server owns it now
  return store;
}

c10::intrusive_ptr<c10d::Store> open_file(const std::string& path, int size) {
  return translate(("cannot use " + path + " for the rendezvous").c_str(),
                   [&] { return c10::make_intrusive<c10d::FileStore>(path, size); });
}

void take_links(const base::Environment& environment, Rendezvous& result) {
  const std::size_t expected = result.rank == 0 ? static_cast<std::size_t>(result.size) - 1 : 1;
  if (environment.links.size() != expected) {
    throw UsageError(fmt::format("PACELINE_LINKS names {} descriptors, rank {} of {} needs {}",
                                 environment.links.size(), result.rank, result.size, expected));
  }
  for (const int fd : environment.links) {
    if (::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
      throw UsageError(
          fmt::format("PACELINE_LINKS names descriptor {}, which is not open: start "
                      "this program directly under `paceline run`, or through "
                      "something that does not close descriptors",
                      fd));
    }
    result.links.emplace_back(fd);
  }
}

}  // namespace

Plan plan_rendezvous(const InitOptions& options, const base::Environment& environment) {
  Plan plan;
  Url url;
  if (options.store) {
    plan.means = Plan::Means::given_store;
    if (options.rank < 0 || options.world_size < 0) {
      throw UsageError("init_process_group with a store needs .rank and .world_size");
    }
  } else {
    url = parse_url(options.init_method);
    const bool unlaunched =
        !environment.rank && !environment.world_size && options.rank < 0 && options.world_size < 0;
    if (url.scheme == "env" && unlaunched) return plan;
  }
  plan.rank = resolve(options.rank, url, "rank", environment.rank, "RANK", options.init_method);
  plan.size = resolve(options.world_size, url, "world_size", environment.world_size, "WORLD_SIZE",
                      options.init_method);
  if (plan.rank >= plan.size) {
    throw UsageError(fmt::format("rank {} of a world of {}: ranks run from 0 to {}", plan.rank,
                                 plan.size, plan.size - 1));
  }
  if (options.store) return plan;
  if (url.scheme == "env") {
    read_environment(environment, plan);
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
                      const base::Environment& environment, bool first) {
  Rendezvous result{plan.rank, plan.size, nullptr, {}, ""};
  switch (plan.means) {
    case Plan::Means::given_store:
      result.store = options.store;
      break;
    case Plan::Means::alone:
      result.store = c10::make_intrusive<c10d::HashStore>();
      break;
    case Plan::Means::inherited:
      result.store = open_file(fmt::format("/proc/self/fd/{}", *environment.store_fd), plan.size);
      if (first && plan.size > 1) take_links(environment, result);
      result.host = "127.0.0.1";
      break;
    case Plan::Means::tcp:
      result.store = connect_tcp(plan, options.timeout);
      if (is_loopback(plan.host)) result.host = plan.host;
      break;
    case Plan::Means::file:
      result.store = open_file(plan.path, plan.size);
      break;
  }
  result.store->setTimeout(options.timeout);
  return result;
}

}  // namespace paceline::distributed
