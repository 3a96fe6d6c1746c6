#include <paceline/record.h>

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include <paceline/debug.h>
#include <paceline/distributed.h>
#include <paceline/log.h>

#include "base/environment.h"
#include "distributed/process_state.h"
#include "distributed/spawn_calls.h"
#include "distributed/translate.h"
#include "launch/error_file.h"

namespace paceline::detail {
namespace {

void log_to_stderr(LogLevel level, std::string_view message) {
  if (level == LogLevel::debug) return;
  constexpr std::string_view kLevels[] = {"debug", "info", "warning", "error"};
  const std::string line =
      fmt::format("paceline {}: {}\n", kLevels[static_cast<std::size_t>(level)], message);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

std::optional<int> last_node() {
  auto& state = distributed::ProcessState::instance();
  const std::lock_guard lock(state.mutex);
  return state.last_node ? state.last_node : base::environment().node_rank;
}

void tell_launcher(const std::string& text, const std::vector<int>& blamed) noexcept {
  auto& state = distributed::ProcessState::instance();
  try {
    const auto& path = base::environment().error_file;
    if (!path) return;
    launch::write_error_file(*path, text, state.numbered_by_launcher ? blamed : std::vector<int>(),
                             last_node());
    state.error_reported = true;
  } catch (const std::exception& error) {
    log_to_stderr(LogLevel::warning, error.what());
  }
}

// A rank that goes on after a failure has ended it; the launcher would take its error for the cause
// of a later one.
void withdraw_report() noexcept {
  auto& state = distributed::ProcessState::instance();
  if (!std::exchange(state.error_reported, false)) return;
  ::unlink(base::environment().error_file->c_str());
}

// As PyTorch's worker_main does. Training goes on without it: it only helps to debug.
std::optional<DebugServer> serve_if_asked() {
  try {
    const auto& path = base::environment().worker_server_socket;
    if (path) return start_debug_server({.socket = *path});
  } catch (const std::exception& error) {
    log_to_stderr(LogLevel::warning, fmt::format("TORCH_WORKER_SERVER_SOCKET: {}", error.what()));
  }
  return std::nullopt;
}

std::vector<int> blamed_by_current_exception() {
  try {
    throw;
  } catch (const PeerError& error) {
    return error.ranks();
  } catch (...) {
    return {};
  }
}

// Returns or throws as the function of spawn did if the body has called it.
int run(const std::function<int()>& body) {
  auto& calls = distributed::SpawnCalls::instance();
  int code = 0;
  try {
    code = body();
  } catch (const distributed::SpawnedFunctionEnded&) {
    // `failure` says how.
  }
  if (const auto failure = std::exchange(calls.failure, nullptr)) std::rethrow_exception(failure);
  return code;
}

}  // namespace

int record(const std::function<int()>& body) {
  auto& state = distributed::ProcessState::instance();
  auto& calls = distributed::SpawnCalls::instance();
  if (calls.exit_code) return *calls.exit_code;
  set_log_callback(log_to_stderr);
  withdraw_report();
  // Under a launcher stdout is a pipe, which would be fully buffered and delay lines.
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const auto debug_server = serve_if_asked();
  state.enter_record();
  int code = 1;
  try {
    code = run(body);
    state.exit_record("");
  } catch (...) {
    const std::string text = distributed::current_exception_text();
    state.exit_record(text);
    tell_launcher(text, blamed_by_current_exception());
    log_to_stderr(LogLevel::error, text);
  }
  set_log_callback({});
  std::fflush(stdout);
  std::fflush(stderr);
  if (calls.called_function && !state.in_record()) calls.exit_code = code;
  return code;
}

}  // namespace paceline::detail
