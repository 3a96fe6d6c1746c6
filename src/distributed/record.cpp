#include <paceline/record.h>

#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <string>

#include <paceline/distributed.h>
#include <paceline/log.h>

#include "base/environment.h"
#include "distributed/process_state.h"
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

void tell_launcher(const std::string& text, const std::vector<int>& blamed) noexcept {
  try {
    const auto& path = base::environment().error_file;
    if (path) launch::write_error_file(*path, text, blamed);
  } catch (const std::exception& error) {
    log_to_stderr(LogLevel::warning, error.what());
  }
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

}  // namespace

int record(const std::function<int()>& body) {
  auto& state = distributed::ProcessState::instance();
  set_log_callback(log_to_stderr);
  // Under a launcher stdout is a pipe, which would be buffered in full and hold a line back for
  // long.
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  state.enter_record();
  int code = 1;
  try {
    code = body();
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
  return code;
}

}  // namespace paceline::detail
