#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include <paceline/error.h>
#include <paceline/tune_malloc.h>

#include "base/environment.h"
#include "collectives/mpi_libraries.h"
#include "jobs.h"
#include "measure/external_peer.h"
#include "models/models.h"
#include "nodes/network.h"
#include "options.h"
#include "report.h"
#include "start_up/start_job.h"
#include "topology/ring_drawing.h"
#include "worker.h"

namespace paceline::bench {
namespace {

constexpr int kUsageExitCode = 2;

// Chooses the Python peers of `ddp`. `reports`: whether to print that there are none.
void choose_python(Options& options, bool reports) {
  if (options.benchmark != Benchmark::ddp) return;
  const bool is_given = !options.python.empty();
  if (!is_given) options.python = "python3";
  if (can_import(options.python, "torch")) {
    options.python_backends = {"gloo"};
    if (can_import(options.python, "paceline")) {
      options.python_backends.emplace_back("paceline");
    }
  } else if (is_given) {
    throw UsageError(fmt::format("--python {}: this program cannot import torch", options.python));
  } else if (reports) {
    fmt::print(
        "python_ddp_gloo: absent, python3 cannot import torch; choose another by --python\n");
  }
}

// Empty if there is none.
std::string torchruns_python(const Options& options) {
  std::string python = options.python.empty() ? "python3" : options.python;
  if (can_import(python, "torch")) return python;
  if (options.python.empty()) {
    fmt::print("torchrun: absent, python3 cannot import torch; choose another by --python\n");
    return "";
  }
  throw UsageError(fmt::format("--python {}: this program cannot import torch", python));
}

void report_absent_mpi(const Options& options) {
  for (const std::string& library : options.mpi) {
    std::string said;
    for (const int ranks : options.ranks) {
      const std::string why = why_absent(library, ranks);
      if (!why.empty() && why != said) fmt::print("{}: absent, {}\n", library, why);
      said = why;
    }
  }
}

// Starts the ranks.
int run(Options options, std::vector<std::string> arguments) {
  Report report(options);
  choose_python(options, true);
  if (!options.python_backends.empty()) {
    arguments.insert(arguments.end(), {"--python", options.python, "--python-backends",
                                       fmt::format("{}", fmt::join(options.python_backends, ","))});
  }
  if (options.benchmark == Benchmark::collectives) report_absent_mpi(options);

  int code = 0;
  for (const int ranks : options.ranks) {
    std::optional<Network> network;
    std::vector<std::string> job = arguments;
    if (const int nodes = nodes_of(options, ranks); nodes > 1) {
      network.emplace(nodes, options.link);
      job.push_back(fmt::format("--node-processes={}", fmt::join(network->processes(), ",")));
    }
    report.begin_table(ranks);
    if (options.benchmark == Benchmark::launch) {
      report.add(measure_launch(ranks, options.rounds, torchruns_python(options)));
    } else {
      code =
          run_ranks(job, ranks, options.threads, [&](const Result& result) { report.add(result); });
    }
    if (code != 0) break;
  }
  report.write();
  return code;
}

// A rank that `run` has started. Rank 0 writes each Result to standard output, as to_line gives it.
int run_started(const Options& options) {
  return run_worker(options, [] {
    return [](const Result& result) {
      const std::string line = to_line(result);
      std::fwrite(line.data(), 1, line.size(), stdout);
      std::fflush(stdout);
    };
  });
}

// A rank that another launcher has started.
int run_launched(Options options, const base::LaunchedProcess& launched) {
  const bool starts =
      options.benchmark == Benchmark::launch || options.benchmark == Benchmark::topology;
  if (options.nodes > 1 || starts || !options.default_ranks) {
    throw UsageError(fmt::format(
        "--ranks, --nodes, launch and topology are for ranks that paceline bench starts itself; {} "
        "has started these",
        launched.launcher));
  }
  tune_malloc();
  options.ranks = {*launched.size};
  options.mpi.clear();  // they would be jobs in a job
  choose_python(options, *launched.rank == 0);
  std::optional<Report> report;
  const int code = run_worker(options, [&] {
    report.emplace(options);
    report->begin_table(*launched.size);
    return [&](const Result& result) { report->add(result); };
  });
  if (report) report->write();
  return code;
}

int draw_ring(int ranks, const std::string& svg_path) {
  OutputFile svg("--svg", svg_path);
  fmt::print("{}", ring_in_words(ranks));
  svg.write(ring_chart(ranks).to_svg());
  return 0;
}

int main_or_throw(const std::vector<std::string>& arguments) {
  std::vector<std::string> known;
  for (const models::Model& model : models::all_models()) known.push_back(model.name);
  std::string help;
  const auto options = parse_options(arguments, known, help);
  if (!options) {
    fmt::print("{}", help);
    return 0;
  }
  if (options->draw_ring) return draw_ring(*options->draw_ring, options->svg);
  if (options->worker) return run_started(*options);
  const auto& launched = base::environment().launched;
  return launched && launched->size.value_or(1) > 1 ? run_launched(*options, *launched)
                                                    : run(*options, arguments);
}

}  // namespace
}  // namespace paceline::bench

int main(int argc, char** argv) {
  try {
    return paceline::bench::main_or_throw({argv + 1, argv + argc});
  } catch (const paceline::UsageError& error) {
    std::fprintf(stderr, "paceline bench: %s\nRun 'paceline bench --help' for help.\n",
                 error.what());
    return paceline::bench::kUsageExitCode;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "paceline bench: %s\n", error.what());
    return 1;
  }
}
