#include "top_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>

#include <paceline/error.h>

#include "base/errno_error.h"
#include "base/parse.h"
#include "base/printable.h"
#include "help_formatter.h"
#include "parse_seconds.h"
#include "report/json.h"
#include "top/find_job.h"
#include "top/screen.h"
#include "top/terminal.h"
#include "top/watched_job.h"

namespace paceline::app {
namespace {

using namespace std::chrono_literals;
using top::Clock;

// Ranks' records are read more often than shown, so that their ring need not be large.
constexpr std::chrono::milliseconds kBetweenPolls{100};
constexpr std::chrono::milliseconds kShortestInterval{100};
// After this long it is worth a word what the command waits for.
constexpr std::chrono::seconds kLongWait{2};

struct TopOptions {
  top::Target target;
  std::chrono::milliseconds interval{1000};
  bool once = false;
  bool json = false;
  std::string help;  // what to print if help was asked for
};

TopOptions parse_top_options(std::vector<std::string> arguments) {
  TopOptions options;
  std::string process;
  std::string interval;
  CLI::App app("Shows where the time of a training run goes, while it runs.");
  app.formatter(std::make_shared<HelpFormatter>("paceline top [PID] [flags]"));
  app.add_option("PID", process, "A rank, or its launcher (default: the only job of this user)")
      ->type_name("")
      ->group("Job");
  app.add_option("--job", options.target.job, "The job that its launcher calls so (--rdzv-id)")
      ->type_name("NAME")
      ->group("Job");
  app.add_option("--interval", interval, "The time between two judgements (default 1)")
      ->type_name("SECONDS")
      ->group("Output");
  app.add_flag("--once", options.once, "Print one judgement, and exit")->group("Output");
  app.add_flag("--json", options.json, "With --once: as `paceline report --json`")->group("Output");
  app.set_help_flag("-h,--help", "Print this and exit")->group("Other");
  app.footer("It shows the ranks of this machine. Ranks record only while it runs.");
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  try {
    app.parse(arguments);
  } catch (const CLI::CallForHelp&) {
    options.help = app.help();
    return options;
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  if (!process.empty()) options.target.process = base::parse_integer<pid_t>("PID", process, 1);
  if (!interval.empty()) options.interval = parse_seconds("--interval", interval);
  if (options.interval < kShortestInterval) {
    throw UsageError(fmt::format("--interval {}: expected at least 0.1 seconds", interval));
  }
  if (options.target.process && options.target.job) {
    throw UsageError("name a process or a job, not both");
  }
  if (options.json && !options.once) throw UsageError("--json needs --once");
  return options;
}

class Top {
 public:
  explicit Top(const TopOptions& options) : options_(options) {}

  int run() {
    while (find() && watch()) {
    }
    return exit_code_;
  }

 private:
  // Waits for ranks. Returns false if there will be none, or if a signal ends the command.
  bool find() {
    while (!job_) {
      if (watched_ && !may_start_again()) return finish();
      if (const auto key = look()) job_.emplace(*key);
      if (job_ && job_->has_ended()) job_.reset();
      if (!job_ && !(watched_ ? pause() : say_waits("a DistributedDataParallel"))) return false;
    }
    watched_ = true;
    next_ = Clock::now() + options_.interval;
    return true;
  }

  // Between two attempts, a launcher's processes may belong to two jobs.
  std::optional<top::JobKey> look() const {
    try {
      return top::find_job(options_.target);
    } catch (const UsageError&) {
      if (!watched_) throw;
      return std::nullopt;
    }
  }

  // Whether the process that was named is a launcher, which may start ranks again.
  bool may_start_again() const {
    const auto& process = options_.target.process;
    return process && top::process_of(*process) && top::may_train(*process);
  }

  // Returns true once the ranks have ended, false if the command ends.
  bool watch() {
    for (;;) {
      job_->poll();
      if (job_->has_ended()) break;
      if ((Clock::now() >= next_ && show()) || !pause()) return false;
    }
    job_.reset();
    return true;
  }

  // Returns false if a signal ends the command.
  bool pause() {
    const int signal = terminal_.wait(kBetweenPolls);
    if (signal == SIGWINCH) next_ = Clock::now();
    if (signal == 0 || signal == SIGWINCH) return true;
    exit_code_ = 128 + signal;
    return false;
  }

  // The same.
  bool say_waits(const char* what) {
    if (!std::exchange(said_, true)) {
      std::fputs(fmt::format("paceline top: waiting for {}\n", what).c_str(), stderr);
    }
    return pause();
  }

  // Returns false.
  bool finish() {
    std::fputs("paceline top: the job has ended\n", stderr);
    exit_code_ = options_.once ? 1 : 0;
    return false;
  }

  // Returns true if that was the last judgement.
  bool show() {
    next_ = Clock::now() + options_.interval;
    top::View view{.job = name(), .recent = job_->recent()};
    view.analysis = report::analyse(view.recent);
    view.diagnosis = report::diagnose(view.analysis);
    view.rates = job_->rates(view.recent);
    view.idle = job_->idle().count();
    if (options_.once && view.diagnosis.finding == report::Finding::too_few_steps) {
      if (view.idle > std::chrono::duration<double>(kLongWait).count()) say_waits("steps");
      return false;
    }
    if (options_.json) {
      terminal_.show({report::report_json(view.recent, view.analysis, view.diagnosis)});
    } else {
      const auto size = terminal_.size();
      terminal_.show(top::draw(view, size.columns, size.rows));
    }
    return options_.once;
  }

  std::string name() const {
    const top::JobKey& key = job_->key();
    if (!key.name.empty()) return "job " + base::printable_line(key.name);
    return key.alone > 0 ? fmt::format("process {}", key.alone) : "job";
  }

  TopOptions options_;
  top::Terminal terminal_;
  std::optional<top::WatchedJob> job_;
  Clock::time_point next_{};
  int exit_code_ = 0;
  bool said_ = false;
  bool watched_ = false;  // ranks were found
};

}  // namespace

int top_command(const std::vector<std::string>& arguments) {
  const TopOptions options = parse_top_options(arguments);
  if (!options.help.empty()) {
    std::fputs(options.help.c_str(), stdout);
    return 0;
  }
  return Top(options).run();
}

}  // namespace paceline::app
