#include "self_test/job.h"

#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <exception>
#include <nlohmann/json.hpp>
#include <string_view>

#include "launch/clip.h"
#include "launch/job.h"
#include "launch/report.h"
#include "launch/signal_forwarding.h"

namespace paceline::doctor {
namespace {

constexpr int kRanks = 2;

// The deadline is a signal like those of a user, which run_job passes on and then enforces.
class Alarm {
 public:
  explicit Alarm(std::chrono::seconds deadline) {
    ::alarm(static_cast<unsigned>(deadline.count()));
  }
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;
  ~Alarm() { ::alarm(0); }
};

std::string last_line(const launch::RankResult& rank) {
  constexpr std::size_t kLongest = 200;
  return rank.last_lines.empty() ? "" : ": " + launch::clip(rank.last_lines.back(), kLongest);
}

std::string describe_failure(const launch::JobResult& result) {
  const int rank = *result.first_failed();
  const launch::RankResult& failed = result.ranks[static_cast<std::size_t>(rank)];
  if (failed.error) return fmt::format("rank {}: {}", rank, failed.error->message);
  return fmt::format("rank {} {}{}", rank, launch::describe_end(failed.status), last_line(failed));
}

std::string describe_hang(const launch::JobResult& result, std::chrono::seconds deadline) {
  std::string text = fmt::format("two ranks did not end within {} s", deadline.count());
  for (const launch::RankResult& rank : result.ranks) {
    if (!rank.last_lines.empty()) return text + last_line(rank);
  }
  return text;
}

launch::JobSpec make_spec(const std::vector<std::string>& command) {
  launch::JobSpec spec;
  spec.processes = kRanks;
  spec.command = command;
  spec.environment = {{"OMP_NUM_THREADS", "1"}, {"PACELINE_TIMELINE", ""}};
  spec.stop_grace = std::chrono::milliseconds(500);
  return spec;
}

void judge(const launch::JobResult& result, const std::string& output,
           std::chrono::seconds deadline, SelfTest& test) {
  if (result.signal == SIGALRM) {
    test.error = describe_hang(result, deadline);
  } else if (result.signal != 0) {
    test.signal = result.signal;
    test.error = "interrupted";
  } else if (result.first_failed()) {
    test.error = describe_failure(result);
  } else if (test.times = from_line(output); !test.times) {
    test.error = fmt::format("rank 0 wrote no result{}", last_line(result.ranks.front()));
  }
}

}  // namespace

std::string to_line(const Times& times) {
  return nlohmann::json{{"init_ms", times.init_ms}, {"all_reduce_us", times.all_reduce_us}}.dump() +
         "\n";
}

std::optional<Times> from_line(const std::string& line) {
  const auto json = nlohmann::json::parse(line, nullptr, false);
  const auto is_number = [&](const char* name) {
    return json.is_object() && json.contains(name) && json[name].is_number();
  };
  if (!is_number("init_ms") || !is_number("all_reduce_us")) return std::nullopt;
  return Times{json["init_ms"], json["all_reduce_us"]};
}

SelfTest run_self_test(const std::string& backend, const std::vector<std::string>& command,
                       std::chrono::seconds deadline) {
  SelfTest test{.backend = backend};
  std::string output;
  launch::JobSpec spec = make_spec(command);
  spec.output = [&](int rank, launch::Stream stream, std::string_view bytes) {
    if (rank == 0 && stream == launch::Stream::out) output += bytes;
  };
  try {
    ::signal(SIGALRM, SIG_DFL);  // a parent may ignore it, and `signals` leaves out what is ignored
    constexpr int kSignals[] = {SIGALRM, SIGTERM, SIGINT, SIGHUP, SIGQUIT};
    launch::SignalForwarding signals(kSignals);
    const Alarm alarm(deadline);
    spec.signals = &signals;
    judge(launch::run_job(spec), output, deadline, test);
  } catch (const std::exception& error) {
    test.error = error.what();
  }
  return test;
}

}  // namespace paceline::doctor
