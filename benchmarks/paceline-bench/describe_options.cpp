#include "describe_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace paceline::bench {
namespace {

constexpr const char* kFooter =
    R"(Implementations take turns, round by round: MPI and Python in processes of their own, all others
in the same ones. malloc is tuned as under `paceline run`. Each rank of a collective runs on a
core of its own, if there are enough. All ranks wait for each other before the clock starts.
Times are the slowest rank's; "cpu" is the CPU time of all ranks together. "over X" is how many
times faster than X: the median of the rounds and its 90 % confidence interval. "best MPI" is the
MPI library with the lowest median of the row. Run it on a machine that does nothing else.

Under mpirun, as in `mpirun -n 2 paceline bench ddp`, its processes are the ranks, which also
measure the backend mpi.)";

constexpr const char* kTopologyFooter =
    R"(Each rank is on a node of its own, which takes root; --link none measures on this machine, in
shared memory. "a rank sends" counts the elements of messages, the least to the most of a rank;
"a link carries" is what a node's interface counts, with all headers. "time" is the median of the
rounds, of the slowest rank, with its 90 % confidence interval. "theory" is the time in which
links of that rate carry the elements.)";

// Without the list of units that the transformation adds to the help.
CLI::Validator size() {
  return CLI::AsSizeValue(false).description("");
}

void describe_topology(CLI::App& topology, CLI::App& app, Options& options) {
  topology
      .add_option("--algorithms", options.algorithms,
                  fmt::format("Algorithms: {} (default all)", fmt::join(kAlgorithms, ", ")))
      ->delimiter(',')
      ->type_name("NAME");
  topology.add_option("--bytes", options.bytes, "The size, as in 64KB (default 1MB)")
      ->expected(1)
      ->transform(size())
      ->type_name("SIZE");
  CLI::Option* const svg =
      topology.add_option("--svg", options.svg, "Draw the times into this file");
  svg->type_name("FILE");
  CLI::Option* const draw =
      topology.add_option("--draw-ring", options.draw_ring,
                          "Measure nothing: print the steps of a ring of so many ranks, which\n"
                          "--svg draws");
  draw->type_name("N");
  // Not by excludes(), which the help of each of these options would mention.
  topology.final_callback([&topology, &app, draw, svg] {
    for (CLI::App* const one : {&topology, &app}) {
      for (const CLI::Option* const other : one->get_options()) {
        if (draw->count() == 0 || other->count() == 0 || other == draw || other == svg) continue;
        throw CLI::ExcludesError(other->get_name(), draw->get_name());
      }
    }
  });
}

}  // namespace

void describe_options(CLI::App& app, Options& options) {
  app.require_subcommand(1);
  app.set_help_all_flag("--help-all");
  app.get_option("--help-all")->group("");
  app.fallthrough();
  app.add_option("--ranks", options.ranks,
                 "Numbers of ranks, a job for each (default 2, collectives also 4 and 8,\n"
                 "launch also 8, topology 2 to 8)")
      ->delimiter(',')
      ->type_name("N");
  app.add_option("--nodes", options.nodes,
                 "Divide the ranks among so many nodes, which are network namespaces of this\n"
                 "machine; takes root (default 1; ranks then 1, 2 and 4 on each, quick 2)")
      ->type_name("N");
  app.add_option("--link", options.link,
                 "The rate of a node's link in each direction, as tc(8) writes it (default\n"
                 "1gbit, topology 100mbit; topology also takes none: one node)")
      ->type_name("RATE");
  app.add_option(
         "--rounds", options.rounds,
         fmt::format(
             "Rounds; each implementation has a turn in each (default 40, quick {}; launch\n"
             "and topology 10 and {}, the minimum)",
             kQuickRounds, kMinRounds))
      ->type_name("N");
  app.add_option("--threads", options.threads, "Threads of each rank (default 1)")->type_name("N");
  app.add_option("--json", options.json, "Write all rows to this file")->type_name("FILE");
  app.add_flag("--quick", options.quick, "A selection that takes less than a minute");
  // How this program starts its ranks.
  app.add_flag("--worker", options.worker)->group("");
  app.add_option("--node-processes", options.node_processes)->delimiter(',')->group("");
  app.footer(kFooter);
  CLI::App* const collectives =
      app.add_subcommand("collectives", "Collectives of float32, 2 to 8 ranks, 4 bytes to 25 MiB");
  collectives
      ->add_option("--collectives", options.collectives,
                   fmt::format("Collectives: {} (default all; quick all_reduce)",
                               fmt::join(kCollectives, ", ")))
      ->delimiter(',')
      ->type_name("NAME");
  collectives->add_option("--bytes", options.bytes, "Sizes, as in 4,64KB,25MB (KB: 1024 bytes)")
      ->delimiter(',')
      ->transform(size())
      ->type_name("SIZE");
  collectives
      ->add_option("--mpi", options.mpi,
                   fmt::format("MPI libraries to compare with, which `make peers` fetches: "
                               "{}, all (default) or none",
                               fmt::join(kMpiLibraries, ", ")))
      ->delimiter(',')
      ->type_name("NAME");
  CLI::App* const ddp = app.add_subcommand("ddp", "A training step of some models, 2 ranks");
  ddp->add_option("--models", options.models, "Models, or all")->delimiter(',')->type_name("NAME");
  ddp->add_option("--micro-batches", options.micro_batches,
                  "Measure steps of so many batches instead: accumulated under no_sync, and as "
                  "logical ranks")
      ->type_name("N");
  ddp->add_option("--python", options.python,
                  "The Python of python_ddp_gloo, and of python_ddp_paceline and "
                  "python_paceline_ddp if it has the package paceline (default python3)")
      ->take_last()
      ->type_name("PROGRAM");
  ddp->add_option("--python-backends", options.python_backends)->delimiter(',')->group("");
  CLI::App* const launch = app.add_subcommand(
      "launch", "Whole jobs: start, meet in a barrier, leave; 2 and 8 ranks, beside torchrun");
  launch
      ->add_option("--python", options.python,
                   "The Python of torchrun (default python3, if it can import torch)")
      ->take_last()
      ->type_name("PROGRAM");
  CLI::App* const topology = app.add_subcommand(
      "topology", "An all-reduce by textbook algorithms on 2 to 8 nodes: time and traffic");
  describe_topology(*topology, app, options);
  for (CLI::App* const one : {collectives, ddp, launch}) {
    one->footer("Takes the options of `paceline bench --help` too.\n\n" + app.get_footer());
  }
  topology->footer("Takes the options of `paceline bench --help` too.\n\n" +
                   std::string(kTopologyFooter));
  app.parse_complete_callback([&options, ddp, launch, topology] {
    options.benchmark = launch->parsed()             ? Benchmark::launch
                        : topology->parsed()         ? Benchmark::topology
                        : !ddp->parsed()             ? Benchmark::collectives
                        : options.micro_batches == 0 ? Benchmark::ddp
                                                     : Benchmark::accumulation;
  });
}

}  // namespace paceline::bench
