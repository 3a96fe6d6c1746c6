#include "distributed/debug/http_server.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <limits>
#include <new>
#include <utility>

#include "base/errno_error.h"
#include "base/signals_blocked.h"

namespace paceline::distributed {
namespace {

// For a client to send its request, or to read the answer.
constexpr std::chrono::seconds kPatience{10};

const char* reason(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 404:
      return "Not Found";
    case 503:
      return "Service Unavailable";
    default:
      return status < 500 ? "Bad Request" : "Internal Server Error";
  }
}

}  // namespace

HttpServer::HttpServer(base::UniqueFd listener, Answer answer)
    : listener_(std::move(listener)),
      stop_(::eventfd(0, EFD_CLOEXEC)),
      answer_(std::move(answer)),
      process_(::getpid()) {
  if (!stop_) throw base::errno_error("cannot make an eventfd");
  const base::SignalsBlocked blocked;
  thread_ = std::thread([this] { serve(); });
}

HttpServer::~HttpServer() {
  if (process_ != ::getpid()) {
    static_cast<void>(new (std::nothrow) std::thread(std::move(thread_)));
    return;
  }
  ::eventfd_write(stop_.get(), 1);
  thread_.join();
}

bool HttpServer::wait(int socket, short events, const base::Deadline& deadline) const {
  std::array<pollfd, 2> polls{pollfd{socket, events, 0}, pollfd{stop_.get(), POLLIN, 0}};
  while (true) {
    const auto left = std::min<std::chrono::milliseconds::rep>(deadline.remaining().count(),
                                                               std::numeric_limits<int>::max());
    const int ready = ::poll(polls.data(), polls.size(), static_cast<int>(left));
    if (ready < 0 && errno == EINTR) continue;
    return ready > 0 && polls[1].revents == 0;
  }
}

void HttpServer::serve() const {
  const auto never = base::Deadline::after(base::Deadline::kLongest);
  while (wait(listener_.get(), POLLIN, never)) {
    const base::UniqueFd socket(
        ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
      serve_one(socket.get());
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      wait(-1, 0, base::Deadline::after(std::chrono::milliseconds(100)));
    }
  }
}

bool HttpServer::read_more(int socket, std::string& text, const base::Deadline& deadline) const {
  std::array<char, 4096> buffer{};
  while (wait(socket, POLLIN, deadline)) {
    const ssize_t count = ::recv(socket, buffer.data(), buffer.size(), 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (count > 0) text.append(buffer.data(), static_cast<std::size_t>(count));
    return count > 0;
  }
  return false;
}

void HttpServer::serve_one(int socket) const {
  const auto deadline = base::Deadline::after(kPatience);
  std::string text;
  std::size_t end = 0;
  while ((end = text.find("\r\n\r\n")) == std::string::npos) {
    if (text.size() > kLongestHead || !read_more(socket, text, deadline)) return;
  }
  auto request = parse_head(std::string_view(text).substr(0, end));
  if (!request || request->body_size > kLongestBody) {
    return send(socket, {400, "text/plain", "malformed request, or one that is too long\n"});
  }
  text.erase(0, end + 4);
  while (text.size() < request->body_size) {
    if (!read_more(socket, text, deadline)) return;
  }
  request->body = text.substr(0, request->body_size);
  send(socket, answer_(*request));
}

void HttpServer::send(int socket, const HttpResponse& response) const {
  const std::string text = fmt::format(
      "HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}",
      response.status, reason(response.status), response.type, response.body.size(), response.body);
  const auto deadline = base::Deadline::after(kPatience);
  std::string_view rest = text;
  while (!rest.empty() && wait(socket, POLLOUT, deadline)) {
    const ssize_t count = ::send(socket, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (count < 0 && errno != EAGAIN && errno != EINTR) return;
    if (count > 0) rest.remove_prefix(static_cast<std::size_t>(count));
  }
}

}  // namespace paceline::distributed
