#pragma once

#include <functional>
#include <string>
#include <thread>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "distributed/debug/http_request.h"

namespace paceline::distributed {

struct HttpResponse {
  int status = 200;
  std::string type = "text/plain";
  std::string body{};
};

// Answers HTTP requests at a listening socket, one at a time, on a thread of its own. For a few
// requests of trusted clients.
class HttpServer {
 public:
  // Must not throw.
  using Answer = std::function<HttpResponse(const HttpRequest&)>;

  HttpServer(base::UniqueFd listener, Answer answer);
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;
  // Waits for an answer that is under way. In a forked child, which lacks the thread, it only
  // closes the child's descriptors.
  ~HttpServer();

 private:
  void serve() const;
  void serve_one(int socket) const;
  // Whether `socket` is ready for `events` before the deadline, and the server does not stop.
  bool wait(int socket, short events, const base::Deadline& deadline) const;
  bool read_more(int socket, std::string& text, const base::Deadline& deadline) const;
  void send(int socket, const HttpResponse& response) const;

  base::UniqueFd listener_;
  base::UniqueFd stop_;  // readable once the server stops
  Answer answer_;
  pid_t process_;
  std::thread thread_;
};

}  // namespace paceline::distributed
