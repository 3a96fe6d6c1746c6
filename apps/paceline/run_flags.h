#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace paceline::app {

inline constexpr const char* kStaticBackend = "static";
inline constexpr const char* kUnnamedJob = "none";

// The flags of `paceline run` as they were written: on the command line, or if missing there, in
// torchrun's variables (PET_NNODES for --nnodes).
struct RunFlags {
  std::string nproc_per_node = "1";
  std::string nnodes = "1:1";
  std::string node_rank = "0";
  std::string rdzv_backend = kStaticBackend;
  std::string rdzv_endpoint;
  std::string rdzv_conf;
  std::string local_addr;
  std::string secret_file;
  bool module = false;
  bool no_python = false;
  bool run_path = false;
  bool use_env = false;
  bool pass_local_rank = false;
  bool virtual_local_rank = false;
  bool bind_to_cores = false;
  bool no_tune_malloc = false;
  bool deterministic = false;
  bool as_gloo = false;
  bool standalone = false;
  std::string master_addr = "127.0.0.1";
  std::optional<std::string> master_port;
  std::string run_id;
  std::string role = "default";
  std::string max_restarts = "0";
  std::string max_replacements = "0";
  bool tolerate_loss = false;
  std::string failure_grace = "0.5";
  std::string stop_grace = "30";
  std::string signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";
  std::optional<std::string> numa_binding;
  std::string log_dir;
  std::string redirects = "0";
  std::string tee = "0";
  std::optional<std::string> stdout_filters;
  std::optional<std::string> stderr_filters;
  std::string prefix_template;
  std::string local_ranks;
  std::optional<std::string> completion_shell;
  // torchrun's, without effect here.
  std::string start_method = "spawn";
  std::string monitor_interval = "0.1";
  std::string logs_specs;
  std::string event_log_handler;
  std::map<std::string, std::string> written;    // by flag, by which of its names it was given
  std::map<std::string, std::string> variables;  // by flag, those that set one

  // How a flag was given: the name that was written, or the variable; empty if it was not.
  std::string given(const std::string& flag) const;
};

// Parses the flags before the program, and returns the program and its arguments. Empty if the
// flags ask for help or for a completion script; `help` is that text then. Throws UsageError.
std::optional<std::vector<std::string>> parse_run_flags(const std::vector<std::string>& arguments,
                                                        RunFlags& flags, std::string& help);

}  // namespace paceline::app
