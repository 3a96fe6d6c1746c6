#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <utility>

#include <paceline/debug.h>
#include <paceline/distributed.h>
#include <paceline/error.h>

#include "base/address.h"
#include "base/environment.h"
#include "base/errno_error.h"
#include "base/unique_fd.h"
#include "distributed/debug/handlers.h"
#include "distributed/debug/http_server.h"
#include "distributed/debug/served_hosts.h"
#include "distributed/debug/unix_listener.h"
#include "distributed/rendezvous/plan.h"
#include "distributed/rendezvous/tcp_store.h"
#include "distributed/store_calls.h"
#include "distributed/translate.h"

namespace paceline {
namespace {

using base::UniqueFd;
using distributed::HttpRequest;
using distributed::HttpResponse;
using distributed::HttpServer;
using distributed::ServedHosts;

UniqueFd listen_at_port(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int unknown = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (unknown != 0) {
    throw UsageError(fmt::format("the debug server's host {:?} cannot be resolved: {}", host,
                                 ::gai_strerror(unknown)));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> address(found, &::freeaddrinfo);
  UniqueFd socket(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  if (!socket || ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      ::bind(socket.get(), address->ai_addr, address->ai_addrlen) != 0 ||
      ::listen(socket.get(), distributed::kBacklog) != 0) {
    throw base::errno_error(
        fmt::format("the debug server cannot listen at {}", base::join_host_port(host, port)));
  }
  return socket;
}

// Under which other machines reach the host.
std::string reachable_name(const std::string& host) {
  const std::string own = host == "::" || host == "0.0.0.0" ? base::host_name() : "";
  return own.empty() ? host : own;
}

// Refuses what a page in a browser may have sent, which would read the answer or have this process
// run a handler.
HttpServer::Answer answer_for(ServedHosts hosts) {
  return [hosts = std::move(hosts)](const HttpRequest& request) -> HttpResponse {
    if (request.is_from_page) {
      return {403, "text/plain", "requests of web pages, which have an Origin, are refused\n"};
    }
    if (!hosts.contains(request.host)) {
      return {403, "text/plain",
              fmt::format("Host {:?} does not name this server; expected {}\n", request.host,
                          hosts.describe())};
    }
    return distributed::call_handler(request);
  };
}

// As PyTorch's start_debug_server does.
void publish(const std::string& address) {
  constexpr std::chrono::seconds kTimeout{30};
  const auto& environment = base::environment();
  if (!environment.master_addr || !environment.master_port) return;
  distributed::Plan plan;
  plan.means = distributed::Plan::Means::tcp;
  plan.rank = get_rank();
  plan.size = get_world_size();
  plan.host = *environment.master_addr;
  plan.port = *environment.master_port;
  plan.serve = plan.rank == 0 && !environment.use_agent_store;
  const auto done = distributed::call_store(base::Deadline::after(kTimeout), [=](const auto&) {
    distributed::translate("writing the debug server's address into the store", [&] {
      auto store = distributed::open_tcp_store(plan, kTimeout);
      c10::make_intrusive<c10d::PrefixStore>("debug_server", store)
          ->set(fmt::format("rank{}", plan.rank), address);
    });
    return true;
  });
  if (done) return;
  throw Timeout(
      fmt::format("the store at {}, in which rank {} publishes its debug server, did "
                  "not answer within {} s",
                  base::join_host_port(plan.host, plan.port), plan.rank, kTimeout.count()),
      {}, "start_debug_server", 0);
}

}  // namespace

struct DebugServer::State {
  std::string path;  // of a Unix socket
  int port = -1;
  std::string address;
  std::unique_ptr<HttpServer> server;
  pid_t process = ::getpid();

  ~State() {
    // While it listens: afterwards the name may be another server's.
    if (!path.empty() && process == ::getpid()) ::unlink(path.c_str());
  }
};

DebugServer::DebugServer(std::unique_ptr<State> state) : state_(std::move(state)) {}
DebugServer::DebugServer(DebugServer&& other) noexcept = default;
DebugServer& DebugServer::operator=(DebugServer&& other) noexcept = default;
DebugServer::~DebugServer() = default;

int DebugServer::port() const {
  return state_ ? state_->port : -1;
}
std::string DebugServer::address() const {
  return state_ ? state_->address : "";
}

DebugServer start_debug_server(const DebugServerOptions& options) {
  if (options.worker_port < 0 || options.worker_port > 65535) {
    throw UsageError(fmt::format("the debug server's worker_port is {}: 0 to 65535 are allowed",
                                 options.worker_port));
  }
  distributed::register_debug_handlers();
  const bool at_path = !options.socket.empty();
  UniqueFd listener = at_path ? distributed::listen_at_path(options.socket)
                              : listen_at_port(options.host, options.worker_port);
  auto state = std::make_unique<DebugServer::State>();
  state->path = state->address = options.socket;
  ServedHosts hosts;
  if (!at_path) {
    const auto bound = base::local_address(listener.get());
    const std::string name = reachable_name(options.host);
    hosts = ServedHosts({options.host, name}, bound);
    state->port = bound.port();
    state->address = "http://" + base::join_host_port(name, state->port);
  }
  state->server = std::make_unique<HttpServer>(std::move(listener), answer_for(std::move(hosts)));
  if (options.publish && !at_path) publish(state->address);
  return DebugServer(std::move(state));
}

}  // namespace paceline
