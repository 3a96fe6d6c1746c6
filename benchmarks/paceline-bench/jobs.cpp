#include "jobs.h"

#include <fmt/format.h>

#include <csignal>
#include <filesystem>

#include "base/malloc_thresholds.h"
#include "launch/job.h"
#include "launch/report.h"
#include "launch/signal_forwarding.h"

namespace paceline::bench {
namespace {

// Cuts the standard output of rank 0 into the lines that are results.
class ResultReader {
 public:
  explicit ResultReader(const std::function<void(const Result&)>& on_result)
      : on_result_(on_result) {}

  void feed(std::string_view bytes) {
    pending_ += bytes;
    for (std::size_t end; (end = pending_.find('\n')) != std::string::npos;) {
      on_result_(from_line(pending_.substr(0, end)));
      pending_.erase(0, end + 1);
    }
  }

 private:
  const std::function<void(const Result&)>& on_result_;
  std::string pending_;
};

}  // namespace

int run_ranks(const std::vector<std::string>& arguments, int ranks, int threads,
              const std::function<void(const Result&)>& on_result) {
  ResultReader reader(on_result);
  launch::JobSpec spec;
  spec.processes = ranks;
  spec.command = {std::filesystem::read_symlink("/proc/self/exe"), "--worker"};
  spec.command.insert(spec.command.end(), arguments.begin(), arguments.end());
  spec.environment = base::malloc_variables();  // as under paceline run
  spec.environment["OMP_NUM_THREADS"] = std::to_string(threads);
  constexpr int kSignals[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT};
  launch::SignalForwarding signals(kSignals);
  spec.signals = &signals;
  spec.output = [&](int rank, launch::Stream stream, std::string_view bytes) {
    if (rank == 0 && stream == launch::Stream::out) {
      reader.feed(bytes);
    } else {
      fmt::print(stderr, "{}", bytes);
    }
  };
  const launch::JobResult result = launch::run_job(spec);
  fmt::print(stderr, "{}", launch::failure_report(result));
  return result.exit_code();
}

}  // namespace paceline::bench
