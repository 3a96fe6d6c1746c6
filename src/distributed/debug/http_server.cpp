#include "distributed/debug/http_server.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <new>
#include <string_view>
#include <utility>
#include <vector>

#include "base/errno_error.h"
#include "base/start_thread.h"

namespace paceline::distributed {
namespace {

// For a client to send its request, or to read the answer.
constexpr std::chrono::seconds kPatience{10};
// One more takes the place of the oldest.
constexpr std::size_t kMaxConnections = 16;
constexpr std::string_view kEndOfHead = "\r\n\r\n";

const char* reason(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 503:
      return "Service Unavailable";
    default:
      return status < 500 ? "Bad Request" : "Internal Server Error";
  }
}

std::string to_text(const HttpResponse& response) {
  return fmt::format(
      "HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}",
      response.status, reason(response.status), response.type, response.body.size(), response.body);
}

// As poll() takes it.
int time_left(const base::Deadline& deadline) {
  return static_cast<int>(deadline.remaining().count());
}

}  // namespace

HttpServer::HttpServer(base::UniqueFd listener, Answer answer)
    : listener_(std::move(listener)),
      stop_(::eventfd(0, EFD_CLOEXEC)),
      answer_(std::move(answer)),
      process_(::getpid()) {
  if (!stop_) throw base::errno_error("cannot make an eventfd");
  thread_ = base::start_thread([this] { serve(); });
}

HttpServer::~HttpServer() {
  if (process_ != ::getpid()) {
    static_cast<void>(new (std::nothrow) std::thread(std::move(thread_)));
    return;
  }
  ::eventfd_write(stop_.get(), 1);
  thread_.join();
}

void HttpServer::serve() const {
  std::list<Connection> connections;  // the oldest first
  while (true) {
    std::vector<pollfd> polls{{stop_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const Connection& one : connections) {
      const short events = one.unsent.empty() ? POLLIN : POLLOUT;
      polls.push_back({one.socket.get(), events, 0});
    }
    const int left = connections.empty() ? -1 : time_left(connections.front().deadline);
    const int ready = ::poll(polls.data(), polls.size(), left);
    if (ready < 0) continue;
    if (polls[0].revents != 0) return;
    // Only then: during a long answer to one client, others may have sent theirs.
    if (ready == 0) connections.pop_front();
    auto polled = polls.begin() + 2;
    std::erase_if(connections,
                  [&](Connection& one) { return (polled++)->revents != 0 && !advance(one); });
    if (polls[1].revents != 0) accept(connections);
  }
}

void HttpServer::accept(std::list<Connection>& connections) const {
  base::UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket) {
    if (connections.size() == kMaxConnections) connections.pop_front();
    connections.push_back({std::move(socket), base::Deadline::after(kPatience)});
  } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
    pollfd stop{stop_.get(), POLLIN, 0};
    ::poll(&stop, 1, 100);
  }
}

bool HttpServer::advance(Connection& connection) const {
  if (connection.unsent.empty()) {
    std::array<char, 4096> buffer{};
    const ssize_t count = ::recv(connection.socket.get(), buffer.data(), buffer.size(), 0);
    if (count <= 0) return count < 0 && (errno == EAGAIN || errno == EINTR);
    connection.received.append(buffer.data(), static_cast<std::size_t>(count));
    const auto response = respond(connection.received);
    if (!response) {
      return connection.received.size() <= kLongestHead ||
             connection.received.find(kEndOfHead) != std::string::npos;
    }
    connection.unsent = to_text(*response);
    connection.deadline = base::Deadline::after(kPatience);
  }
  const ssize_t count = ::send(connection.socket.get(), connection.unsent.data(),
                               connection.unsent.size(), MSG_NOSIGNAL);
  if (count < 0) return errno == EAGAIN || errno == EINTR;
  connection.unsent.erase(0, static_cast<std::size_t>(count));
  return !connection.unsent.empty();
}

std::optional<HttpResponse> HttpServer::respond(const std::string& received) const {
  const std::size_t end = received.find(kEndOfHead);
  if (end == std::string::npos) return std::nullopt;
  auto request = parse_head(std::string_view(received).substr(0, end));
  if (!request || request->body_size > kLongestBody) {
    return HttpResponse{400, "text/plain", "malformed request, or one that is too long\n"};
  }
  const std::size_t begin = end + kEndOfHead.size();
  if (received.size() - begin < request->body_size) return std::nullopt;
  request->body = received.substr(begin, request->body_size);
  return answer_(*request);
}

}  // namespace paceline::distributed
