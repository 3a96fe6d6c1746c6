#include "report.h"

#include <fmt/format.h>

#include <cstdio>

#include <paceline/distributed.h>

#include "base/errno_error.h"
#include "machine.h"
#include "table.h"
#include "topology/chart.h"
#include "topology/traffic_table.h"

namespace paceline::bench {
namespace {

constexpr int kColumns = 100;  // of charts

void print(const std::string& text) {
  fmt::print("{}", text);
  std::fflush(stdout);
}

}  // namespace

OutputFile::OutputFile(const char* flag, const std::string& path) : path_(path) {
  if (!path.empty()) file_.open(path);
  if (!file_) throw base::errno_error(fmt::format("{} {}: cannot write this file", flag, path));
}

void OutputFile::write(const std::string& text) {
  if (path_.empty()) return;
  file_ << text;
  if (!file_.flush()) throw base::errno_error(fmt::format("cannot write {}", path_));
}

Report::Report(const Options& options)
    : options_(options), file_("--json", options.json), svg_("--svg", options.svg) {
  json_["machine"] = describe_machine();
  json_["rows"] = nlohmann::ordered_json::array();
  json_["machine"]["threads_per_rank"] = options.threads;
  if (options.benchmark != Benchmark::topology) json_["nodes"] = options.nodes;
  if (has_links(options)) json_["link"] = options.link;
  const auto& machine = json_["machine"];
  fmt::print("{}, {} cores; {} rounds; load before: {:.1f}\n",
             machine["processor"].get<std::string>(), machine["cores"].get<int>(), options.rounds,
             machine["load_before"].get<double>());
  if (!is_gloo_available()) fmt::print("gloo: absent, built without Gloo's headers\n");
}

void Report::begin_table(int ranks) {
  const bool topology = options_.benchmark == Benchmark::topology;
  print(topology ? topology_heading(options_, ranks) : table_heading(options_, ranks));
}

void Report::add(const Result& result) {
  for (auto& row : to_rows(result)) json_["rows"].push_back(std::move(row));
  const bool topology = options_.benchmark == Benchmark::topology;
  print(topology ? topology_rows(result) : table_rows(options_, result));
  if (topology) topology_.push_back(result);
}

void Report::write() {
  if (!topology_.empty()) {
    const drawing::LineChart chart = topology_chart(options_, topology_);
    print('\n' + chart.to_terminal(kColumns));
    svg_.write(chart.to_svg());
  }
  file_.write(json_.dump(2) + '\n');
}

}  // namespace paceline::bench
