#pragma once

#include <functional>
#include <list>
#include <optional>
#include <string>
#include <thread>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "distributed/debug/http_request.h"

namespace paceline::distributed {

// Of a listening socket.
inline constexpr int kBacklog = 128;

struct HttpResponse {
  int status = 200;
  std::string type = "text/plain";
  std::string body{};
};

// Answers HTTP requests at a listening socket, one at a time, on a thread of its own. Clients that
// are slow to send a request or to read an answer hold up nobody else.
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
  struct Connection {
    base::UniqueFd socket;
    base::Deadline deadline;  // to send the request, or to read the answer
    std::string received{};
    std::string unsent{};  // of the answer
  };

  void serve() const;
  void accept(std::list<Connection>& connections) const;
  // Goes on with a connection that is ready; false once it is over.
  bool advance(Connection& connection) const;
  // The response to what was received; nullopt until that is a whole request.
  std::optional<HttpResponse> respond(const std::string& received) const;

  base::UniqueFd listener_;
  base::UniqueFd stop_;  // readable once the server stops
  Answer answer_;
  pid_t process_;
  std::thread thread_;
};

}  // namespace paceline::distributed
