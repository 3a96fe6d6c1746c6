#include "distributed/debug/handlers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/control_plane/Handlers.hpp>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/state_source.h"
#include "distributed/place.h"
#include "distributed/process_state.h"

namespace paceline::distributed {
namespace {

namespace control = c10d::control_plane;
using Json = nlohmann::ordered_json;

class HandlerRequest final : public control::Request {
 public:
  explicit HandlerRequest(const HttpRequest& request) : request_(request) {}
  const std::string& body() const override { return request_.body; }
  const std::multimap<std::string, std::string>& params() const override { return request_.params; }

 private:
  const HttpRequest& request_;
};

class HandlerResponse final : public control::Response {
 public:
  void setContent(std::string&& content, const std::string& type) override {
    response.body = std::move(content);
    response.type = type;
  }
  void setStatus(int status) override { response.status = status; }

  HttpResponse response;
};

bool has_handler(const std::string& name) {
  const auto names = control::getHandlerNames();
  return std::ranges::find(names, name) != names.end();
}

// Not if there is one: PyTorch's own, or that of another copy of the library in the process.
void add_handler(const char* name, std::string (*describe)(), const char* type) {
  if (has_handler(name)) return;
  control::registerHandler(name, [=](const control::Request&, control::Response& response) {
    response.setContent(describe(), type);
    response.setStatus(200);
  });
}

HttpResponse call(const std::string& name, const HttpRequest& request) {
  if (!has_handler(name)) {
    return {404, "text/plain",
            fmt::format("no handler {}; there are {}\n", name,
                        fmt::join(control::getHandlerNames(), ", "))};
  }
  HandlerResponse response;
  control::getHandler(name)(HandlerRequest(request), response);
  return std::move(response.response);
}

void describe_world(Json& json) {
  auto& state = ProcessState::instance();
  const std::unique_lock lock(state.mutex, std::try_to_lock);
  if (!lock || !state.world) return;
  const auto& world = *state.world;
  const Place place = place_in(&world);
  json["rank"] = world.group->getRank();
  json["world_size"] = world.group->getSize();
  json["backend"] = world.backend;
  json["node"] = {{"rank", place.node},
                  {"nodes", world.topology->nodes()},
                  {"local_rank", place.local_rank},
                  {"local_world_size", place.local_size}};
}

void put_objects(Json& json, const char* kind) {
  json[kind] = Json::array();
  for (const std::string& text : base::StateSource::describe_all(kind)) {
    json[kind].push_back(Json::parse(text, nullptr, false));
  }
}

}  // namespace

std::string describe_process() {
  Json json{{"pid", ::getpid()}};
  describe_world(json);
  put_objects(json, "groups");
  put_objects(json, "steps");
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

void register_debug_handlers() {
  static std::once_flag once;
  std::call_once(once, [] {
    add_handler("paceline_state", &describe_process, "application/json");
    add_handler("dump_traceback", &describe_threads, "text/plain");
  });
}

HttpResponse call_handler(const HttpRequest& request) {
  constexpr std::string_view kPrefix = "/handler/";
  try {
    if (request.method == "GET" && (request.path == "/" || request.path == kPrefix)) {
      return {200, "application/json", Json(control::getHandlerNames()).dump()};
    }
    if (request.method == "POST" && request.path.starts_with(kPrefix)) {
      return call(request.path.substr(kPrefix.size()), request);
    }
    return {404, "text/plain", "GET /handler/ lists handlers, POST /handler/NAME calls one\n"};
  } catch (const std::exception& error) {
    return {500, "text/plain", fmt::format("the handler threw: {}\n", error.what())};
  }
}

}  // namespace paceline::distributed
