#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include <paceline/distributed.h>
#include <paceline/error.h>

#include "base/errno_error.h"
#include "collectives/mpi_libraries.h"
#include "jobs.h"
#include "machine.h"
#include "measure/external_peer.h"
#include "models/models.h"
#include "nodes/network.h"
#include "options.h"
#include "start_up/start_job.h"
#include "table.h"
#include "worker.h"

namespace paceline::bench {
namespace {

constexpr int kUsageExitCode = 2;

// Opened before anything is measured, so that a bad path fails at once.
std::ofstream open_json(const std::string& path) {
  std::ofstream file;
  if (path.empty()) return file;
  file.open(path);
  if (!file) throw base::errno_error(fmt::format("--json {}: cannot write this file", path));
  return file;
}

void write_json(std::ofstream& file, const Options& options, const nlohmann::ordered_json& report) {
  if (options.json.empty()) return;
  file << report.dump(2) << '\n';
  if (!file.flush()) throw base::errno_error(fmt::format("cannot write {}", options.json));
}

// Passes the Python peers to the ranks in their arguments.
void add_python(const Options& options, std::vector<std::string>& arguments) {
  const std::string python = options.python.empty() ? "python3" : options.python;
  if (!can_import(python, "torch")) {
    if (!options.python.empty()) {
      throw UsageError(fmt::format("--python {}: this program cannot import torch", python));
    }
    fmt::print(
        "python_ddp_gloo: absent, python3 cannot import torch; choose another by --python\n");
    return;
  }
  // The plug-in reaches one node.
  const bool plugin = options.nodes == 1 && can_import(python, "paceline");
  arguments.insert(arguments.end(),
                   {"--python", python, "--python-backends", plugin ? "gloo,paceline" : "gloo"});
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

int run(const Options& options, std::vector<std::string> arguments) {
  std::ofstream file = open_json(options.json);
  nlohmann::ordered_json report{{"machine", describe_machine()},
                                {"rows", nlohmann::ordered_json::array()}};
  report["machine"]["threads_per_rank"] = options.threads;
  report["nodes"] = options.nodes;
  if (options.nodes > 1) report["link"] = options.link;
  const auto& machine = report["machine"];
  fmt::print("{}, {} cores; {} rounds; load before: {:.1f}\n",
             machine["processor"].get<std::string>(), machine["cores"].get<int>(), options.rounds,
             machine["load_before"].get<double>());
  if (!is_gloo_available()) fmt::print("gloo: absent, built without Gloo's headers\n");
  if (options.benchmark == Benchmark::ddp) add_python(options, arguments);
  if (options.benchmark == Benchmark::collectives) report_absent_mpi(options);

  std::optional<Network> network;
  if (options.nodes > 1) {
    network.emplace(options.nodes, options.link);
    arguments.push_back(fmt::format("--node-processes={}", fmt::join(network->processes(), ",")));
  }

  int code = 0;
  const auto add = [&](const Result& result) {
    for (auto& row : to_rows(result)) report["rows"].push_back(std::move(row));
    fmt::print("{}", table_rows(options, result));
    std::fflush(stdout);
  };
  for (const int ranks : options.ranks) {
    fmt::print("{}", table_heading(options, ranks));
    std::fflush(stdout);
    if (options.benchmark == Benchmark::launch) {
      add(measure_launch(ranks, options.rounds, torchruns_python(options)));
    } else {
      code = run_ranks(arguments, ranks, options.threads, add);
    }
    if (code != 0) break;
  }
  write_json(file, options, report);
  return code;
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
  return options->worker ? run_worker(*options) : run(*options, arguments);
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
