#pragma once

#include <string>

#include "distributed/debug/http_server.h"

namespace paceline::distributed {

// Registers `paceline_state` and `dump_traceback` with PyTorch's control plane, unless they exist:
// in Python, PyTorch has the second. Does nothing if called again.
void register_debug_handlers();

// Answers as c10d::control_plane::WorkerServer does: GET / and /handler/ list the registered
// handlers, POST /handler/NAME?PARAMS calls one.
HttpResponse call_handler(const HttpRequest& request);

// The state of this process's ranks: an object of JSON. May be called on any thread, and never
// waits for other ranks.
std::string describe_process();
// The threads of this process, by line: their names, and what each waits for in the kernel.
std::string describe_threads();

}  // namespace paceline::distributed
