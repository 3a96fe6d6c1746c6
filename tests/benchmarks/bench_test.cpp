// The parts of paceline bench that need neither torch nor ranks.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <paceline/error.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <sstream>

#include "measure/result.h"
#include "measure/statistics.h"
#include "nodes/rate.h"
#include "options.h"
#include "table.h"
#include "topology/chart.h"
#include "topology/link_counters.h"
#include "topology/ring_drawing.h"
#include "topology/theory.h"
#include "topology/traffic_table.h"

namespace paceline::bench {
namespace {

using testing::ContainsRegex;
using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(Quantile, InterpolatesBetweenSamples) {
  const std::vector<double> samples{5, 1, 4, 2, 3};
  EXPECT_DOUBLE_EQ(quantile(samples, 0), 1);
  EXPECT_DOUBLE_EQ(quantile(samples, 0.1), 1.4);
  EXPECT_DOUBLE_EQ(quantile(samples, 0.5), 3);
  EXPECT_DOUBLE_EQ(quantile(samples, 0.9), 4.6);
  EXPECT_DOUBLE_EQ(quantile(samples, 1), 5);
  EXPECT_DOUBLE_EQ(quantile(std::vector<double>{7}, 0.9), 7);
}

// The ranks of the order statistics are those of any table of the sign test: with 30 samples the
// 11th and the 20th, with 40 the 15th and the 26th, with 5 the extremes.
TEST(PairedSpeedup, IntervalIsTheSignTests) {
  for (const auto& [n, low, high] : {std::tuple{30, 11, 20}, {40, 15, 26}, {5, 1, 5}, {1, 1, 1}}) {
    std::vector<double> theirs(static_cast<std::size_t>(n));
    std::iota(theirs.begin(), theirs.end(), 1);
    std::shuffle(theirs.begin(), theirs.end(), std::mt19937(1));
    const Interval ratio = paired_speedup(std::vector<double>(theirs.size(), 1.0), theirs);
    EXPECT_EQ(ratio.low, low) << n;
    EXPECT_EQ(ratio.high, high) << n;
    EXPECT_DOUBLE_EQ(ratio.median, (n + 1) / 2.0) << n;
  }
}

TEST(PairedSpeedup, IsTheirTimeOverOursInTheSameRound) {
  // The machine is ten times slower in every other round; the pairs do not care.
  const Interval ratio = paired_speedup(std::vector<double>{1, 10, 1, 10, 1, 10},
                                        std::vector<double>{3, 30, 3, 30, 3, 30});
  EXPECT_DOUBLE_EQ(ratio.median, 3);
  EXPECT_DOUBLE_EQ(ratio.low, 3);
  EXPECT_DOUBLE_EQ(ratio.high, 3);
}

TEST(PairedSpeedup, IntervalContainsTheMedianInNinetyPercent) {
  std::mt19937 random(1);
  std::lognormal_distribution<double> noise;  // of median 1
  int held = 0;
  constexpr int trials = 2000;
  for (int i = 0; i < trials; ++i) {
    std::vector<double> theirs(30);
    std::generate(theirs.begin(), theirs.end(), [&] { return noise(random); });
    const Interval ratio = paired_speedup(std::vector<double>(theirs.size(), 1.0), theirs);
    held += ratio.low <= 1 && 1 <= ratio.high;
  }
  EXPECT_GE(held, trials * 0.89);
  EXPECT_LE(held, trials * 0.93);  // 11th to 20th of 30: 90.1 %
}

TEST(MedianInterval, IsTheSignTests) {
  const Interval time = median_interval({3, 1, 2, 5, 4});
  EXPECT_EQ(time.low, 1);
  EXPECT_EQ(time.median, 3);
  EXPECT_EQ(time.high, 5);
}

Result sample_result() {
  return {"all_reduce",
          2,
          std::int64_t{1024},
          {{"paceline", "registered", {1, 2, 3}, {2, 2, 2}},
           {"paceline", "unregistered", {2, 4, 6}, {4, 4, 4}},
           {"gloo", "", {100, 200, 300}, {150, 150, 150}},
           {"mpich", "", {10, 100, 90}, {20, 20, 20}},
           {"openmpi", "", {20, 40, 60}, {40, 40, 40}},
           {"streaming", "", {100, 200, 300}, {150, 150, 150}}}};
}

TEST(Result, RoundTripsThroughThePipe) {
  const std::string line = to_line(sample_result());
  EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1);
  EXPECT_EQ(to_line(from_line(line)), line);
  Result step{"ddp", 4, "lenet", {{"none", "", {0.1}, {0.2}}}};
  EXPECT_EQ(std::get<std::string>(from_line(to_line(step)).subject), "lenet");
}

// Of three ranks: rank 0 is the naive reducer.
Result topology_result(int ranks = 3) {
  return {"topology",
          ranks,
          std::int64_t{1 << 20},
          {{"all_reduce", "", {9e4, 9.5e4, 9.1e4}, {1, 1, 1}, {}, {{700, 900}, {800, 800}}, 8e4},
           {"naive",
            "",
            {2.4e5, 2.5e5, 2.6e5},
            {2, 2, 2},
            {{2 << 20, 2 << 20, 2, 2}, {1 << 20, 1 << 20, 1, 1}, {1 << 20, 1 << 20, 1, 1}},
            {{2200000, 2200000}, {1100000, 1100000}, {1100000, 1100000}},
            2.4e5}}};
}

TEST(Result, PassesTrafficThroughThePipe) {
  const std::string line = to_line(topology_result());
  EXPECT_EQ(to_line(from_line(line)), line);
  EXPECT_EQ(from_line(line).series[1].payload[0].messages_received, 2);
  EXPECT_EQ(from_line(line).series[0].link[0].received, 900);
  const auto rows = to_rows(topology_result());
  EXPECT_EQ(nlohmann::json(rows[1]["payload"][1]), nlohmann::json::parse(R"({
    "bytes_sent": 1048576, "bytes_received": 1048576, "messages_sent": 1,
    "messages_received": 1})"));
  EXPECT_EQ(nlohmann::json(rows[0]["link"][0]), nlohmann::json::parse(R"({
    "sent": 700, "received": 900})"));
  EXPECT_EQ(rows[0]["theory_us"], 8e4);
  EXPECT_FALSE(rows[0].contains("payload"));
}

TEST(Result, ReportsOutputThatIsNotAResult) {
  for (const std::string line : {"", "hello", "{}", R"({"benchmark": "ddp", "ranks": "two"})",
                                 R"({"benchmark": "ddp", "ranks": 2, "model": "x"})"}) {
    EXPECT_THAT([&] { from_line(line); },
                ThrowsMessage<Error>(HasSubstr("a rank wrote '" + line + "'")));
  }
}

TEST(Result, RowsHaveTheDocumentedFields) {
  const auto rows = to_rows(sample_result());
  ASSERT_EQ(rows.size(), 6u);
  EXPECT_EQ(nlohmann::json(rows[0]), nlohmann::json::parse(R"({
    "benchmark": "all_reduce", "implementation": "paceline", "variant": "registered", "ranks": 2,
    "bytes": 1024, "median_us": 2.0, "p10_us": 1.2, "p90_us": 2.8, "cpu_us": 2.0, "rounds": 3,
    "speedup_over": {"gloo": {"median": 100.0, "low": 100.0, "high": 100.0},
                     "mpich": {"median": 30.0, "low": 10.0, "high": 50.0},
                     "openmpi": {"median": 20.0, "low": 20.0, "high": 20.0},
                     "best_mpi": {"median": 20.0, "low": 20.0, "high": 20.0},
                     "streaming": {"median": 100.0, "low": 100.0, "high": 100.0}}})"));
  EXPECT_EQ(rows[1]["speedup_over"]["gloo"]["median"], 50.0);
  EXPECT_EQ(rows[2]["speedup_over"]["paceline"]["median"], 0.01);  // the fastest variant
  EXPECT_EQ(to_rows({"ddp", 2, "lenet", {{"none", "", {1}, {1}}}})[0]["model"], "lenet");
}

TEST(Result, BestMpiHasTheLowestMedian) {
  Result result = sample_result();
  EXPECT_EQ(best_mpi(result)->implementation, "openmpi");  // 40, though mpich has rounds of 10
  const auto rows = to_rows(result);
  EXPECT_EQ(rows[1]["speedup_over"]["best_mpi"]["median"], 10.0);
  EXPECT_TRUE(rows[3]["speedup_over"].contains("best_mpi"));   // mpich
  EXPECT_FALSE(rows[4]["speedup_over"].contains("best_mpi"));  // openmpi itself
  result.series[3].wall_us = {10, 39, 90};
  EXPECT_EQ(best_mpi(result)->implementation, "mpich");
  result.series.erase(result.series.begin() + 3, result.series.begin() + 5);
  EXPECT_EQ(best_mpi(result), nullptr);
  EXPECT_FALSE(to_rows(result)[0]["speedup_over"].contains("best_mpi"));
}

TEST(Table, ComparesWithTheBestMpi) {
  const std::string text = table_heading({}, 2) + table_rows({}, sample_result());
  EXPECT_THAT(text, HasSubstr("over gloo          over best MPI      over streaming\n"));
  // Ours; Gloo's and mpich's rows; none in openmpi's own.
  EXPECT_THAT(text, HasSubstr("100x (100-100)     20.0x (20.0-20.0)  100x (100-100)\n"));
  EXPECT_THAT(text, ContainsRegex("mpich +90.0 us +20.0 us  3.33x [^ ]+ +0.67x"));
  EXPECT_THAT(text, ContainsRegex("openmpi +40.0 us +40.0 us  5.00x [^ ]+ +5.00x [^ ]+\n"));
  Result without = sample_result();
  without.series.erase(without.series.begin() + 3, without.series.begin() + 5);
  EXPECT_THAT(table_rows({}, without), ContainsRegex("100x .100-100. {24}100x .100-100.\n"));
}

TEST(Table, OfNodesComparesWithTheirLink) {
  Options options;
  options.nodes = 2;
  options.link = "1gbit";
  const Result result{
      "all_reduce", 4, 1024, {{"paceline", "registered", {20}, {1}}, {"link", "", {19}, {1}}}};
  EXPECT_THAT(table_heading(options, 4),
              AllOf(HasSubstr("4 ranks on 2 nodes, links of 1gbit"), HasSubstr("over link")));
  EXPECT_THAT(table_rows(options, result), HasSubstr("0.95x (0.95-0.95)"));
}

TEST(Table, FitsInto120Columns) {
  Options ddp;
  ddp.benchmark = Benchmark::ddp;
  Result wide{"ddp", 2, "resnet18_b64", {}};
  for (const char* name : {"c10d_reducer_gloo", "none", "paceline"}) {
    wide.series.push_back({name, "", {123456, 234567, 1234}, {987654, 1, 2}});
  }
  const std::string text = table_heading(ddp, 64) + table_rows(ddp, wide) + table_heading({}, 2) +
                           table_rows({}, sample_result());
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    EXPECT_LE(end - begin, 120u) << text.substr(begin, end - begin);
    begin = end + 1;
  }
  EXPECT_THAT(text, HasSubstr("100x (100-100)"));
  EXPECT_THAT(text, HasSubstr("paceline unregistered"));
}

TEST(Table, OfTopologyHasTheRangeOverRanksAndTheTotal) {
  Options options;
  options.benchmark = Benchmark::topology;
  options.link = "100mbit";
  options.bytes = {1 << 20};
  const std::string text = topology_heading(options, 3) + topology_rows(topology_result());
  EXPECT_THAT(text, HasSubstr("An all-reduce of 1 MiB of float32, 3 ranks on 3 nodes, links of "
                              "100mbit; messages over Gloo\n"));
  EXPECT_THAT(text, ContainsRegex("\nall_reduce +- +- +- +700-800 B +1.46 KiB +91.0 ms .90-95. "
                                  "+80.0 ms\n"));
  EXPECT_THAT(text, ContainsRegex("\nnaive +1.00-2.00 MiB +4.00 MiB +1-2 +1.05-2.10 MiB +4.20 MiB "
                                  "+250 ms .240-260. +240 ms\n"));
  for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
    end = text.find('\n', begin);
    EXPECT_LE(end - begin, 120u) << text.substr(begin, end - begin);
  }
  options.link = "none";
  EXPECT_THAT(topology_heading(options, 3), HasSubstr("3 ranks on this machine, in shared memory"));
}

TEST(Table, FormatsRangesInTheUnitOfTheLargest) {
  EXPECT_EQ(describe_range(0, 0), "0 B");
  EXPECT_EQ(describe_range(1000, 1023), "1000-1023 B");
  EXPECT_EQ(describe_range(512, 2048), "0.50-2.00 KiB");
  EXPECT_EQ(describe_range(1 << 20, (1 << 20) + 1), "1.00 MiB");
  EXPECT_EQ(describe_range(std::int64_t{5} << 40, std::int64_t{5} << 40), "5.00 TiB");
}

TEST(Theory, IsTheTimeOfTheBusiestLink) {
  // 4 ranks, 1000 bytes, 1 byte a microsecond: 3000 in and 3000 out, or 6 chunks of 250 bytes.
  for (const char* const name : {"naive", "parameter_server"}) {
    EXPECT_DOUBLE_EQ(theory_of(name, 4, 1000, 1e6).us, 6000);
  }
  for (const char* const name : {"all_reduce", "ring", "sharded_server"}) {
    EXPECT_DOUBLE_EQ(theory_of(name, 4, 1000, 1e6).us, 1500);
  }
}

TEST(TopologyChart, HasALineForEachAlgorithmAndFormula) {
  Options options;
  options.benchmark = Benchmark::topology;
  options.link = "100mbit";
  options.bytes = {1 << 20};
  const auto chart = topology_chart(options, {topology_result(2), topology_result(3)});
  ASSERT_EQ(chart.lines.size(), 4u);
  EXPECT_EQ(chart.lines[0].name, "all_reduce");
  ASSERT_EQ(chart.lines[1].points.size(), 2u);
  EXPECT_EQ(chart.lines[1].points[1].x, 3);
  EXPECT_EQ(chart.lines[1].points[1].y, 250);
  EXPECT_EQ(chart.lines[2].name, "2 (N-1) K / (N B)");
  EXPECT_TRUE(chart.lines[2].dashed);
  EXPECT_DOUBLE_EQ(chart.lines[3].points[0].y, 2 * (1 << 20) / 12.5e6 * 1e3);
  options.link = "none";
  EXPECT_EQ(topology_chart(options, {topology_result()}).lines.size(), 2u);
}

TEST(LinkCounters, AreThoseOfEth0) {
  const std::string text =
      "Inter-|   Receive                    |  Transmit\n"
      " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs\n"
      "    lo:     100    1    0    0    0     0          0         0      200       2    0\n"
      "  eth0: 1234567    9    0    0    0     0          0         0  7654321       8    0\n";
  const auto bytes = find_counters(text);
  ASSERT_TRUE(bytes);
  EXPECT_EQ(bytes->received, 1234567);
  EXPECT_EQ(bytes->sent, 7654321);
  EXPECT_FALSE(find_counters("    lo: 1 2 3 4 5 6 7 8 9 10\n"));
  EXPECT_FALSE(find_counters("  eth0: 1 2 3\n"));
  EXPECT_FALSE(find_counters(""));
}

TEST(Rate, IsAsTcWritesIt) {
  EXPECT_DOUBLE_EQ(bytes_per_second("100mbit"), 12.5e6);
  EXPECT_DOUBLE_EQ(bytes_per_second("1Gbit"), 125e6);
  EXPECT_DOUBLE_EQ(bytes_per_second("2.5gbit"), 312.5e6);
  EXPECT_DOUBLE_EQ(bytes_per_second("12mbps"), 12e6);
  EXPECT_DOUBLE_EQ(bytes_per_second("8mibit"), 1024 * 1024);
  EXPECT_DOUBLE_EQ(bytes_per_second("2000000bit"), 250e3);
  for (const char* const wrong : {"", "mbit", "100", "100mb", "100 mbit", "-1mbit", "1mbit;", "nan",
                                  "infmbit", "1kbit", "2tbit", "1mibibit"}) {
    EXPECT_THAT([&] { static_cast<void>(bytes_per_second(wrong)); },
                ThrowsMessage<UsageError>(
                    HasSubstr(fmt::format("--link {}: expected a rate such as 1gbit", wrong))));
  }
}

TEST(RingDrawing, EndsWithTheWholeSumOnEveryRank) {
  for (int ranks = 2; ranks <= 8; ++ranks) {
    const std::string text = ring_in_words(ranks);
    const std::string whole = std::string("01234567").substr(0, static_cast<std::size_t>(ranks));
    const std::string last = text.substr(text.rfind("step"));
    std::istringstream lines(last);
    std::string line;
    std::getline(lines, line);
    EXPECT_EQ(line, fmt::format("step {0} of {0}, all-gather", 2 * (ranks - 1)));
    for (int rank = 0; rank < ranks; ++rank) {
      std::getline(lines, line);
      int sums = 0;
      for (std::size_t at = line.find('|'); (at = line.find(whole, at)) != line.npos; ++at) ++sums;
      EXPECT_EQ(sums, ranks) << line;
      EXPECT_LE(line.size(), 120u);
    }
  }
}

TEST(RingDrawing, ShowsEachMessage) {
  EXPECT_THAT(ring_in_words(3), HasSubstr("step 2 of 4, reduce-scatter\n"
                                          "  rank 0 sends chunk 2 to 1 |   0    >012   02\n"
                                          "  rank 1 sends chunk 0 to 2 |   01    1    >012\n"
                                          "  rank 2 sends chunk 1 to 0 |  >012   12    2\n"));
  const auto chart = ring_chart(3);
  ASSERT_EQ(chart.rows.size(), 3u);
  ASSERT_EQ(chart.rows[1].spans.size(), 4u);
  EXPECT_EQ(chart.rows[1].spans[1].label, "0-1");
  EXPECT_EQ(chart.rows[0].spans[1].label, "2-0");
  EXPECT_EQ(chart.rows[0].spans[2].label, "all");
  EXPECT_EQ(chart.rows[1].spans[1].kind, 0u);
}

TEST(Table, FormatsQuantities) {
  EXPECT_EQ(describe_bytes(4), "4 B");
  EXPECT_EQ(describe_bytes(1000), "1000 B");
  EXPECT_EQ(describe_bytes(64 << 10), "64 KiB");
  EXPECT_EQ(describe_bytes(25 << 20), "25 MiB");
  EXPECT_EQ(describe_time(0.314), "0.31 us");
  EXPECT_EQ(describe_time(46.24), "46.2 us");
  EXPECT_EQ(describe_time(18415), "18.4 ms");
  EXPECT_EQ(describe_time(1.2e6), "1.20 s");
}

const std::vector<std::string> kModels{"tiny_mlp", "lenet", "wide_mlp", "resnet18", "other"};

Options parse(const std::vector<std::string>& arguments) {
  std::string help;
  return parse_options(arguments, kModels, help).value();
}

TEST(Options, HaveDefaults) {
  const Options all = parse({"collectives"});
  EXPECT_EQ(all.benchmark, Benchmark::collectives);
  EXPECT_THAT(all.ranks, ElementsAre(2, 4, 8));
  EXPECT_THAT(all.bytes, ElementsAre(4, 1024, 16384, 65536, 1048576, 4194304, 26214400));
  EXPECT_THAT(all.collectives, ElementsAreArray(kCollectives));
  EXPECT_THAT(parse({"collectives", "--quick"}).collectives, ElementsAre("all_reduce"));
  EXPECT_THAT(all.mpi, ElementsAreArray(kMpiLibraries));
  EXPECT_GE(all.rounds, 30);
  EXPECT_EQ(all.threads, 1);
  EXPECT_FALSE(all.worker);

  const Options topology = parse({"topology"});
  EXPECT_THAT(topology.ranks, ElementsAre(2, 3, 4, 5, 6, 7, 8));
  EXPECT_THAT(topology.algorithms, ElementsAreArray(kAlgorithms));
  EXPECT_EQ(topology.link, "100mbit");
  EXPECT_FALSE(topology.draw_ring);
  EXPECT_THAT(parse({"topology", "--quick"}).ranks, ElementsAre(2, 4));
  EXPECT_EQ(parse({"collectives", "--nodes", "2"}).link, "1gbit");

  const Options steps = parse({"ddp"});
  EXPECT_EQ(steps.benchmark, Benchmark::ddp);
  EXPECT_THAT(steps.ranks, ElementsAre(2));
  EXPECT_THAT(steps.models, ElementsAre("tiny_mlp", "lenet", "wide_mlp", "resnet18"));
  EXPECT_EQ(parse({"--quick", "ddp"}).rounds, 30);
}

TEST(Options, SelectBenchmarks) {
  const Options sizes =
      parse({"collectives", "--quick", "--ranks", "2,3", "--bytes", "4,1KB,25MB", "--collectives",
             "broadcast,barrier", "--rounds", "50", "--threads", "2", "--json", "out.json"});
  EXPECT_THAT(sizes.ranks, ElementsAre(2, 3));
  EXPECT_THAT(sizes.bytes, ElementsAre(4, 1024, 25 << 20));
  EXPECT_THAT(sizes.collectives, ElementsAre("broadcast", "barrier"));
  EXPECT_EQ(sizes.rounds, 50);
  EXPECT_EQ(sizes.threads, 2);
  EXPECT_EQ(sizes.json, "out.json");
  EXPECT_THAT(parse({"collectives", "--mpi", "openmpi,mpich"}).mpi,
              ElementsAre("openmpi", "mpich"));
  EXPECT_THAT(parse({"collectives", "--mpi", "none"}).mpi, ElementsAre());
  EXPECT_THAT(parse({"ddp", "--models", "lenet,other"}).models, ElementsAre("lenet", "other"));
  EXPECT_EQ(parse({"ddp", "--models", "all"}).models, kModels);
  EXPECT_TRUE(parse({"--worker", "ddp", "--quick"}).worker);
  const Options topology = parse({"topology", "--algorithms", "ring,naive", "--bytes", "2MB",
                                  "--ranks", "2,8", "--svg", "x.svg"});
  EXPECT_EQ(topology.benchmark, Benchmark::topology);
  EXPECT_THAT(topology.algorithms, ElementsAre("ring", "naive"));
  EXPECT_THAT(topology.bytes, ElementsAre(2 << 20));
  EXPECT_EQ(topology.svg, "x.svg");
  EXPECT_EQ(nodes_of(topology, 8), 8);
  const Options unshaped = parse({"topology", "--link", "none", "--ranks", "64"});
  EXPECT_EQ(nodes_of(unshaped, 64), 1);
  EXPECT_EQ(parse({"topology", "--draw-ring", "4", "--svg", "x.svg"}).draw_ring.value(), 4);
  const Options nodes = parse({"collectives", "--nodes", "3", "--link", "10gbit"});
  EXPECT_THAT(nodes.ranks, ElementsAre(3, 6, 12));
  EXPECT_EQ(nodes.link, "10gbit");
  EXPECT_THAT(nodes.mpi, ElementsAre());
}

TEST(Options, NameInvalidValues) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> mistakes{
      {{}, "expected collectives, ddp, launch or topology"},
      {{"collective"}, "expected collectives, ddp, launch or topology"},
      {{"collectives", "ddp"}, "not expected: ddp"},
      {{"collectives", "--models", "lenet"}, "--models"},
      {{"collectives", "--ranks", "0"}, "--ranks 0: expected 1 to 64"},
      {{"collectives", "--ranks", "65"}, "--ranks 65: expected 1 to 64"},
      {{"collectives", "--ranks", "two"}, "two"},
      {{"collectives", "--bytes", "6"}, "--bytes 6: expected a multiple of 4"},
      {{"collectives", "--bytes", "0"}, "--bytes 0: expected 4 to"},
      {{"collectives", "--bytes", "8GB"}, "--bytes 8589934592: expected 4 to"},
      {{"collectives", "--bytes", "many"}, "many"},
      {{"collectives", "--collectives", "allreduce"}, "--collectives allreduce: expected all_re"},
      {{"collectives", "--mpi", "mvapich"}, "--mpi mvapich: expected mpich, intel_mpi, openmpi, "},
      {{"collectives", "--mpi", "mpich,none"}, "--mpi none: expected mpich"},
      {{"ddp", "--mpi", "mpich"}, "--mpi"},
      {{"collectives", "--rounds", "4"}, "--rounds 4: expected 5 to"},
      {{"collectives", "--nodes", "0"}, "--nodes 0: expected 1 to 16"},
      {{"collectives", "--nodes", "2", "--ranks", "2,3"}, "--ranks 3: expected multiples of"},
      {{"collectives", "--nodes", "2", "--mpi", "all"}, "--mpi with --nodes 2: its ranks are"},
      {{"collectives", "--link", "1gbit"}, "--nodes"},
      {{"collectives", "--nodes", "2", "--link", "1; reboot"}, "expected a rate such as"},
      {{"launch", "--nodes", "2"}, "--nodes 2: launch measures jobs on one node"},
      {{"topology", "--nodes", "2"}, "--nodes 2: topology puts each rank on a node; give --ranks"},
      {{"topology", "--ranks", "1"}, "--ranks 1: expected 2 to 16"},
      {{"topology", "--ranks", "17"}, "--ranks 17: expected 2 to 16"},
      {{"topology", "--ranks", "65", "--link", "none"}, "--ranks 65: expected"},
      {{"topology", "--link", "fast"}, "--link fast: expected a rate such as"},
      {{"topology", "--bytes", "6"}, "--bytes 6: expected a multiple of 4"},
      {{"topology", "--algorithms", "tree"}, "--algorithms tree: expected all_reduce, ring, naive"},
      {{"topology", "--draw-ring", "9"}, "--draw-ring 9: expected 2 to 8"},
      {{"topology", "--draw-ring", "0"}, "--draw-ring 0: expected 2 to 8"},
      {{"topology", "--draw-ring", "3", "--json", "x"}, "--json excludes --draw-ring"},
      {{"topology", "--draw-ring", "3", "--bytes", "8"}, "--bytes excludes --draw-ring"},
      {{"collectives", "--nodes", "2", "--link", "none"}, "--link none: expected a rate such as"},
      {{"ddp", "--svg", "x"}, "--svg"},
      {{"ddp", "--threads", "0"}, "--threads 0: expected 1 to"},
      {{"ddp", "--models", "vgg"}, "--models vgg: expected tiny_mlp, lenet"},
  };
  for (const auto& mistake : mistakes) {
    EXPECT_THAT([&] { parse(mistake.first); },
                ThrowsMessage<UsageError>(HasSubstr(mistake.second)));
  }
}

TEST(Options, HelpListsAll) {
  std::string help;
  EXPECT_FALSE(parse_options({"--help"}, kModels, help));
  EXPECT_THAT(help, testing::AllOf(HasSubstr("collectives"), HasSubstr("ddp"), HasSubstr("--ranks"),
                                   HasSubstr("--json"), testing::Not(HasSubstr("--worker"))));
  EXPECT_FALSE(parse_options({"ddp", "--help"}, kModels, help));
  EXPECT_THAT(help, HasSubstr("--models"));
}

}  // namespace
}  // namespace paceline::bench
