#include "describe_run_flags.h"

#include <memory>
#include <string>

#include "help_formatter.h"

namespace paceline::app {

void describe_run_flags(CLI::App& app, RunFlags& flags) {
  app.formatter(std::make_shared<HelpFormatter>("paceline run [flags] PROGRAM [arguments]"));
  // Defaults stand in the descriptions: CLI11 would print its own type and range beside them.
  const auto add = [&](const std::string& name, auto& value, const char* unit, const char* group,
                       const char* description) {
    return app.add_option(name, value, description)->type_name(unit)->group(group)->take_last();
  };
  const auto add_flag = [&](const char* name, bool& value, const char* group,
                            const char* description) {
    return app.add_flag(name, value, description)->group(group);
  };
  const char* const processes = "Processes";
  const char* const program = "Program";
  const char* const rendezvous = "Rendezvous";
  const char* const stopping = "Stopping";
  const char* const output = "Output";
  add("--nproc-per-node", flags.nproc_per_node, "N", processes,
      "Number of processes (default 1); auto or cpu: one per core;\n"
      "gpu: one per NVIDIA GPU");
  add("--nnodes", flags.nnodes, "N", processes,
      "Number of nodes: machines (default 1), each of which runs this command;\n"
      "MIN:MAX with --rdzv-backend c10d: at least and at most so many");
  add("--node-rank", flags.node_rank, "N", processes, "The number of this node, from 0 (default)");
  add_flag("--pass-local-rank", flags.pass_local_rank, processes,
           "Append --local_rank=R to the arguments of local rank R's process");
  add_flag("--use-env", flags.use_env, processes, "Do not append it (default)");
  add_flag("--virtual-local-rank", flags.virtual_local_rank, processes,
           "LOCAL_RANK=0 for every process, and CUDA_VISIBLE_DEVICES (on ROCm\n"
           "HIP_VISIBLE_DEVICES too) names its own device only");
  add("--numa-binding", flags.numa_binding, "MODE", processes,
      "Deal the processes out over the machine's NUMA nodes (node), sockets\n"
      "(socket) or last-level caches (core-complex), and bind each to the cores\n"
      "there; exclusive: to cores of its own on its NUMA node");
  add_flag("--bind-to-cores", flags.bind_to_cores, processes,
           "Give each process cores of its own, which other jobs with this flag do not\n"
           "get; for machines that nothing else uses");
  add_flag("--no-tune-malloc", flags.no_tune_malloc, processes,
           "Do not set MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_, which make\n"
           "malloc keep freed memory for the next training step");
  add_flag("--deterministic", flags.deterministic, processes,
           "Fix what LibTorch's results depend on besides the program: one thread each\n"
           "and the instruction set AVX2, unless their variables are set\n"
           "(docs/determinism.md)");
  add_flag("--as-gloo", flags.as_gloo, processes,
           "Set PACELINE_AS_GLOO=1: in Python, the name \"gloo\" then means the backend\n"
           "paceline; the program's Python needs the package paceline (python/README.md)");
  add("--role", flags.role, "NAME", processes, "ROLE_NAME of the processes (default default)");
  add_flag("-m,--module", flags.module, program, "PROGRAM is a Python module, as for python -m");
  add_flag("--no-python", flags.no_python, program,
           "Start PROGRAM itself, also if its name ends with .py");
  add_flag("--run-path", flags.run_path, program,
           "PROGRAM is a Python script, run by runpy.run_path; counts before -m and\n"
           "--no-python");
  add("--master-addr", flags.master_addr, "HOST", rendezvous,
      "The address of node 0 in the network; MASTER_ADDR of the processes\n"
      "(default 127.0.0.1)");
  add("--master-port", flags.master_port, "PORT", rendezvous,
      "The port there where nodes meet (default 29500); with one node MASTER_PORT\n"
      "of the processes (default: a free one)");
  add("--rdzv-backend", flags.rdzv_backend, "NAME", rendezvous,
      "static (default): nodes are numbered by --node-rank; c10d: as they come");
  add("--rdzv-endpoint", flags.rdzv_endpoint, "HOST[:PORT]", rendezvous,
      "Where nodes meet (default: --master-addr and --master-port; the default\n"
      "port of c10d is 29400)");
  add("--rdzv-conf", flags.rdzv_conf, "KEY=VALUE,...", rendezvous,
      "join_timeout: seconds for all nodes to come (default 600);\n"
      "last_call_timeout: seconds for more than MIN to come (default 30);\n"
      "is_host: 1 if this machine is the endpoint (default: if it has the address)");
  add("--rdzv-id", flags.run_id, "NAME", rendezvous,
      "Name of the job, TORCHELASTIC_RUN_ID of the processes (default: a random\n"
      "one; \"none\" with several nodes or a flag that says where they meet)");
  add("--local-addr", flags.local_addr, "HOST", rendezvous,
      "MASTER_ADDR of the processes if this is node 0 (default: the endpoint's)");
  add("--secret-file", flags.secret_file, "FILE", rendezvous,
      "File with a secret of at least 16 bytes, the same on all nodes, without\n"
      "which none can join (default: the variable PACELINE_SECRET)");
  add_flag("--standalone", flags.standalone, rendezvous, "This machine only (default)");
  add("--max-restarts", flags.max_restarts, "N", stopping,
      "How often all processes are started again after a failure (default 0)");
  add("--max-replacements", flags.max_replacements, "N", stopping,
      "How many processes that fail are started again, each by itself, while the\n"
      "others go on (default 0); for programs with enable_reconfigure or\n"
      "ParameterServer on one node (docs/errors.md)");
  add_flag("--tolerate-loss", flags.tolerate_loss, stopping,
           "Go on without a process that fails or a node that is lost, unless it\n"
           "is rank 0's (docs/errors.md)");
  add("--failure-grace", flags.failure_grace, "SECONDS", stopping,
      "From the first failure to SIGTERM for the others (default 0.5);\n"
      "a rank that is already failing has --stop-grace to end by itself");
  add("--stop-grace,--shutdown-timeout", flags.stop_grace, "SECONDS", stopping,
      "From SIGTERM, or from Ctrl-C, to SIGKILL (default 30, or\n"
      "TORCH_ELASTIC_SHUTDOWN_TIMEOUT)");
  add("--signals-to-handle", flags.signals, "NAMES", stopping,
      "Signals that are passed on to the processes and end the job, besides\n"
      "SIGUSR1 (default SIGTERM,SIGINT,SIGHUP,SIGQUIT)");
  add("--local-ranks-filter", flags.local_ranks, "RANKS", output,
      "On the console, show only these local ranks, as in 0,1,2 (default: all)");
  add("--log-dir", flags.log_dir, "DIR", output,
      "Keep each process's error file, and the files of the flags below, in\n"
      "DIR/ID_RANDOM/attempt_N/LOCAL_RANK, where ID is --rdzv-id\n"
      "(default: error files are removed at the end)");
  add("-r,--redirects", flags.redirects, "STREAMS", output,
      "Write to stdout.log and stderr.log in place of the console: 1 standard\n"
      "output, 2 standard error, 3 both, 0 none (default); or for each local rank,\n"
      "as in 0:1,1:3. Without --log-dir, in a new directory in TMPDIR");
  add("-t,--tee", flags.tee, "STREAMS", output, "Write to these files and to the console");
  add("--duplicate-stdout-filters", flags.stdout_filters, "TEXTS", output,
      "Copy the lines of -t's standard outputs that contain one of these texts to\n"
      "attempt_N/filtered_stdout.log; separate texts by commas, a comma in one is ,,");
  add("--duplicate-stderr-filters", flags.stderr_filters, "TEXTS", output,
      "The same for standard error and filtered_stderr.log");
  add("--log-line-prefix-template", flags.prefix_template, "TEXT", output,
      "What precedes each line on the console (default '[rank${rank}]: '); may have\n"
      "${role_name}, ${local_rank}, ${rank} and ${hostname}");
  app.add_option("--print-completion", flags.completion_shell,
                 "Print a script that completes these flags in bash, zsh or tcsh, and exit")
      ->type_name("SHELL")
      ->group("Other");
  app.set_help_flag("-h,--help", "Print this and exit")->group("Other");
  const auto add_without_effect = [&](const char* name, std::string& value) {
    app.add_option(name, value)->group("")->take_last();
  };
  add_without_effect("--start-method", flags.start_method);
  add_without_effect("--monitor-interval", flags.monitor_interval);
  add_without_effect("--logs-specs", flags.logs_specs);
  add_without_effect("--event-log-handler", flags.event_log_handler);
  app.footer(
      "PROGRAM is started as it is; python3 -u runs one whose name ends with .py, or what\n"
      "PYTHON_EXEC names. Flags may also be spelled with underscores, as in --nproc_per_node,\n"
      "or set as torchrun's variables, PET_NPROC_PER_NODE; flags after the program belong to the\n"
      "program. Each process gets RANK, LOCAL_RANK, WORLD_SIZE and torchrun's other variables,\n"
      "and OMP_NUM_THREADS unless it is set: the cores divided by the processes. paceline run\n"
      "exits with the code of the process that failed first, or with 128 + N if signal N ended\n"
      "it.\n"
      "\n"
      "Example:\n"
      "  paceline run --nproc-per-node 2 ./train --epochs 5\n"
      "On each of two nodes, with --node-rank 0 on the one at 10.0.0.1 and 1 on the other:\n"
      "  paceline run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 2 ./train");
}

}  // namespace paceline::app
