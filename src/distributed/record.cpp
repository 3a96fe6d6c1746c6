#include <paceline/record.h>

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include <paceline/debug.h>
#include <paceline/distributed.h>
#include <paceline/log.h>

#include "base/environment.h"
#include "base/log.h"
#include "base/write_without_blocking.h"
#include "distributed/process_state.h"
#include "distributed/spawn_calls.h"
#include "distributed/translate.h"
#include "launch/error_file.h"
#include "launch/job_result.h"

namespace paceline::detail {
namespace {

std::string line_of(LogLevel level, std::string_view message) {
  return fmt::format("paceline {}: {}\n", base::name_of(level), message);
}

// A wait logs too, and must keep its deadline if nobody reads stderr.
void log_to_stderr(LogLevel level, std::string_view message) {
  if (level == LogLevel::debug) return;
  base::write_without_blocking(STDERR_FILENO, line_of(level, message));
}

void print_error(const std::string& text) {
  const std::string line = line_of(LogLevel::error, text);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

std::optional<int> last_node() {
  auto& state = distributed::ProcessState::instance();
  const std::lock_guard lock(state.mutex);
  return state.last_node ? state.last_node : base::environment().node_rank;
}

// Returns where, which is in memory if the file cannot be written, as on a full disk.
std::filesystem::path write_report(const std::filesystem::path& path,
                                   const launch::ErrorFile& error) {
  try {
    launch::write_error_file(path, error, last_node());
    return path;
  } catch (const Error& failure) {
    const int memory = base::environment().error_fd.value_or(-1);
    if (!launch::is_error_memory(memory)) throw;
    log_to_stderr(LogLevel::warning, failure.what());
    launch::write_error_file(launch::error_memory_path(memory), error, last_node());
    return launch::error_memory_path(memory);
  }
}

void tell_launcher(launch::ErrorFile error) noexcept {
  auto& state = distributed::ProcessState::instance();
  if (state.is_forked_within_record()) return;  // the error file is the rank's
  try {
    const auto path = distributed::error_file();
    if (!path) return;
    if (!state.numbered_by_launcher) error.blamed_ranks.clear();
    state.error_report = write_report(*path, error);
  } catch (const UsageError&) {
    // A variable cannot be read, and the text is about that.
  } catch (const std::exception& failure) {
    log_to_stderr(LogLevel::warning, failure.what());
  }
}

// A rank that goes on after a failure has ended it; the launcher would take its error for the cause
// of a later one.
void withdraw_report() noexcept {
  auto& state = distributed::ProcessState::instance();
  const auto path = std::exchange(state.error_report, {});
  std::error_code error;
  if (path.empty() || (std::filesystem::remove(path, error), !error)) return;
  // In memory it only gets empty again: what says that spawn's function was called stays.
  const bool has_reached_call = distributed::SpawnCalls::instance().called_function;
  std::filesystem::resize_file(path, has_reached_call ? 1 : 0, error);
}

// As PyTorch's worker_main does. Training goes on without it: it only helps to debug.
std::optional<DebugServer> serve_if_asked() {
  std::optional<std::string> path;
  try {
    path = base::environment().worker_server_socket;
  } catch (const UsageError&) {
    return std::nullopt;  // of another variable: init_process_group throws it too
  }
  try {
    if (path) return start_debug_server({.socket = *path});
  } catch (const std::exception& error) {
    log_to_stderr(LogLevel::warning, fmt::format("TORCH_WORKER_SERVER_SOCKET: {}", error.what()));
  }
  return std::nullopt;
}

launch::ErrorFile describe_current_exception(const std::string& text) {
  launch::ErrorFile described{text};
  try {
    throw;
  } catch (const PeerError& error) {
    described.blamed_ranks = error.ranks();
    described.is_timeout = dynamic_cast<const Timeout*>(&error) != nullptr;
  } catch (const Error& error) {
    // Gloo does not say whose connection has ended.
    const bool is_gloo =
        std::string_view(error.what()).find("gloo/transport/") != std::string::npos;
    if (is_gloo) described.blamed_ranks = {launch::kUnknownRank};
  } catch (...) {
    // It is about no other rank.
  }
  return described;
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
    // Before the other ranks fail because of it. They do not wait for print_error, which blocks if
    // nobody reads.
    tell_launcher(describe_current_exception(text));
    state.exit_record(text);
    print_error(text);
  }
  if (!state.in_record()) state.end_job(launch::is_failure(W_EXITCODE(code, 0)));
  set_log_callback({});
  std::fflush(stdout);
  std::fflush(stderr);
  if (calls.called_function && !state.in_record()) calls.exit_code = code;
  return code;
}

}  // namespace paceline::detail
